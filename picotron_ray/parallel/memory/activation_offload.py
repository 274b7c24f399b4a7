"""What a block keeps for its backward pass, in host memory meanwhile.

Autograd hands every tensor that it saves in a block to a hook, which sends it down and keeps a ticket; when
the backward pass comes to the block, its tensors come back together, and those of the block before it set
out, so that they travel while this one computes. It lies around recomputation: a block that is computed again
saves its inputs alone, and those are what leaves. It replaces ``forward`` and wraps no module, so names stay
canonical.

Not moved: parameters and what is only another view or type of one, small tensors, and what is on the device
anyway because several blocks use it (rotary turns, masks). What is decided follows from the model and the
order of its blocks, alike on all ranks.

Order on CUDA: a tensor that goes down is held until the device's own queue comes after the copy, one that
comes back is taken from the memory of that queue; so no memory is used again too early (compare
``Tensor.record_stream``, under which the peak depends on how far the host is ahead).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from picotron_ray.comm.copy_stream import CopyStream, host_like
from picotron_ray.parallel.memory.weight_casts import Recast, made, of_a_parameter, recast

SMALLEST_BYTES = 2**16
"""What is smaller stays: a copy has its price whatever its size."""


class Ticket:
    """One tensor that left: its values on the host, and on the device again once its visit brought it."""

    __slots__ = ("__weakref__", "back", "host", "visit")

    def __init__(self, host: Tensor, visit: Visit) -> None:
        self.host, self.visit = host, visit
        self.back: Tensor | None = None


class Visit:
    """One block's forward pass over one micro-batch.

    Fields:
        tickets: of what it saved; the graph alone keeps them alive.
        before: the visit of the block before, in the same micro-batch.
        sources: what is on its way down, until the device's queue comes after it.
    """

    def __init__(self, before: Visit | None, device: torch.device) -> None:
        self.before, self.device = before, device
        self.tickets: list[weakref.ref[Ticket]] = []
        self.sources: dict[tuple[Any, ...], tuple[Tensor, Ticket]] = {}
        self.left: torch.cuda.Event | None = None
        self.returned: torch.cuda.Event | None = None
        self.brought = False


class ActivationOffload:
    """The hooks of one stage's blocks.

    Args:
        smallest_bytes: tensors below it stay.
        recasts: whether casts of parameters are made again rather than saved.

    Fields:
        moved_bytes: what has gone down since it was made.
    """

    def __init__(self, smallest_bytes: int = SMALLEST_BYTES, *, recasts: bool = False) -> None:
        self._smallest, self._recasts = smallest_bytes, recasts
        self._lanes: dict[torch.device, tuple[CopyStream, CopyStream]] = {}
        self._last: Visit | None = None
        self._held: list[Visit] = []  # whose sources are not let go yet
        self._seen: dict[int, StorageWeakRef] = {}  # storages that a block of this micro-batch has saved
        self.moved_bytes = 0

    def wrap(self, number: int, block: nn.Module) -> None:
        """Let what ``block``, the stage's ``number``-th, saves go to the host, in place."""
        inner = block.forward

        def forward(*inputs: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*inputs, **named)
            visit = self._enter(number, inputs[0].device)
            with torch.autograd.graph.saved_tensors_hooks(self._pack(visit), self._unpack):
                output = inner(*inputs, **named)
            self._leave(visit)
            return output

        block.forward = forward

    def _enter(self, number: int, device: torch.device) -> Visit:
        if number == 0:
            self._last = None
            self._seen.clear()
        if device not in self._lanes:
            self._lanes[device] = CopyStream(device), CopyStream(device)
        self._last = Visit(self._last, device)
        return self._last

    def _leave(self, visit: Visit) -> None:
        """Let go of what the blocks before sent: the device's next work waits for their copies."""
        self._let_go()
        self._held.append(visit)
        for tensor, _ in visit.sources.values():
            storage = tensor.untyped_storage()
            self._seen[storage.data_ptr()] = StorageWeakRef(storage)

    def _let_go(self) -> None:
        for visit in self._held:
            self._lanes[visit.device][0].follow(visit.left)
            visit.sources.clear()
        self._held.clear()

    def _pack(self, visit: Visit) -> Callable[[Tensor], Tensor | Ticket | Recast]:
        def pack(tensor: Tensor) -> Tensor | Ticket | Recast:
            if self._stays(tensor):
                return recast(tensor) if self._recasts else tensor
            # alive until the visit is let go, so that no other tensor has this key
            key = (tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride(), tensor._version)
            if key not in visit.sources:
                source = tensor.detach()
                ticket = Ticket(host_like(source), visit)
                visit.left = self._lanes[visit.device][0].copy(ticket.host, source)
                visit.tickets.append(weakref.ref(ticket))
                visit.sources[key] = source, ticket
                self.moved_bytes += source.nbytes
            return visit.sources[key][1]

        return pack

    def _stays(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        if tensor.nbytes < self._smallest or storage.nbytes() < tensor.nbytes or of_a_parameter(tensor):
            return True
        seen = self._seen.get(storage.data_ptr())
        return seen is not None and not seen.expired() and seen == StorageWeakRef(storage)

    def _unpack(self, packed: Tensor | Ticket | Recast) -> Tensor:
        if not isinstance(packed, Ticket):
            return made(packed)
        self._let_go()
        visit = packed.visit
        self._bring(visit)
        self._lanes[visit.device][1].follow(visit.returned)
        if visit.before is not None:
            self._bring(visit.before)
        assert packed.back is not None
        return packed.back

    def _bring(self, visit: Visit) -> None:
        """Start the way back of all that a visit's graph still wants."""
        if visit.brought:
            return
        visit.brought = True
        for reference in visit.tickets:
            ticket = reference()
            if ticket is not None:
                ticket.back = torch.empty_like(ticket.host, device=visit.device)
                visit.returned = self._lanes[visit.device][1].copy(ticket.back, ticket.host)


def apply_activation_offload(
    blocks: Sequence[nn.Module], smallest_bytes: int = SMALLEST_BYTES, *, recasts: bool = False
) -> None:
    """Let what the blocks of one stage save go to the host, in place; recomputation is applied before."""
    offload = ActivationOffload(smallest_bytes, recasts=recasts)
    for number, block in enumerate(blocks):
        offload.wrap(number, block)
