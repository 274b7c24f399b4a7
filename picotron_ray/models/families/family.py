"""A model family as one value: everything of an architecture that is known without building it.

``config`` and ``planner`` load no torch, and ask the family that ``model.family`` names. Its folder is one of
``models``, yet its torch-free files stand below these two: they are handed a ``ModelConfig``, and import its
type for type checking alone. This keeps an architecture in one folder. It is an exception in the import
contracts (pyproject.toml), which allow it for these files only.

Modules, which need torch, are in the family's ``modules.py``; `models.transformer` finds them by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from picotron_ray.config.problem import Problem
from picotron_ray.models.decoder.rules import unlatent
from picotron_ray.models.decoder.tensor_plan import TensorPlan
from picotron_ray.models.huggingface.mapping import HuggingFaceMapping
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.models.sizes import ModelSizes

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture.

    Fields:
        summary: its blocks in a few words, for the config reference.
        rotary: whether positions are rotary, which need an even head size.
        norms: the kind of its norms. Of RMSNorm alone the gradient can be had in closed form.
        rules: mistakes in a config's ``model`` section, given the tokens of a row.
        table: every parameter of the uncut model, in ``named_parameters`` order.
        tensor_plan: what tensor parallelism does to which module.
        sizes: what planner and memory model need to know.
        fused_modules: modules with projections of one input that ``fuse()`` makes one product.
        compiled_functions: functions that can be compiled by themselves, by the key of ``kernels`` that asks
            for it: (modules, their field).
        huggingface: its checkpoints in Hugging Face's format.
        scaled_embedding: whether what the embedding gives is multiplied by the root of the hidden size.
        sinks: whether heads of attention have sinks (`models.layers.sinks`).
        latent: whether its attention is latent, and its first blocks may be dense beside mixtures.
    """

    summary: str
    rotary: bool
    norms: Literal["RMSNorm", "LayerNorm"]
    rules: Callable[[ModelConfig, int], Iterator[Problem]]
    table: Callable[[ModelConfig], tuple[ParameterSpec, ...]]
    tensor_plan: Callable[[ModelConfig], TensorPlan]
    sizes: Callable[[ModelConfig], ModelSizes]
    fused_modules: Callable[[ModelConfig], tuple[str, ...]]
    compiled_functions: Callable[[ModelConfig], Mapping[str, tuple[str, str]]]
    huggingface: HuggingFaceMapping
    scaled_embedding: bool = False
    sinks: bool = False
    latent: bool = False

    def problems(self, model: ModelConfig, sequence_length: int) -> Iterator[Problem]:
        """Mistakes in a config's ``model`` section, keys that other families alone have among them."""
        yield from self.rules(model, sequence_length)
        if not self.latent:
            yield from unlatent(model)
