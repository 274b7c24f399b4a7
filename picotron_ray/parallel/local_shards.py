"""Local shards: the box of each canonical parameter that a rank holds.

Tensor parallelism cuts first, then FSDP. Both follow ``torch.chunk``: chunks of ceil(size / parts), the last
ones shorter or empty. FSDP cuts dimension 0 of the boxes of tensor and expert parallelism, over the ranks
that hold the same box.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.mesh import Mesh


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return offset and length of chunk ``index`` of ``size`` elements, as torch.chunk cuts them."""
    step = -(-size // parts)
    start = min(size, index * step)
    return start, min(size, start + step) - start


def local_box(spec: ParameterSpec, layout: Layout, rank: int) -> Box:
    """Return the box of one parameter that ``rank`` holds; it may be empty."""
    at = layout.coordinates(rank)
    offset, size = [0] * len(spec.shape), list(spec.shape)
    if spec.tp_dim is not None and layout.tp > 1:
        offset[spec.tp_dim], size[spec.tp_dim] = chunk(spec.shape[spec.tp_dim], layout.tp, at.tp)
    shards, shard = layout.shards, layout.shard(rank)
    if spec.expert:
        offset[0], size[0] = chunk(spec.shape[0], layout.ep, layout.expert_index(rank))
        shards, shard = layout.expert_shards, layout.expert_shard(rank)
    if layout.zero and spec.trained:
        start, size[0] = chunk(size[0], shards, shard)
        offset[0] += start
    return Box(tuple(offset), tuple(size))


def is_primary(spec: ParameterSpec, layout: Layout, rank: int) -> bool:
    """Return whether this rank's state group is the one that checkpoints the box.

    Several groups may hold the same box. Then the first of them checkpoints it. There are four such cases:
    parameters that tensor parallelism replicates, parameters outside of experts under expert parallelism,
    parameters that ZeRO leaves whole, and a tied embedding (the first stage's group).
    """
    if spec.copy:
        return False
    if spec.tp_dim is None and layout.coordinates(rank).tp:
        return False
    if layout.zero:
        return spec.trained or layout.shard(rank) == 0
    return spec.expert or layout.expert_index(rank) == 0


def counts_in_norm(spec: ParameterSpec, layout: Layout, rank: int) -> bool:
    """Return whether this rank adds its box to a global sum: exactly one rank per box does."""
    if not spec.trained or not is_primary(spec, layout, rank):
        return False
    if layout.zero:
        return layout.replica(rank) < layout.shards  # the first copy
    return layout.expert_replica(rank) == 0


@dataclass(slots=True)
class LocalParameter:
    """One canonical parameter as this rank holds it.

    Fields:
        spec: its name and full shape.
        box: this rank's part of it.
        primary: whether this rank's state group checkpoints the box (`is_primary`).
        counted: whether this rank adds the box to the global norm.
        parameter: the module's own parameter, a DTensor where FSDP shards it.
    """

    spec: ParameterSpec
    box: Box
    primary: bool
    counted: bool
    parameter: nn.Parameter

    @property
    def local(self) -> Tensor:
        """Live local storage of the box's shape, detached."""
        return local_tensor(self.parameter.detach())


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parameters(
    model: nn.Module, specs: Mapping[str, ParameterSpec], mesh: Mesh
) -> Iterator[LocalParameter]:
    """Yield every parameter of which this rank holds something, in the order of ``named_parameters``.

    Args:
        specs: by the names of ``named_parameters``.

    Raises:
        LayoutError: the module's storage differs from the layout's boxes. This check alone keeps a changed
            torch from writing wrong boxes into checkpoints.
    """
    layout, rank = mesh.layout, mesh.rank
    for name, parameter in model.named_parameters():
        spec = specs[name]
        box = local_box(spec, layout, rank)
        found = tuple(local_tensor(parameter.detach()).shape)
        if box.numel == 0 and 0 in found:
            continue
        if found != box.size:
            raise LayoutError(
                f"{name} in layout {layout}, rank {rank}: saw a local {found}, expected {box.size}"
            )
        yield LocalParameter(
            spec, box, is_primary(spec, layout, rank), counts_in_norm(spec, layout, rank), parameter
        )


def local_gradient(parameter: LocalParameter, layout: Layout, sequence_parallel: bool) -> tuple[Tensor, bool]:
    """Return the raw local gradient, and whether it must still be summed over tp.

    Under sequence parallelism each tp rank sees only its own tokens. So parameters that tp replicates (norms)
    get partial gradients, which the caller sums in one bucket.
    """
    gradient = parameter.parameter.grad
    spec = parameter.spec
    partial = sequence_parallel and layout.tp > 1 and spec.tp_dim is None and spec.trained
    return (torch.zeros_like(parameter.local) if gradient is None else local_tensor(gradient)), partial
