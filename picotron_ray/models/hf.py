"""Hugging Face's names and configs of the architectures that ours covers, both ways. Torch-free.

Llama 2 and 3, SmolLM, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE; what GPT-2 calls things is in `hf_gpt2`.
What a checkpoint's config.json asks for is either expressed in our config or refused in one line that names
the key: a model that is nearly the same gives nonsense without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from picotron_ray.config.model import ModelConfig
from picotron_ray.errors import ConfigError
from picotron_ray.models import hf_gpt2
from picotron_ray.models.hf_gpt2 import Held
from picotron_ray.models.plan import parameter_table

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    hf_gpt2.ARCHITECTURE,
)
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_ENDS = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
# (router, experts, gate, up, down) within a layer
_MIXTURES = {
    "MixtralForCausalLM": ("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    "Qwen3MoeForCausalLM": ("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
}
# Keys that must have these values where they are there at all; anything else is not what ours computes.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "pretraining_tp": (1,),
    "router_jitter_noise": (0.0,),
    "use_sliding_window": (False,),
}


def architecture_of(model: ModelConfig) -> str:
    """The architecture that a model is exported as.

    Raises ConfigError for what none of them has.
    """
    moe = model.moe
    if model.builder is not None:
        raise ConfigError("model.builder: saw a model of your own, expected one of ours; export it yourself")
    if model.is_gpt2:
        return hf_gpt2.ARCHITECTURE
    refused = {
        "moe.shared_intermediate_size": moe.shared_intermediate_size,
        "moe.router": moe.router != "softmax" and moe.router,
        "moe.balance": moe.balance == "bias" and moe.balance,
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
        found = "MistralForCausalLM" if model.sliding_window else "LlamaForCausalLM"
    takes_bias = found == "Qwen2ForCausalLM"
    if model.qkv_bias and not takes_bias:
        raise ConfigError(f"model.qkv_bias: saw true, which {found} does not have without an output bias")
    if model.sliding_window and found not in ("MistralForCausalLM", "MixtralForCausalLM"):
        raise ConfigError(f"model.sliding_window: saw {model.sliding_window}, expected null for {found}")
    return found


def tensors(model: ModelConfig, architecture: str, names: Collection[str] = ()) -> Iterator[Held]:
    """Which tensors of a checkpoint hold which of our parameters; each parameter comes once.

    Args:
        names: of the tensors in a checkpoint that is read, where those differ from file to file.
    """
    if architecture == hf_gpt2.ARCHITECTURE:
        yield from hf_gpt2.held(model, names)
        return
    for spec in parameter_table(model):
        if spec.layer is None:
            yield Held((spec.name,), (_ENDS[spec.name],))
            continue
        at = f"model.layers.{spec.layer}"
        inner = spec.name.removeprefix(f"layers.{spec.layer}.")
        if inner.startswith("mlp.") and model.moe.experts:
            theirs = tuple(f"{at}.{name}" for name in _expert_names(model, architecture, inner))
            yield Held((spec.name,), theirs, stacked=spec.expert)
        else:
            stem, _, leaf = inner.rpartition(".")
            yield Held((spec.name,), (f"{at}.{_BLOCK[stem]}.{leaf}",))


def ignored(model: ModelConfig, names: Collection[str]) -> set[str]:
    """Tensors that a checkpoint may hold besides: a tied head that is stored all the same, GPT-2's masks."""
    tied = {"lm_head.weight"} if model.tie_embeddings else set()
    return tied | (hf_gpt2.masks(model, names) if model.is_gpt2 else set())


def _expert_names(model: ModelConfig, architecture: str, inner: str) -> Iterator[str]:
    router, experts, *matrices = _MIXTURES[architecture]
    if inner == "mlp.router.weight":
        yield f"{router}.weight"
        return
    name = dict(zip(("gate", "up", "down"), matrices, strict=True))[inner.removeprefix("mlp.experts.")]
    for number in range(model.moe.experts):
        yield f"{experts}.{number}.{name}.weight"


# --- config.json -----------------------------------------------------------------------------------------


