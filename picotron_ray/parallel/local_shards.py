"""Local shards: the live storage of each canonical parameter of which a rank holds a box (`shard_boxes`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.mesh import Mesh
from picotron_ray.parallel.precision.torchao_layers import plain
from picotron_ray.parallel.shard_boxes import counts_in_norm, is_primary, local_box, local_boxes


@dataclass(slots=True)
class LocalParameter:
    """One canonical parameter as this rank holds it.

    Fields:
        spec: its name and full shape.
        box: this rank's part of it, of a stack of experts as the layout orders it.
        primary: whether this rank's state group checkpoints the box (`is_primary`).
        counted: whether this rank adds the box to the global norm.
        parameter: what is updated and has the gradient, a DTensor where FSDP shards it.
        narrow: the module's own parameter, a copy in 16 bits (`precision.compute_weights`); None: the same.
        boxes: this rank's parts of the canonical parameter, by its local rows; empty: the box.
    """

    spec: ParameterSpec
    box: Box
    primary: bool
    counted: bool
    parameter: nn.Parameter
    narrow: nn.Parameter | None = None
    boxes: tuple[Box, ...] = ()

    @property
    def local(self) -> Tensor:
        """Live local storage of the box's shape, detached."""
        return local_tensor(self.parameter.detach())

    def parts(self, tensor: Any) -> Iterator[tuple[Box, Any]]:
        """Yield this rank's boxes of the canonical parameter, each with its rows of a local tensor."""
        boxes = self.boxes or (self.box,)
        if len(boxes) == 1:
            yield boxes[0], tensor
            return
        start = 0
        for box in boxes:
            yield box, tensor[start : start + box.size[0]]
            start += box.size[0]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor, or the tensor itself; of a weight gathered in 8 bits its master."""
    return plain(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def local_parameters(
    model: nn.Module,
    specs: Mapping[str, ParameterSpec],
    mesh: Mesh,
    masters: Mapping[Tensor, nn.Parameter] | None = None,
) -> Iterator[LocalParameter]:
    """Yield every parameter of which this rank holds something, in the order of ``named_parameters``.

    Args:
        specs: by the names of ``named_parameters``.
        masters: of parameters that are copies in 16 bits; None: none is.

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
        master = (masters or {}).get(parameter)
        yield LocalParameter(
            spec,
            box,
            is_primary(spec, layout, rank),
            counts_in_norm(spec, layout, rank),
            parameter if master is None else master,
            None if master is None else parameter,
            local_boxes(spec, layout, rank),
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
