"""What the engine knows of a model: its parameters as a table, how it is cut, and how to build a stage.

Our decoder (Llama-style or GPT-2) and any module of the user's are two definitions of the same interface;
nothing above this module asks which of them it trains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.models.layers.init import initialise_
from picotron_ray.models.llama import Transformer
from picotron_ray.models.parameters import (
    ParameterSpec,
    Style,
    attention_modules,
    compiled_functions,
    joint_modules,
    mixture_modules,
    parameter_table,
    position_modules,
    tensor_parallel_plan,
    tied_copies,
)
from picotron_ray.planner.model_sizes import stage_bounds

InitialValue = Callable[[ParameterSpec], Tensor]
"""The full initial value (CPU) of one parameter."""


class ModelDefinition(ABC):
    """One model, uncut; see the module.

    Fields:
        config: what describes the model.
        table: every parameter, in ``named_parameters`` order.
        styles: what tensor parallelism does to which module.
        sequence_parallel: whether activations between blocks are cut over the sequence under tensor
            parallelism, and logits over the vocabulary. If so, what tp replicates gets partial gradients.
        hidden_size: width of what goes from one pipeline stage to the next.
        attention: the modules that context parallelism changes, by name; empty: it cannot be applied.
        joint: the modules whose projections may be one product, by name.
        functions: what of the modules can be compiled by itself, by name: (modules, their field).
        positions: the modules that add learned positions, by name.
        copies: by the module's own name, parameters that a stage holds as copies of another stage's.
        mixtures: the modules that are mixtures of experts, by name. Where there are any, ``forward`` takes
            the rows' weights too.
    """

    config: ModelConfig
    table: tuple[ParameterSpec, ...]
    styles: tuple[tuple[str, Style], ...]
    sequence_parallel: bool
    hidden_size: int
    attention: tuple[str, ...] = ()
    joint: tuple[str, ...] = ()
    functions: Mapping[str, tuple[str, str]] = MappingProxyType({})
    positions: tuple[str, ...] = ()
    mixtures: tuple[str, ...] = ()
    copies: Mapping[str, ParameterSpec] = MappingProxyType({})

    @property
    def specs(self) -> dict[str, ParameterSpec]:
        """What each parameter of any stage is, by the module's own name."""
        return {spec.name: spec for spec in self.table} | dict(self.copies)

    def stage(self, stages: int, index: int) -> nn.Module:
        """One of ``stages`` pipeline stages, its parameters on the meta device.

        Raises LayoutError where the model cannot be cut so.
        """
        first, last = stage_bounds(self.config, stages)[index]
        return self.build(first, last, embed=index == 0, head=index == stages - 1)

    @abstractmethod
    def build(self, first: int, last: int, *, embed: bool, head: bool) -> nn.Module:
        """Blocks ``first`` to ``last`` (half open), with what stands before or after all blocks."""

    @abstractmethod
    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """The blocks of a stage, in order: what ZeRO gathers one at a time."""

    @abstractmethod
    def tie(self, module: nn.Module) -> None:
        """Share again what the model shares, after parameters were replaced."""

    def close_norms(self, module: nn.Module) -> int:
        """Give its RMSNorms their gradient in closed form (`models.rms_norm`); returns how many there are."""
        return 0

    @abstractmethod
    def initial(self, seed: int) -> InitialValue:
        """The weights of step 0: a function of seed and name alone."""

    def materialise(self, module: nn.Module, device: torch.device) -> None:
        """Give a stage storage on ``device``: parameters without values, buffers with the ones they have."""
        buffers = dict(module.named_buffers())
        module.to_empty(device=device)
        self.tie(module)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])


class LlamaDefinition(ModelDefinition):
    """The decoder of ``models.llama``."""

    sequence_parallel = True
    attention = attention_modules()

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.table, self.styles = parameter_table(config), tensor_parallel_plan(config)
        self.positions, self.mixtures = position_modules(config), mixture_modules(config)
        self.joint, self.functions = joint_modules(config), compiled_functions(config)
        self.hidden_size, self.copies = config.hidden_size, tied_copies(config)

    def build(self, first: int, last: int, *, embed: bool, head: bool) -> nn.Module:
        with torch.device("meta"):
            return Transformer(self.config, first_layer=first, last_layer=last, embed=embed, head=head)

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        assert isinstance(module, Transformer)
        return list(module.layers.values())

    def tie(self, module: nn.Module) -> None:
        assert isinstance(module, Transformer)
        module.tie()

    def close_norms(self, module: nn.Module) -> int:
        assert isinstance(module, Transformer)
        return module.close_norms()

    def initial(self, seed: int) -> InitialValue:
        return lambda spec: initialise_(spec.name, spec.shape, seed, init_std=spec.init_std)


def definition_of(config: ModelConfig, seed: int) -> ModelDefinition:
    """The definition of the model that a config names.

    Args:
        seed: ``job.seed``, under which a module of the user's is built.

    Raises ConfigError for a module that cannot be built, or is not what launch looked into.
    """
    if config.builder is None:
        return LlamaDefinition(config)
    from picotron_ray.models.custom import CustomDefinition

    return CustomDefinition(config, seed)
