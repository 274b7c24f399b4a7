"""Rules of a config with ``model.family=gpt_oss``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from picotron_ray.config.problem import Problem
from picotron_ray.models.decoder.rules import mixed_windows, unlearned_positions, untaken

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

UNTAKEN = (
    "qkv_bias",
    "qk_norm",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "attention_softcap",
    "logit_softcap",
    "rope_local_theta",
)
UNTAKEN_MIXTURE = ("shared_intermediate_size", "router", "normalize", "scaling", "groups")


def rules(model: ModelConfig, sequence_length: int) -> Iterator[Problem]:
    """Mistakes in the ``model`` section."""
    yield from unlearned_positions(model)
    yield from untaken(model, UNTAKEN)
    yield from mixed_windows(model)
    moe = model.moe
    if not moe.experts:
        text = "saw 0 with model.family=gpt_oss, expected the number of its experts"
        yield Problem("model.moe.experts", text, ("model.family",))
        return
    for key in UNTAKEN_MIXTURE:
        if getattr(moe, key) != type(moe).model_fields[key].default:
            text = f"saw {getattr(moe, key)} with model.family=gpt_oss, which has none; drop it"
            yield Problem(f"model.moe.{key}", text, ("model.family",))
    if moe.balance == "bias":
        text = "saw bias with model.family=gpt_oss, whose router has a trained bias; use loss or none"
        yield Problem("model.moe.balance", text, ("model.family",))
