"""Small models of transformers with random weights, and runs that take them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.runtime.run_storage.hf_import import model_section

transformers = pytest.importorskip("transformers", reason="of the hf extra")

SHARED = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
}
MSCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}


def _rope(**keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 5000.0, **keys}}


MOE = {"num_experts_per_tok": 2, "router_jitter_noise": 0.0}
GEMMA = {"head_dim": 16, "num_hidden_layers": 4, "query_pre_attn_scalar": 24, "sliding_window": 5}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 9000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
EVERY_THIRD = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
GPT2_SHARES = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "layer_norm_epsilon": 1e-4}
SHARPER = {**LLAMA3, "mscale_all_dim": 0.7}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GPT_OSS = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "sliding_window": 5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    **_rope(**{**YARN, "truncate": False}),
}
GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "q_lora_rank": 20}
LIMITED = {**GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3}),
    "linear": ("Llama", _rope(rope_type="linear", factor=4.0)),
    # its longest row is that of the first training, and ours are longer
    "dynamic": ("Llama", {**_rope(rope_type="dynamic", factor=4.0), "max_position_embeddings": 16}),
    "yarn": ("Llama", _rope(**YARN)),
    "yarn-mscale": ("Qwen3", _rope(**MSCALE)),
    "phi3": ("Phi3", {**_rope(partial_rotary_factor=0.5, rope_type="default"), "sliding_window": 7}),
    "smollm": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {**MOE, "num_local_experts": 4, "sliding_window": None}),
    "gpt2": ("GPT2", {**GPT2, "n_inner": 48}),
    "olmo2": ("Olmo2", {}),
    # caps at which scores and logits of these weights are
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {**GEMMA, "layer_types": EVERY_THIRD, "rope_parameters": GEMMA3_ROPE}),
    "gpt2-untied": ("GPT2", {**GPT2, "tie_word_embeddings": False}),
    "deepseek-v2-lite": ("DeepseekV2", LATENT),
    "deepseek-v2": ("DeepseekV2", {**LATENT, **LIMITED, "rms_norm_eps": 1e-4}),
    "deepseek-v3": ("DeepseekV3", {**LATENT, **GROUPS, "n_shared_experts": 2}),
    "deepseek-v3-llama3": (
        "DeepseekV3",
        {**LATENT, **GROUPS, "rope_parameters": SHARPER, "rope_scaling": SHARPER},
    ),
    "deepseek-v2-yarn": ("DeepseekV2", {**LATENT, **_rope(**MSCALE)}),
    "deepseek-v3-yarn": ("DeepseekV3", {**LATENT, **GROUPS, **_rope(**MSCALE)}),
    "deepseek-v3-free": ("DeepseekV3", {**LATENT, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "deepseek-dense": ("DeepseekV3", {**LATENT, "first_k_dense_replace": 2}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-plain": ("GptOss", {**GPT_OSS, **_rope(rope_type="default"), "layer_types": EVERY_THIRD}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
}
LENGTH = 24
TOKENS = (torch.arange(2 * LENGTH) * 37 % 96).view(2, LENGTH)


def make(kind: str, folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    """A model of random weights and its checkpoint in small files."""
    family, more = KINDS[kind]
    shared = {key: SHARED[key] for key in GPT2_SHARES} if family == "GPT2" else SHARED
    config = getattr(transformers, f"{family}Config")(**{**shared, **more, **(changes or {})})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{family.removesuffix('Text')}{head}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
            parameter.normal_(1.0 if norm else 0.0, 0.1 if norm else 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    model.tie_weights()
    model.save_pretrained(folder, **{"max_shard_size": "20KB", **options})
    return model


def job_for(folder: Path, storage: Path, name: str, **sections: Any) -> JobConfig:
    return parse_job(
        {
            "name": name,
            "precision": "fp32",
            "storage": {"url": str(storage)},
            "data": {"sequence_length": LENGTH, "global_batch": 2, "source": "memmap", "path": "/unused"},
            "model": model_section(folder),
            **sections,
        }
    )


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
