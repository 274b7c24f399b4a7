"""Parameters of DeepSeek-V2 and V3, and how each is cut.

Tensor parallelism cuts heads: the projections out of the latent vectors by their outputs, the output
projection by its inputs. Those into the latent vectors are whole on every rank, as are their norms: each rank
computes the latent vectors of all tokens for its own heads, so that their gradients are partial and summed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from picotron_ray.models.decoder import table as parts
from picotron_ray.models.decoder import tensor_plan as plans
from picotron_ray.models.parameters import ParameterSpec

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

ATTENTION: plans.TensorPlan = (
    ("layers.*.attention", "gather_input"),
    ("layers.*.attention.wq_a", "whole"),
    ("layers.*.attention.q_norm", "whole"),
    ("layers.*.attention.wq", "colwise"),
    ("layers.*.attention.wkv_a", "whole"),
    ("layers.*.attention.kv_norm", "whole"),
    ("layers.*.attention.wkv_b", "colwise"),
    ("layers.*.attention.wo", "rowwise"),
)


def attention(config: ModelConfig, layer: int) -> parts.Specs:
    """Parameters of a block's attention, in the module's own order."""
    mla, hidden, at = config.mla, config.hidden_size, f"layers.{layer}.attention"

    def into(name: str, out: int, inner: int, tp_dim: int | None) -> ParameterSpec:
        return ParameterSpec(
            f"{at}.{name}.weight", (out, inner), layer, "block", tp_dim, True, config.init_std
        )

    found: parts.Specs = []
    if mla.q_lora_rank is not None:
        found += [
            into("wq_a", mla.q_lora_rank, hidden, None),
            parts.norm(f"{at}.q_norm.weight", mla.q_lora_rank, layer=layer),
        ]
    values = config.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return [
        *found,
        into("wq", config.query_width, mla.q_lora_rank or hidden, 0),
        into("wkv_a", mla.kv_lora_rank + mla.qk_rope_head_dim, hidden, None),
        parts.norm(f"{at}.kv_norm.weight", mla.kv_lora_rank, layer=layer),
        into("wkv_b", values, mla.kv_lora_rank, 0),
        parts.matrix(f"{at}.wo.weight", (hidden, config.value_width), 1, parts.out_std(config), layer=layer),
    ]


def is_mixture(config: ModelConfig, layer: int) -> bool:
    """Whether the hidden layer of a block is a mixture of experts."""
    return bool(config.moe.experts) and layer >= config.moe.first_dense_layers


def block(config: ModelConfig, layer: int) -> parts.Specs:
    """Parameters of one block, in the module's own order."""
    at, hidden = f"layers.{layer}", config.hidden_size
    return [
        parts.norm(f"{at}.attention_norm.weight", hidden, layer=layer),
        *attention(config, layer),
        parts.norm(f"{at}.mlp_norm.weight", hidden, layer=layer),
        *(
            parts.mixture(config, layer)
            if is_mixture(config, layer)
            else parts.swiglu(config, layer, f"{at}.mlp", config.intermediate_size)
        ),
    ]


def parameter_table(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All parameters of the uncut model, in ``named_parameters`` order."""
    return parts.decoder_table(config, block, [parts.norm("norm.weight", config.hidden_size, part="head")])


def tensor_plan(config: ModelConfig) -> plans.TensorPlan:
    """Styles by which tensor and sequence parallelism cut each module."""
    if not config.moe.experts:
        return plans.decoder_plan(config, plans.NORMS, ATTENTION, plans.SWIGLU)
    dense = plans.styles_at(plans.SWIGLU, range(config.moe.first_dense_layers))
    mixed = plans.styles_at(plans.MIXTURE, plans.mixture_layers(config))
    return plans.decoder_plan(config, plans.NORMS, ATTENTION, dense, mixed)


def fused_modules(config: ModelConfig) -> tuple[str, ...]:
    """Modules with projections of one input that ``fuse()`` makes one product."""
    return (*plans.ATTENTION_MODULES, *plans.swiglu_modules(config))


def compiled_functions(config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Functions that can be compiled by themselves; experts get other numbers of rows each time."""
    found = {"norm": ("layers.*", "added_norm")}
    return found if config.moe.experts else {**found, "activation": ("layers.*.mlp", "activation")}
