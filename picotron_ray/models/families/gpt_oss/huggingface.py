"""Tensors and config.json of GptOssForCausalLM. Torch-free.

Gate and up of all experts are one tensor there, in which their outputs take turns, and inputs come before
outputs. Published checkpoints keep the experts' matrices in MXFP4 (Open Compute Project 2023): 4 bits a value
and a scale for 32 of them, outputs before inputs. They are read as what they stand for, and exports are in
bf16 or fp32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from picotron_ray.models.families.gpt_oss.table import parameter_table
from picotron_ray.models.huggingface.config_reader import Keys, refuse
from picotron_ray.models.huggingface.decoder import (
    BASE_DEFAULTS,
    ENDS,
    PROJECTIONS,
    base_config,
    base_keys,
    frequencies,
)
from picotron_ray.models.huggingface.mapping import Held, HuggingFaceMapping
from picotron_ray.models.huggingface.windows import layer_types, window_keys

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

ARCHITECTURE = "GptOssForCausalLM"
DEFAULTS: dict[str, Any] = {
    **BASE_DEFAULTS,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "router_aux_loss_coef": 0.001,
}
_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers takes where rotary positions are not said."""
# Keys that must have these values where they are there at all; anything else is not what ours computes.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (True,),
    "attention_dropout": (0.0,),
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7.0,),
}
_BLOCK = {
    **PROJECTIONS,
    "attention": "self_attn",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.router": "mlp.router",
}
_LEAVES = {"logit_bias": "bias"}


def model_keys(architecture: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Our ``model`` section for its config.json. Raises ConfigError, one line that names the key."""
    keys = Keys(hf, DEFAULTS, {"num_experts": "num_local_experts"})
    keys.fixed(_FIXED)
    packed = hf.get("quantization_config")
    if packed is not None and (not isinstance(packed, dict) or packed.get("quant_method") != "mxfp4"):
        raise refuse("quantization_config", packed, "none, or quant_method mxfp4")
    said = hf.get("rope_parameters") or hf.get("rope_scaling")
    rope = base_keys(hf if said else {**hf, "rope_parameters": _ROPE}, keys)
    return {
        "family": "gpt_oss",
        **rope,
        **window_keys(keys, keys.whole("num_hidden_layers"), every=2),
        "moe": {
            "experts": keys.whole("num_local_experts"),
            "top_k": keys.whole("num_experts_per_tok"),
            "intermediate_size": keys.whole("intermediate_size"),
            "loss_coefficient": keys.number("router_aux_loss_coef", least=0.0),
        },
    }


def hf_config(model: ModelConfig, architecture: str, length: int) -> dict[str, Any]:
    """Keys of config.json that say what is computed."""
    found, moe = base_config(model, length), model.moe
    rope = found.pop("rope_scaling") or {"rope_type": "default"}
    return {
        **found,
        "attention_bias": True,
        "intermediate_size": moe.intermediate_size,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.loss_coefficient,
        "rope_scaling": {**rope, "rope_theta": model.rope_theta},
        "sliding_window": model.sliding_window,
        "layer_types": layer_types(model),
        "swiglu_limit": 7.0,
    }


def tensors(model: ModelConfig, architecture: str, names: Collection[str] = ()) -> Iterator[Held]:
    """Tensors of a checkpoint with our parameters that each holds; each parameter comes once."""
    for spec in parameter_table(model):
        if spec.layer is None:
            yield Held((spec.name,), (ENDS[spec.name],))
            continue
        at = f"model.layers.{spec.layer}"
        stem, _, leaf = spec.name.removeprefix(f"layers.{spec.layer}.").rpartition(".")
        if not spec.expert:
            yield Held((spec.name,), (f"{at}.{_BLOCK[stem]}.{_LEAVES.get(leaf, leaf)}",))
        elif not leaf.startswith("up"):  # that comes with gate
            yield _of_experts(spec.name, f"{at}.mlp.experts", leaf, names)


def _of_experts(name: str, at: str, leaf: str, names: Collection[str]) -> Held:
    """Matrices or biases of all experts, in the form in which a checkpoint has them."""
    which, _, kind = leaf.partition("_")
    both = which == "gate"
    ours = (name, name.replace(".experts.gate", ".experts.up")) if both else (name,)
    theirs = f"{at}.{'gate_up' if both else which}_proj"
    if kind:
        return Held(ours, (f"{theirs}_{kind}",), in_turns=both)
    if f"{theirs}_blocks" in names:
        return Held(ours, (f"{theirs}_blocks", f"{theirs}_scales"), in_turns=both, packed=True)
    return Held(ours, (theirs,), transposed=True, in_turns=both)


HUGGINGFACE = HuggingFaceMapping(
    defaults={ARCHITECTURE: DEFAULTS},
    model_types={ARCHITECTURE: "gpt_oss"},
    model_keys=model_keys,
    architecture_of=lambda model, imported: ARCHITECTURE,
    tensors=tensors,
    ignored=lambda model, names: frequencies(model),
    config=hf_config,
)
