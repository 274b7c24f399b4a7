"""Parameters of a Llama-style decoder, and how each is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from picotron_ray.models.decoder import table as parts
from picotron_ray.models.decoder import tensor_plan as plans
from picotron_ray.models.parameters import ParameterSpec

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


def block(config: ModelConfig, layer: int) -> parts.Specs:
    """Parameters of one block, in the module's own order."""
    at, hidden = f"layers.{layer}", config.hidden_size
    head_norms = ("q_norm", "k_norm") if config.qk_norm else ()
    return [
        parts.norm(f"{at}.attention_norm.weight", hidden, layer=layer),
        *parts.projections(config, layer, biased=config.qkv_bias),
        parts.output_projection(config, layer),
        *(parts.norm(f"{at}.attention.{name}.weight", config.head_size, layer=layer) for name in head_norms),
        parts.norm(f"{at}.mlp_norm.weight", hidden, layer=layer),
        *(
            parts.mixture(config, layer)
            if config.moe.experts
            else parts.swiglu(config, layer, f"{at}.mlp", config.intermediate_size)
        ),
    ]


def parameter_table(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All parameters of the uncut model, in ``named_parameters`` order."""
    return parts.decoder_table(config, block, [parts.norm("norm.weight", config.hidden_size, part="head")])


def tensor_plan(config: ModelConfig) -> plans.TensorPlan:
    """Styles by which tensor and sequence parallelism cut each module."""
    return plans.decoder_plan(
        config,
        plans.NORMS,
        plans.ATTENTION,
        plans.HEAD_NORMS if config.qk_norm else (),
        plans.MIXTURE if config.moe.experts else plans.SWIGLU,
    )


def fused_modules(config: ModelConfig) -> tuple[str, ...]:
    """Modules with projections of one input that ``fuse()`` makes one product."""
    return (*plans.ATTENTION_MODULES, *plans.swiglu_modules(config))


def compiled_functions(config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Functions that can be compiled by themselves; experts get other numbers of rows each time."""
    found = {"norm": ("layers.*", "added_norm")}
    return found if config.moe.experts else {**found, "activation": ("layers.*.mlp", "activation")}
