"""config.json of DeepSeek-V2 and V3. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from picotron_ray.models.huggingface.config_reader import Keys, refuse
from picotron_ray.models.huggingface.decoder import BASE_DEFAULTS, base_config
from picotron_ray.models.huggingface.rope import rope_keys

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
_LATENT: dict[str, Any] = {
    "num_key_value_heads": None,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    V2: {
        **BASE_DEFAULTS,
        **_LATENT,
        "vocab_size": 102400,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "aux_loss_alpha": 0.001,
    },
    V3: {
        **BASE_DEFAULTS,
        **_LATENT,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
    },
}
"""Values that transformers takes for absent keys, by architecture; those that decide what is computed."""

_ALIASES = {V2: {"num_experts": "n_routed_experts"}, V3: {"num_local_experts": "n_routed_experts"}}
# Keys that must have these values where they are there at all; anything else is not what ours computes.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "pretraining_tp": (1, None),
    "rope_interleave": (True, None),
    "quantization_config": (None,),
}
_FIXED_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    V2: {"norm_topk_prob": (False, None), "scoring_func": ("softmax",)},
    V3: {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
}
_SHARPER = "mscale_all_dim"


def model_keys(architecture: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Our ``model`` section for its config.json. Raises ConfigError, one line that names the key."""
    keys = Keys(hf, DEFAULTS[architecture], _ALIASES[architecture])
    keys.fixed({**_FIXED, **_FIXED_OF[architecture]})
    sharper = _sharper(hf)
    heads = keys.whole("num_attention_heads")
    keys.whole("max_position_embeddings")  # an export writes it back
    latent = {key: keys.whole(key) for key in _LATENT if key not in ("num_key_value_heads", "q_lora_rank")}
    return {
        "family": "deepseek",
        "vocab_size": keys.whole("vocab_size"),
        "hidden_size": keys.whole("hidden_size"),
        "intermediate_size": keys.whole("intermediate_size"),
        "layers": keys.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": keys.whole_or_null("num_key_value_heads") or heads,
        "norm_eps": keys.number("rms_norm_eps"),
        "tie_embeddings": keys.flag("tie_word_embeddings"),
        **rope_keys(hf, keys),
        "mla": {"q_lora_rank": keys.whole_or_null("q_lora_rank"), **latent, **sharper},
        **_mixture_keys(architecture, keys),
    }


def _sharper(hf: Mapping[str, Any]) -> dict[str, float]:
    """The coefficient by which stretched positions make attention sharper."""
    found: dict[str, float] = {}
    for place in ("rope_scaling", "rope_parameters"):
        given = hf.get(place)
        kind = given.get("rope_type", given.get("type", "default")) if isinstance(given, dict) else "default"
        if isinstance(given, dict) and kind != "default" and given.get(_SHARPER):
            found = {_SHARPER: Keys(given, {}, inside=f"{place}.").number(_SHARPER)}
    return found


def _mixture_keys(architecture: str, keys: Keys) -> dict[str, Any]:
    """The section ``moe``; nothing where every block is dense."""
    first, layers = keys.get("first_k_dense_replace"), keys.whole("num_hidden_layers")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise refuse("first_k_dense_replace", first, "a whole number of at least 0")
    if first >= layers:
        return {}
    inner = keys.whole("moe_intermediate_size")
    limited = architecture == V3 or keys.get("topk_method") == "group_limited_greedy"
    if architecture == V2 and not limited and keys.get("topk_method") != "greedy":
        raise refuse("topk_method", keys.get("topk_method"), "greedy or group_limited_greedy")
    groups = keys.whole("n_group") if limited else 1
    found: dict[str, Any] = {
        "experts": keys.whole("n_routed_experts"),
        "top_k": keys.whole("num_experts_per_tok"),
        "intermediate_size": inner,
        "shared_intermediate_size": inner * keys.whole("n_shared_experts"),
        "scaling": keys.number("routed_scaling_factor"),
        "first_dense_layers": first,
    }
    if groups > 1:
        score = "max" if architecture == V2 else "top-2"
        found |= {"groups": groups, "top_k_groups": keys.whole("topk_group"), "group_score": score}
    if architecture == V2:
        loss = {"balance": "loss", "loss_coefficient": keys.number("aux_loss_alpha", least=0.0)}
        return {"moe": {**found, "router": "softmax", "normalize": False, **loss}}
    normalize = keys.flag("norm_topk_prob")
    return {"moe": {**found, "router": "sigmoid", "normalize": normalize, "balance": "bias"}}


def hf_config(model: ModelConfig, architecture: str, length: int) -> dict[str, Any]:
    """Keys of config.json that say what is computed."""
    moe, mla = model.moe, model.mla
    found = {
        **base_config(model, length),
        **mla.model_dump(exclude={_SHARPER}),
        "head_dim": mla.qk_rope_head_dim,  # as transformers sets it, of the part with positions
    }
    if mla.mscale_all_dim:
        found["rope_scaling"] |= {_SHARPER: mla.mscale_all_dim}
    if architecture == V3:
        found |= {"rope_interleave": True, "num_nextn_predict_layers": 0}
    if not moe.experts:
        return {**found, "first_k_dense_replace": model.layers, "num_experts_per_tok": 1}
    found |= {
        "first_k_dense_replace": moe.first_dense_layers,
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_intermediate_size // moe.intermediate_size,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "n_group": moe.groups,
        "topk_group": moe.top_k_groups,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scaling,
        "scoring_func": moe.router,
    }
    if architecture == V3:
        return {**found, "topk_method": "noaux_tc"}
    method = "group_limited_greedy" if moe.groups > 1 else "greedy"
    return {**found, "topk_method": method, "aux_loss_alpha": moe.loss_coefficient}