def model_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Our ``model`` section for a checkpoint's config.json.

    Raises ConfigError, one line that names the key of config.json.
    """
    try:
        return _keys(hf)
    except KeyError as error:
        raise ConfigError(f"config.json: {error.args[0]} is missing") from error


def _keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    architecture = next(iter(hf.get("architectures") or []), None)
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"config.json: architectures: saw {architecture}, expected one of {', '.join(ARCHITECTURES)}"
        )
    is_gpt2 = architecture == hf_gpt2.ARCHITECTURE
    for key, allowed in (hf_gpt2.FIXED if is_gpt2 else _FIXED).items():
        if key in hf and hf[key] not in allowed:
            raise ConfigError(f"config.json: {key}: saw {hf[key]!r}, expected {allowed[0]!r}")
    if is_gpt2:
        return hf_gpt2.model_keys(hf)
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    if hf.get("attention_bias") and not is_qwen2:
        raise ConfigError("config.json: attention_bias: saw True, expected False: biases are Qwen2's only")
    heads = hf["num_attention_heads"]
    found: dict[str, Any] = {
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "layers": hf["num_hidden_layers"],
        "heads": heads,
        "kv_heads": hf.get("num_key_value_heads") or heads,
        "norm_eps": hf["rms_norm_eps"],
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        **_rope_keys(hf),
    }
    if hf.get("head_dim") and hf["head_dim"] * heads != hf["hidden_size"]:
        found["head_dim"] = hf["head_dim"]
    if is_qwen2:
        found["qkv_bias"] = True
    if architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        found["qk_norm"] = True
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM") and hf.get("sliding_window"):
        found["sliding_window"] = hf["sliding_window"]
    if architecture in _MIXTURES:
        found["moe"] = _mixture_keys(hf, architecture)
    else:
        found["intermediate_size"] = hf["intermediate_size"]
    return found


def _mixture_keys(hf: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    is_mixtral = architecture == "MixtralForCausalLM"
    experts = "num_experts" if "num_experts" in hf else "num_local_experts"  # transformers 5 has one name
    return {
        "experts": hf[experts],
        "top_k": hf["num_experts_per_tok"],
        "intermediate_size": hf["intermediate_size"] if is_mixtral else hf["moe_intermediate_size"],
        "normalize": True if is_mixtral else bool(hf.get("norm_topk_prob", False)),
        "loss_coefficient": hf.get("router_aux_loss_coef", 0.001),
    }


def _rope_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    """From ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    given = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = given.get("rope_theta", hf.get("rope_theta", 10_000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise ConfigError(f"config.json: rope_type: saw {kind!r}, expected default or llama3")
    return {
        "rope_theta": theta,
        "rope_scaling": {
            "factor": given["factor"],
            "low_frequency_factor": given["low_freq_factor"],
            "high_frequency_factor": given["high_freq_factor"],
            "original_length": given["original_max_position_embeddings"],
        },
    }


def hf_config(model: ModelConfig, length: int, dtype: str) -> dict[str, Any]:
    """config.json for an exported model.

    Args:
        length: longest row that it was trained on; GPT-2's own table of positions says it otherwise.
        dtype: of the tensors, ``float32`` or ``bfloat16``.

    Raises ConfigError for a model that none of the architectures has.
    """
    architecture, moe = architecture_of(model), model.moe
    if model.is_gpt2:
        return hf_gpt2.hf_config(model, dtype)
    kinds = {"Qwen3MoeForCausalLM": "qwen3_moe"}
    found: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kinds.get(architecture, architecture.removesuffix("ForCausalLM").lower()),
        "dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": moe.intermediate_size if moe.experts else model.intermediate_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": length,
        "rope_theta": model.rope_theta,
        "rope_scaling": _scaling(model),
        "attention_bias": False,
        "sliding_window": model.sliding_window,
    }
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        found["use_sliding_window"] = False
    if moe.experts:
        experts = "num_local_experts" if architecture == "MixtralForCausalLM" else "num_experts"
        found |= {
            experts: moe.experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.intermediate_size,
            "norm_topk_prob": moe.normalize,
            "router_aux_loss_coef": moe.loss_coefficient,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return found


def _scaling(model: ModelConfig) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling.factor == 1.0:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_length,
    }
