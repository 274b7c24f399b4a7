"""Parameters of gpt-oss, and how each is cut."""

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
    return [
        parts.norm(f"{at}.attention_norm.weight", hidden, layer=layer),
        ParameterSpec(f"{at}.attention.sinks", (config.heads,), layer, "block", 0, False, config.init_std),
        *parts.projections(config, layer, biased=True),
        parts.output_projection(config, layer),
        parts.bias(f"{at}.attention.wo.bias", hidden, None, layer),
        parts.norm(f"{at}.mlp_norm.weight", hidden, layer=layer),
        *parts.mixture(config, layer, biased=True),
    ]


def parameter_table(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All parameters of the uncut model, in ``named_parameters`` order."""
    return parts.decoder_table(config, block, [parts.norm("norm.weight", config.hidden_size, part="head")])


def tensor_plan(config: ModelConfig) -> plans.TensorPlan:
    """Styles by which tensor and sequence parallelism cut each module."""
    sinks: plans.TensorPlan = (("layers.*.attention", "sinks"),)
    return plans.decoder_plan(config, plans.NORMS, sinks, plans.ATTENTION, plans.MIXTURE)


def fused_modules(config: ModelConfig) -> tuple[str, ...]:
    """Modules with projections of one input that ``fuse()`` makes one product."""
    return (*plans.ATTENTION_MODULES, *plans.swiglu_modules(config))


def compiled_functions(config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Functions that can be compiled by themselves; experts get other numbers of rows each time."""
    return {"norm": ("layers.*", "added_norm")}
