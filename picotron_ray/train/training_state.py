"""Weights, moments and loss scale of one rank as checkpoints see them: shards of canonical tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from picotron_ray.checkpoint.torch_state import (
    ERROR_FEEDBACK,
    WEIGHT_AVERAGE,
    Encoded,
    StateTensor,
    dtype_name,
)
from picotron_ray.layout.shards import Box, Shard, region, slabs
from picotron_ray.models.definition import ModelDefinition
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.parallel.mesh import Mesh
from picotron_ray.parallel.shard_boxes import replica_key
from picotron_ray.train.optim.quantized_state import QuantizedTensor
from picotron_ray.train.precision.loss_scaler import Scaling

Moments = Mapping[str, Mapping[str, Tensor | QuantizedTensor]]
"""Per moment name, the values by the name of each parameter."""
INITIAL_PIECE = 1 << 22
"""Initial weights that are in host memory at once, elements."""
MadeWeights = MutableMapping[tuple[str, Box], Tensor]
"""Initial weights by name and box, in host memory."""


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
        self._layout, self._rank = mesh.layout, mesh.rank
        self._first_group = mesh.layout.state_group(mesh.rank) == 0

    def weights(self, averages: bool = False) -> list[StateTensor]:
        """List the weights, if asked with their moving averages, without moments."""
        found = [s for p in self._parameters for s in _shards(p.spec.name, p, p.local, still=p.spec.frozen)]
        return [*found, *self._moment_shards((WEIGHT_AVERAGE,))] if averages else found

    def tensors(self) -> list[StateTensor]:
        """List weights, moments and the loss scale."""
        return [*self.weights(), *self._moment_shards(self._moments), *self._scales()]

    def _moment_shards(self, moments: Iterable[str]) -> Iterator[StateTensor]:
        for moment in moments:
            values = self._moments.get(moment, {})
            for p in self._trained:
                if p.spec.name in values:
                    yield from _shards(f"{moment}/{p.spec.name}", p, values[p.spec.name])

    def _scales(self) -> Iterator[StateTensor]:
        """The loss scale, which all ranks hold alike; the first state group speaks for it."""
        for tensor in self._scaling.tensors():
            shape = tuple(tensor.shape)
            shard = Shard("scaler/loss_scale", "float32", shape, Box((0,), shape))
            yield StateTensor(shard, tensor, self._first_group)

    def replicated(self) -> list[tuple[str, StateTensor]]:
        """List what several ranks may hold alike, each with its key: equal keys and names say equal boxes.

        Error feedback is left out, as it differs between replicas, and what is not kept as a plain tensor on
        the device of the weights: looking at it would cost more than the step. Experts are as the layout
        orders them.
        """
        found = [(self._key("weights", p), _held(p.spec.name, p, p.local)) for p in self._parameters]
        for moment, values in self._moments.items():
            for p in self._trained if moment != ERROR_FEEDBACK else ():
                value = values.get(p.spec.name)
                if isinstance(value, Tensor) and value.device == p.local.device:
                    found.append((self._key(moment, p), _held(f"{moment}/{p.spec.name}", p, value)))
        return found + [("scales", tensor) for tensor in self._scales()]

    def replicated_gradients(self, values: Sequence[Tensor]) -> list[tuple[str, StateTensor]]:
        """As `replicated`, of gradients that were summed."""
        found = zip(self._trained, values, strict=True)
        return [(self._key("gradients", p), _held(p.spec.name, p, gradient)) for p, gradient in found]

    def _key(self, what: str, parameter: LocalParameter) -> str:
        key = replica_key(parameter.spec, self._layout, self._rank)
        return f"{what}:{','.join(map(str, key))}"

    def gradients(self, values: Sequence[Tensor]) -> list[StateTensor]:
        """List gradients.

        Args:
            values: one for each trained parameter.
        """
        found = zip(self._trained, values, strict=True)
        return [shard for p, value in found for shard in _shards(p.spec.name, p, value)]

    @torch.no_grad()
    def initialise(
        self, seed: int, moved: Callable[[], None] = lambda: None, made: MadeWeights | None = None
    ) -> None:
        """Set weights, moments and scale of step 0, a piece at a time, and call ``moved`` after each.

        What was ``made`` before is taken from there, and what is made goes there.

        Averages begin as the weights, all else beside them at zero.
        """
        initial = self._definition.initial(seed)
        for parameter in self._parameters:
            for box, local in parameter.parts(parameter.local):
                for piece in slabs(box, INITIAL_PIECE):
                    key = (parameter.spec.name, piece)
                    first = made[key] if made and key in made else initial(parameter.spec, piece)
                    if made is not None:
                        made[key] = first
                    local[region(piece, box)] = first
                    moved()
        for values in self._moments.values():
            for value in values.values():
                value.zero_()
        averages = self._moments.get(WEIGHT_AVERAGE, {})
        for p in self._trained if averages else ():
            average = averages[p.spec.name]
            assert isinstance(average, Tensor)  # never kept in 8 bits
            average.copy_(p.local)
        self._scaling.initialise()


def _shards(
    name: str, parameter: LocalParameter, tensor: Tensor | Encoded, *, still: bool = False
) -> Iterator[StateTensor]:
    """Yield a tensor's boxes of the canonical one."""
    for box, rows in parameter.parts(tensor):
        shard = Shard(name, dtype_name(tensor.dtype), parameter.spec.shape, box)
        yield StateTensor(shard, rows, parameter.primary, still)


def _held(name: str, parameter: LocalParameter, tensor: Tensor) -> StateTensor:
    """Return a tensor as this rank holds it, whole."""
    shard = Shard(name, dtype_name(tensor.dtype), parameter.spec.shape, parameter.box)
    return StateTensor(shard, tensor, parameter.primary)
