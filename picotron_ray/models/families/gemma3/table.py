"""Parameters of Gemma 3, and how each is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from picotron_ray.models.decoder import table as parts
from picotron_ray.models.decoder import tensor_plan as plans
from picotron_ray.models.parameters import ParameterSpec

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


def block(config: ModelConfig, layer: int) -> parts.Specs:
    """Parameters of one block, in the module's own order."""
    return parts.both_norms_block(config, layer, head_norms=True)


def parameter_table(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All parameters of the uncut model, in ``named_parameters`` order."""
    return parts.decoder_table(
        config, block, [parts.offset_norm("norm.weight", config.hidden_size, part="head")]
    )


def tensor_plan(config: ModelConfig) -> plans.TensorPlan:
    """Styles by which tensor and sequence parallelism cut each module."""
    return plans.decoder_plan(
        config, plans.NORMS, plans.POST_NORMS, plans.ATTENTION, plans.HEAD_NORMS, plans.SWIGLU
    )


def fused_modules(config: ModelConfig) -> tuple[str, ...]:
    """Modules with projections of one input that ``fuse()`` makes one product."""
    return (*plans.ATTENTION_MODULES, *plans.swiglu_modules(config))


def compiled_functions(config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Functions that can be compiled by themselves; no norm of ours adds before it here."""
    return {"activation": ("layers.*.mlp", "activation")}
