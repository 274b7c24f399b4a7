"""Hugging Face's names of the tensors that ours covers, and the config of an export. Torch-free.

Llama 2 and 3, SmolLM, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE; what GPT-2 calls things is in `hf_gpt2`,
and how a config is read in `hf_config`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.errors import ConfigError
from picotron_ray.models.huggingface import gpt2
from picotron_ray.models.huggingface.config import DEFAULTS, model_type
from picotron_ray.models.huggingface.gpt2 import Held
from picotron_ray.models.parameters import parameter_table

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
_FREQUENCIES = "rotary_emb.inv_freq"
# What an export takes over from the config of the checkpoint that was imported, as it was.
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
# (router, experts, gate, up, down) within a layer
_MIXTURES = {
    "MixtralForCausalLM": ("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    "Qwen3MoeForCausalLM": ("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
}


def architecture_of(model: ModelConfig, imported: Mapping[str, Any] | None = None) -> str:
    """The architecture that a model is exported as.

    Args:
        imported: config.json of the checkpoint that it began as. A Mistral without its window computes what
            a Llama does; it stays a Mistral.

    Raises ConfigError for what none of them has.
    """
    moe = model.moe
    if model.builder is not None:
        raise ConfigError("model.builder: saw a model of your own, expected one of ours; export it yourself")
    if model.is_gpt2:
        return gpt2.ARCHITECTURE
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
        mistral = model.sliding_window or (imported or {}).get("architectures") == ["MistralForCausalLM"]
        found = "MistralForCausalLM" if mistral else "LlamaForCausalLM"
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
    if architecture == gpt2.ARCHITECTURE:
        yield from gpt2.held(model, names)
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
    """Tensors that a checkpoint may hold besides, as transformers ignores them.

    A tied head that is stored all the same; the rotary frequencies that older files of Llama hold; GPT-2's
    masks.
    """
    found = {"lm_head.weight"} if model.tie_embeddings else set()
    if model.is_gpt2:
        return found | gpt2.masks(model, names)
    blocks = {f"model.layers.{layer}.self_attn.{_FREQUENCIES}" for layer in range(model.layers)}
    return found | blocks | {f"model.{_FREQUENCIES}"}


def _expert_names(model: ModelConfig, architecture: str, inner: str) -> Iterator[str]:
    router, experts, *matrices = _MIXTURES[architecture]
    if inner == "mlp.router.weight":
        yield f"{router}.weight"
        return
    name = dict(zip(("gate", "up", "down"), matrices, strict=True))[inner.removeprefix("mlp.experts.")]
    for number in range(model.moe.experts):
        yield f"{experts}.{number}.{name}.weight"


# --- config.json -----------------------------------------------------------------------------------------


def hf_config(
    model: ModelConfig,
    length: int,
    dtype: str,
    imported: Mapping[str, Any] | None = None,
    document_end: int | None = None,
) -> dict[str, Any]:
    """config.json for an exported model.

    Args:
        length: longest row that it was trained on; what was imported may say more, and GPT-2's own table of
            positions says it otherwise.
        dtype: of the tensors, ``float32`` or ``bfloat16``.
        imported: config.json of the checkpoint that it began as; None: it began from random weights.
        document_end: the id that ends a document in the data of a model that was not imported.

    Raises ConfigError for a model that none of the architectures has.
    """
    if imported is None:  # a key that is left out would mean ids of the architecture's own tokenizer
        kept = {"bos_token_id": None, "eos_token_id": document_end, "pad_token_id": None}
    else:
        kept = {key: imported[key] for key in _KEPT if key in imported}
    architecture = architecture_of(model, imported)
    if model.is_gpt2:
        return {**gpt2.hf_config(model, dtype), **kept}
    found = _hf_config(model, architecture, length, dtype)
    if imported is not None:
        longest = imported.get("max_position_embeddings", DEFAULTS[architecture]["max_position_embeddings"])
        found["max_position_embeddings"] = max(length, longest)
    return {**found, **kept}


def _hf_config(model: ModelConfig, architecture: str, length: int, dtype: str) -> dict[str, Any]:
    moe = model.moe
    found: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type(architecture),
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
