"""Parameters of OLMo-2, and how each is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from picotron_ray.models.decoder import table as parts
from picotron_ray.models.decoder import tensor_plan as plans
from picotron_ray.models.parameters import ParameterSpec

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

WIDE_NORMS: plans.TensorPlan = (
    ("layers.*.attention.q_norm", "cut_norm"),
    ("layers.*.attention.k_norm", "cut_norm"),
)


def block(config: ModelConfig, layer: int) -> parts.Specs:
    """Parameters of one block, in the module's own order."""
    at, hidden = f"layers.{layer}", config.hidden_size
    return [
        *parts.projections(config, layer, biased=False),
        parts.output_projection(config, layer),
        parts.norm(f"{at}.attention.q_norm.weight", config.query_width, layer=layer, tp_dim=0),
        parts.norm(f"{at}.attention.k_norm.weight", config.key_width, layer=layer, tp_dim=0),
        parts.norm(f"{at}.attention_norm.weight", hidden, layer=layer),
        *parts.swiglu(config, layer, f"{at}.mlp", config.intermediate_size),
        parts.norm(f"{at}.mlp_norm.weight", hidden, layer=layer),
    ]


def parameter_table(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All parameters of the uncut model, in ``named_parameters`` order."""
    return parts.decoder_table(config, block, [parts.norm("norm.weight", config.hidden_size, part="head")])


def tensor_plan(config: ModelConfig) -> plans.TensorPlan:
    """Styles by which tensor and sequence parallelism cut each module."""
    return plans.decoder_plan(config, plans.NORMS, plans.ATTENTION, WIDE_NORMS, plans.SWIGLU)


def fused_modules(config: ModelConfig) -> tuple[str, ...]:
    """Modules with projections of one input that ``fuse()`` makes one product."""
    return (*plans.ATTENTION_MODULES, *plans.swiglu_modules(config))


def compiled_functions(config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Functions that can be compiled by themselves; no norm follows a residual sum here."""
    return {"activation": ("layers.*.mlp", "activation")}
