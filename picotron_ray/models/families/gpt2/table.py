"""Parameters of GPT-2, and how each is cut: every linear layer and every norm has a bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

from picotron_ray.models.decoder import table as parts
from picotron_ray.models.decoder import tensor_plan as plans
from picotron_ray.models.parameters import ParameterSpec, Part

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

GELU: plans.TensorPlan = (
    ("layers.*.mlp", "gather_input"),
    ("layers.*.mlp.up", "colwise"),
    ("layers.*.mlp.down", "rowwise"),
)


def _norm(config: ModelConfig, at: str, layer: int | None = None, part: Part = "block") -> parts.Specs:
    return [
        parts.norm(f"{at}.weight", config.hidden_size, layer=layer, part=part),
        parts.bias(f"{at}.bias", config.hidden_size, None, layer, part),
    ]


def block(config: ModelConfig, layer: int) -> parts.Specs:
    """Parameters of one block, in the module's own order."""
    at, hidden, inner = f"layers.{layer}", config.hidden_size, config.intermediate_size
    up, down = (inner, hidden), (hidden, inner)
    return [
        *_norm(config, f"{at}.attention_norm", layer),
        *parts.projections(config, layer, biased=True),
        parts.output_projection(config, layer),
        parts.bias(f"{at}.attention.wo.bias", hidden, None, layer),
        *_norm(config, f"{at}.mlp_norm", layer),
        parts.matrix(f"{at}.mlp.up.weight", up, 0, config.init_std, layer=layer),
        parts.bias(f"{at}.mlp.up.bias", inner, 0, layer),
        parts.matrix(f"{at}.mlp.down.weight", down, 1, parts.out_std(config), layer=layer),
        parts.bias(f"{at}.mlp.down.bias", hidden, None, layer),
    ]


def parameter_table(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All parameters of the uncut model, in ``named_parameters`` order."""
    return parts.decoder_table(config, block, _norm(config, "norm", part="head"))


def tensor_plan(config: ModelConfig) -> plans.TensorPlan:
    """Styles by which tensor and sequence parallelism cut each module."""
    return plans.decoder_plan(config, plans.NORMS, plans.ATTENTION, GELU)


def fused_modules(config: ModelConfig) -> tuple[str, ...]:
    """Modules with projections of one input that ``fuse()`` makes one product."""
    return plans.ATTENTION_MODULES


def compiled_functions(config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Functions that can be compiled by themselves."""
    return {"norm": ("layers.*", "added_norm")}
