"""Tensors and config.json of Llama 2 and 3, SmolLM, Mistral, Phi-3, Qwen2, Qwen3, Mixtral and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from picotron_ray.errors import ConfigError
from picotron_ray.models.families.llama.huggingface_config import DEFAULTS, PHI3, WINDOWED, model_keys
from picotron_ray.models.families.llama.table import parameter_table
from picotron_ray.models.huggingface.decoder import ENDS, PROJECTIONS, base_config, frequencies
from picotron_ray.models.huggingface.mapping import Held, HuggingFaceMapping
from picotron_ray.models.huggingface.rope import scaling_of

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

_BLOCK = {
    **PROJECTIONS,
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
_QKV = ("self_attn.qkv_proj", ("attention.wq", "attention.wk", "attention.wv"))
_GATE_UP = ("mlp.gate_up_proj", ("mlp.gate", "mlp.up"))
# Of Phi-3: the tensor that a projection of ours is in, with what else of ours is.
_JOINED = {name: held for held in (_QKV, _GATE_UP) for name in held[1]}
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
        found = _plain_architecture(model, (imported or {}).get("architectures"))
    _check_taken(model, found)
    return found


def _plain_architecture(model: ModelConfig, imported: Any) -> str:
    """One of those without experts, biases or norms of heads."""
    if model.partial_rotary_factor != 1.0 or (imported == [PHI3] and not scaling_of(model)):
        return PHI3
    mistral = model.sliding_window or imported == ["MistralForCausalLM"]
    return "MistralForCausalLM" if mistral else "LlamaForCausalLM"


def _check_taken(model: ModelConfig, found: str) -> None:
    if model.qkv_bias and found != "Qwen2ForCausalLM":
        raise ConfigError(f"model.qkv_bias: saw true, which {found} does not have without an output bias")
    if model.sliding_window and found not in WINDOWED:
        raise ConfigError(f"model.sliding_window: saw {model.sliding_window}, expected null for {found}")
    part = model.partial_rotary_factor
    if part != 1.0 and found != PHI3:
        raise ConfigError(f"model.partial_rotary_factor: saw {part:g}, expected 1 for {found}")
    if found == PHI3 and scaling_of(model):
        kind = model.rope_scaling.type
        raise ConfigError(
            f"model.rope_scaling.type: saw {kind} with model.partial_rotary_factor={part:g},"
            f" which {found} does not have; drop one"
        )


def tensors(model: ModelConfig, architecture: str, names: Collection[str] = ()) -> Iterator[Held]:
    """Tensors of a checkpoint with our parameters that each holds; each parameter comes once."""
    for spec in parameter_table(model):
        if spec.layer is None:
            yield Held((spec.name,), (ENDS[spec.name],))
            continue
        at = f"model.layers.{spec.layer}"
        inner = spec.name.removeprefix(f"layers.{spec.layer}.")
        stem, _, leaf = inner.rpartition(".")
        if architecture == PHI3 and stem in _JOINED:
            theirs, parts = f"{at}.{_JOINED[stem][0]}.{leaf}", _JOINED[stem][1]
            if stem == parts[0]:
                yield Held(tuple(f"layers.{spec.layer}.{part}.{leaf}" for part in parts), (theirs,))
        elif inner.startswith("mlp.") and model.moe.experts:
            names_of_all = tuple(f"{at}.{name}" for name in _expert_names(model, architecture, inner))
            yield Held((spec.name,), names_of_all, stacked=spec.expert)
        else:
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
    if architecture == PHI3:
        found |= {"partial_rotary_factor": model.partial_rotary_factor, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
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
        PHI3: "phi3",
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
