"""Tensors and config.json of Llama 2 and 3, SmolLM, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from picotron_ray.errors import ConfigError
from picotron_ray.models.families.llama.huggingface_config import DEFAULTS, model_keys
from picotron_ray.models.families.llama.table import parameter_table
from picotron_ray.models.huggingface.decoder import ENDS, PROJECTIONS, base_config, frequencies
from picotron_ray.models.huggingface.mapping import Held, HuggingFaceMapping

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

_BLOCK = {
    **PROJECTIONS,
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
# (router, experts, gate, up, down) within a layer
_MIXTURES = {
    "MixtralForCausalLM": ("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    "Qwen3MoeForCausalLM": ("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
}


def architecture_of(model: ModelConfig, imported: Mapping[str, Any] | None) -> str:
    """The architecture that a model is exported as. Raises ConfigError for a model that none has."""
    moe = model.moe
    refused = {
        "moe.shared_intermediate_size": moe.shared_intermediate_size,
        "moe.router": moe.router != "softmax" and moe.router,
        "moe.balance": moe.balance == "bias" and moe.balance,
        "moe.groups": moe.groups > 1 and moe.groups,
        "moe.scaling": moe.scaling != 1.0 and moe.scaling,
    }
    for key, value in refused.items() if moe.experts else ():
        if value:
            raise ConfigError(f"model.{key}: saw {value}, which none of {', '.join(_MIXTURES)} has")
    if moe.experts:
        found = "Qwen3MoeForCausalLM" if model.qk_norm else "MixtralForCausalLM"
        if found == "MixtralForCausalLM" and not moe.normalize:
            raise ConfigError("model.moe.normalize: saw false, which Mixtral cannot express")
    elif model.qk_norm:
        found = "Qwen3ForCausalLM"
    elif model.qkv_bias:
        found = "Qwen2ForCausalLM"
    else:
        mistral = model.sliding_window or (imported or {}).get("architectures") == ["MistralForCausalLM"]
        found = "MistralForCausalLM" if mistral else "LlamaForCausalLM"
    takes_bias = found == "Qwen2ForCausalLM"
    if model.qkv_bias and not takes_bias:
        raise ConfigError(f"model.qkv_bias: saw true, which {found} does not have without an output bias")
    if model.sliding_window and found not in ("MistralForCausalLM", "MixtralForCausalLM"):
        raise ConfigError(f"model.sliding_window: saw {model.sliding_window}, expected null for {found}")
    return found


def tensors(model: ModelConfig, architecture: str, names: Collection[str] = ()) -> Iterator[Held]:
    """Tensors of a checkpoint with our parameters that each holds; each parameter comes once."""
    for spec in parameter_table(model):
        if spec.layer is None:
            yield Held((spec.name,), (ENDS[spec.name],))
            continue
        at = f"model.layers.{spec.layer}"
        inner = spec.name.removeprefix(f"layers.{spec.layer}.")
        if inner.startswith("mlp.") and model.moe.experts:
            theirs = tuple(f"{at}.{name}" for name in _expert_names(model, architecture, inner))
            yield Held((spec.name,), theirs, stacked=spec.expert)
        else:
            stem, _, leaf = inner.rpartition(".")
            yield Held((spec.name,), (f"{at}.{_BLOCK[stem]}.{leaf}",))


def _expert_names(model: ModelConfig, architecture: str, inner: str) -> Iterator[str]:
    router, experts, *matrices = _MIXTURES[architecture]
    if inner == "mlp.router.weight":
        yield f"{router}.weight"
        return
    name = dict(zip(("gate", "up", "down"), matrices, strict=True))[inner.removeprefix("mlp.experts.")]
    for number in range(model.moe.experts):
        yield f"{experts}.{number}.{name}.weight"


def hf_config(model: ModelConfig, architecture: str, length: int) -> dict[str, Any]:
    """Keys of config.json that say what is computed."""
    moe = model.moe
    found = {**base_config(model, length), "sliding_window": model.sliding_window}
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        found["use_sliding_window"] = False
    if moe.experts:
        experts = "num_local_experts" if architecture == "MixtralForCausalLM" else "num_experts"
        found |= {
            "intermediate_size": moe.intermediate_size,
            experts: moe.experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.intermediate_size,
            "norm_topk_prob": moe.normalize,
            "router_aux_loss_coef": moe.loss_coefficient,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return found


HUGGINGFACE = HuggingFaceMapping(
    defaults=DEFAULTS,
    model_types={
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "MixtralForCausalLM": "mixtral",
        "Qwen3MoeForCausalLM": "qwen3_moe",
    },
    model_keys=model_keys,
    architecture_of=architecture_of,
    tensors=tensors,
    ignored=lambda model, names: frequencies(model),
    config=hf_config,
)
