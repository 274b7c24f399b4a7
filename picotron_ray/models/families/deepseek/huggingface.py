"""Tensors and config.json of DeepseekV2ForCausalLM and DeepseekV3ForCausalLM. Torch-free.

Their rotary positions turn neighbours (2i, 2i + 1), ours halves (i, i + n/2): the rows that give the turned
part of queries and of the shared key are put in our order, and back. Scores are sums over that part, so they
stay.

Other tokens than the next are not predicted: tensors of V3's further blocks for that are left out, as
transformers leaves them out, and an export says that there are none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from picotron_ray.errors import ConfigError
from picotron_ray.models.families.deepseek.huggingface_config import DEFAULTS, V2, V3, hf_config, model_keys
from picotron_ray.models.families.deepseek.table import is_mixture, parameter_table
from picotron_ray.models.huggingface.decoder import ENDS, frequencies
from picotron_ray.models.huggingface.mapping import Held, HuggingFaceMapping

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import LatentConfig, ModelConfig

_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    **{
        f"mlp.{inside}{ours}": f"mlp.{theirs}{ours}_proj"
        for inside, theirs in (("", ""), ("shared.", "shared_experts."))
        for ours in ("gate", "up", "down")
    },
}
_ROUTER = {"mlp.router.weight": "mlp.gate.weight", "mlp.router.bias": "mlp.gate.e_score_correction_bias"}


def architecture_of(model: ModelConfig, imported: Mapping[str, Any] | None) -> str:
    """The architecture that a model is exported as. Raises ConfigError for a model that none has."""
    moe = model.moe
    if not moe.experts:
        return V3 if (imported or {}).get("architectures") == [V3] else V2
    found = V2 if moe.router == "softmax" else V3
    each = moe.experts // moe.groups
    wrong: dict[str, tuple[Any, bool]] = {
        "balance": (moe.balance, (moe.balance == "bias") == (found == V2)),
        "normalize": (str(moe.normalize).lower(), moe.normalize and found == V2),
        "group_score": (
            moe.group_score,
            (moe.groups > 1 and (moe.group_score == "max") != (found == V2)),
        ),
        "groups": (moe.groups, found == V3 and each < 2),
        "shared_intermediate_size": (
            moe.shared_intermediate_size,
            not moe.shared_intermediate_size or moe.shared_intermediate_size % moe.intermediate_size != 0,
        ),
    }
    for key, (value, met) in wrong.items():
        if met:
            raise ConfigError(
                f"model.moe.{key}: saw {value}, which {found} (router={moe.router}) cannot have"
            )
    return found


def tensors(model: ModelConfig, architecture: str, names: Collection[str] = ()) -> Iterator[Held]:
    """Tensors of a checkpoint with our parameters that each holds; each parameter comes once."""
    turned = {name: _turned_rows(model.mla, name, model.heads) for name in ("wq", "wkv_a")}
    for spec in parameter_table(model):
        if spec.layer is None:
            yield Held((spec.name,), (ENDS[spec.name],))
            continue
        at = f"model.layers.{spec.layer}"
        inner = spec.name.removeprefix(f"layers.{spec.layer}.")
        if spec.expert:
            name = inner.removeprefix("mlp.experts.")
            theirs = (f"{at}.mlp.experts.{n}.{name}_proj.weight" for n in range(model.moe.experts))
            yield Held((spec.name,), tuple(theirs), stacked=True)
        elif inner in _ROUTER:
            yield Held((spec.name,), (f"{at}.{_ROUTER[inner]}",))
        else:
            stem, _, leaf = inner.rpartition(".")
            whole = "q_proj" if model.mla.q_lora_rank is None else "q_b_proj"
            theirs_name = f"self_attn.{whole}" if stem == "attention.wq" else _BLOCK[stem]
            rows = turned.get(stem.removeprefix("attention."))
            yield Held((spec.name,), (f"{at}.{theirs_name}.{leaf}",), rows=rows)


def _turned_rows(mla: LatentConfig, name: str, heads: int) -> tuple[int, ...]:
    """Rows of a tensor in our order: of each head, or of the one shared key, those that are turned last."""
    count = heads if name == "wq" else 1
    before = mla.qk_nope_head_dim if name == "wq" else mla.kv_lora_rank
    width, order = before + mla.qk_rope_head_dim, [*range(before)]
    order += [before + row for first in (0, 1) for row in range(first, mla.qk_rope_head_dim, 2)]
    return tuple(head * width + row for head in range(count) for row in order)


def ignored(model: ModelConfig, names: Collection[str]) -> set[str]:
    """Rotary frequencies of older files, and blocks after the last that predict further tokens."""
    further = {
        name
        for name in names
        for number in [name.removeprefix("model.layers.").partition(".")[0]]
        if name.startswith("model.layers.") and number.isdecimal() and int(number) >= model.layers
    }
    return frequencies(model) | (further if _is_v3(model) else set())


def _is_v3(model: ModelConfig) -> bool:
    return is_mixture(model, model.layers - 1) and model.moe.router == "sigmoid"


HUGGINGFACE = HuggingFaceMapping(
    defaults=DEFAULTS,
    model_types={V2: "deepseek_v2", V3: "deepseek_v3"},
    model_keys=model_keys,
    architecture_of=architecture_of,
    tensors=tensors,
    ignored=ignored,
    config=hf_config,
)
