"""A model as the engine knows it: its parameters as a table, how it is cut, and how to build a stage.

Our decoders and any module of the user's are two definitions of the same interface; nothing above asks
which of them it trains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.shards import Box
from picotron_ray.models.parameters import ParameterSpec, Style

Bounds = Sequence[tuple[int, int]]
InitialValue = Callable[[ParameterSpec, Box], Tensor]
"""The initial value (CPU) of a box of one parameter."""


class StageEnds(NamedTuple):
    """Modules of a stage before and after its blocks.

    Fields:
        embedding: those before, in order; none of their weights is read in a backward pass.
        head: those after, in order.
    """

    embedding: tuple[nn.Module, ...] = ()
    head: tuple[nn.Module, ...] = ()


NO_ENDS = StageEnds()


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
        fused_linear: the modules whose projections may be one product, by name.
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
    fused_linear: tuple[str, ...] = ()
    functions: Mapping[str, tuple[str, str]] = MappingProxyType({})
    positions: tuple[str, ...] = ()
    mixtures: tuple[str, ...] = ()
    copies: Mapping[str, ParameterSpec] = MappingProxyType({})

    @property
    def specs(self) -> dict[str, ParameterSpec]:
        """Parameters of any stage, by the module's own name."""
        return {spec.name: spec for spec in self.table} | dict(self.copies)

    def stage(self, bounds: Bounds, index: int) -> nn.Module:
        """One pipeline stage, its parameters on the meta device.

        Args:
            bounds: half-open ranges of absolute layer numbers, of all stages (`stage_bounds` of the planner).
            index: of the stage.
        """
        first, last = bounds[index]
        return self.build(first, last, embed=index == 0, head=index == len(bounds) - 1)

    @abstractmethod
    def build(self, first: int, last: int, *, embed: bool, head: bool) -> nn.Module:
        """Blocks ``first`` to ``last`` (half open), with what stands before or after all blocks."""

    @abstractmethod
    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """The blocks of a stage, in order: what ZeRO gathers one at a time."""

    def ends(self, module: nn.Module) -> StageEnds:
        """Modules around the blocks of a stage that ZeRO gathers by themselves.

        Nothing where a parameter is in both ends, or where it is not known that a module's weights are read
        in its own forward pass alone.
        """
        return NO_ENDS

    @abstractmethod
    def tie(self, module: nn.Module) -> None:
        """Share again what the model shares, after parameters were replaced."""

    def close_norms(self, module: nn.Module) -> int:
        """Give its RMSNorms their gradient in closed form (`layers.rms_norm`); returns their number."""
        return 0

    def freeze(self, module: nn.Module) -> int:
        """Keep what the table has as frozen from gradients, in place; returns the number of parameters."""
        specs = self.specs
        still = [parameter for name, parameter in module.named_parameters() if specs[name].frozen]
        for parameter in still:
            parameter.requires_grad_(False)
        return len(still)

    @abstractmethod
    def initial(self, seed: int) -> InitialValue:
        """The weights of step 0: a function of seed, name and position alone."""

    def materialise(self, module: nn.Module, device: torch.device) -> None:
        """Give a stage storage on ``device``: parameters without values, buffers with the ones they have."""
        buffers = dict(module.named_buffers())
        module.to_empty(device=device)
        self.tie(module)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
