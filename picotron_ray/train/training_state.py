"""Weights, moments and loss scale of one rank as checkpoints see them: shards of canonical tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from picotron_ray.checkpoint.torch_state import Encoded, StateTensor
from picotron_ray.layout.shards import Box, Shard, region, slabs
from picotron_ray.models.definition import ModelDefinition
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.parallel.mesh import Mesh
from picotron_ray.train.optim.quantized_state import QuantizedTensor
from picotron_ray.train.precision.loss_scaler import Scaling

Moments = Mapping[str, Mapping[str, Tensor | QuantizedTensor]]
"""Per moment name, the values by the name of each parameter."""
INITIAL_PIECE = 1 << 22
"""Initial weights that are in host memory at once, elements."""


class TrainingState:
    """Live storage of a rank's weights, moments and loss scale, the same for the engine's whole life.

    Args:
        parameters: all that this rank holds.
        trained: those that have moments.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        mesh: Mesh,
        parameters: Sequence[LocalParameter],
        trained: Sequence[LocalParameter],
        moments: Moments,
        scaling: Scaling,
    ) -> None:
        self._definition, self._parameters, self._trained = definition, parameters, trained
        self._moments, self._scaling = moments, scaling
        self._first_group = mesh.layout.state_group(mesh.rank) == 0

    def weights(self) -> list[StateTensor]:
        """List the weights, without moments."""
        return [_shard(p.spec.name, p, p.local) for p in self._parameters]

    def tensors(self) -> list[StateTensor]:
        """List weights, moments and the loss scale."""
        return [*self.weights(), *self._moment_shards(), *self._scales()]

    def _moment_shards(self) -> Iterator[StateTensor]:
        for moment, values in self._moments.items():
            for p in self._trained:
                if p.spec.name in values:
                    yield _shard(f"{moment}/{p.spec.name}", p, values[p.spec.name])

    def _scales(self) -> Iterator[StateTensor]:
        """The loss scale, which all ranks hold alike; the first state group speaks for it."""
        for tensor in self._scaling.tensors():
            shape = tuple(tensor.shape)
            shard = Shard("scaler/loss_scale", "float32", shape, Box((0,), shape))
            yield StateTensor(shard, tensor, self._first_group)

    def gradients(self, values: Sequence[Tensor]) -> list[StateTensor]:
        """List gradients, one for each trained parameter."""
        return [_shard(p.spec.name, p, g) for p, g in zip(self._trained, values, strict=True)]

    @torch.no_grad()
    def initialise(self, seed: int, moved: Callable[[], None] = lambda: None) -> None:
        """Set weights, moments and scale of step 0, a piece at a time, and call ``moved`` after each."""
        initial = self._definition.initial(seed)
        for parameter in self._parameters:
            local, box = parameter.local, parameter.box
            for piece in slabs(box, INITIAL_PIECE):
                local[region(piece, box)] = initial(parameter.spec, piece)
                moved()
        for values in self._moments.values():
            for value in values.values():
                value.zero_()
        self._scaling.initialise()


def _shard(name: str, parameter: LocalParameter, tensor: Tensor | Encoded) -> StateTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StateTensor(Shard(name, dtype, parameter.spec.shape, parameter.box), tensor, parameter.primary)
