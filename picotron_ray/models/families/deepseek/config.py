"""Rules of a config with ``model.family=deepseek``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from picotron_ray.config.problem import Problem
from picotron_ray.models.decoder.rules import MIXED, unlearned_positions, untaken

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

UNTAKEN = ("head_dim", "qkv_bias", "qk_norm", "sliding_window", "partial_rotary_factor")


def rules(model: ModelConfig, sequence_length: int) -> Iterator[Problem]:
    """Mistakes in the ``model`` section."""
    yield from unlearned_positions(model)
    yield from untaken(model, (*UNTAKEN, *MIXED))
    mla, family = model.mla, ("model.family",)
    if not mla.kv_lora_rank:
        text = "saw 0 with model.family=deepseek, expected the width of the latent vector of keys and values"
        yield Problem("model.mla.kv_lora_rank", text, family)
        return
    if model.kv_heads != model.heads:
        text = f"saw {model.kv_heads} with model.family=deepseek, expected model.heads={model.heads}"
        yield Problem("model.kv_heads", text, ("model.heads", *family))
    if mla.qk_rope_head_dim % 2:
        text = f"saw {mla.qk_rope_head_dim}, expected an even number, as rotary positions turn pairs"
        yield Problem("model.mla.qk_rope_head_dim", text, ())
    if mla.v_head_dim > mla.head_size:
        text = f"saw {mla.v_head_dim}, expected at most qk_nope_head_dim + qk_rope_head_dim = {mla.head_size}"
        against = ("model.mla.qk_nope_head_dim", "model.mla.qk_rope_head_dim")
        yield Problem("model.mla.v_head_dim", f"{text}, the width that kernels get", against)
    if mla.mscale_all_dim and model.rope_scaling.factor == 1.0:
        text = (
            f"saw {mla.mscale_all_dim:g} with model.rope_scaling.factor=1, which stretches nothing; drop it"
        )
        yield Problem("model.mla.mscale_all_dim", text, ("model.rope_scaling.factor",))
    if model.moe.experts and model.moe.first_dense_layers >= model.layers:
        text = f"saw {model.moe.first_dense_layers}, expected fewer than model.layers={model.layers}"
        yield Problem(
            "model.moe.first_dense_layers", f"{text}; without mixtures say experts=0", ("model.layers",)
        )
