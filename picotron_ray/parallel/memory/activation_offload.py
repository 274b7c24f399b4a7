"""Activation offload: tensors that a block saves for its backward pass wait in host memory.

Autograd hands every tensor that it saves in a block to a hook, which copies it to the host and keeps an
`OffloadedTensor` in its place. When the backward pass reaches the block, its tensors come back together.
Those of the block before it start too, so that they travel while this one computes. Offload lies around
recomputation: a block that is computed again saves only its inputs, and only those move. It replaces
``forward`` and wraps no module, so that names stay canonical.

Three kinds of tensors stay on the device:

- parameters, and views or casts of them,
- small tensors,
- tensors that stay there anyway because several blocks use them (rotary tables, masks).

The choice follows from the model and the order of its blocks, and is the same on all ranks.

On CUDA, the source of a copy to the host is held until the device's own queue comes after the copy, and a
returning tensor is allocated from the memory of that queue. So no memory is reused too early. (With
``Tensor.record_stream``, the peak would depend on how far the host is ahead.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from picotron_ray.comm.copy_stream import CopyStream, host_like
from picotron_ray.parallel.memory.saved_parameters import of_a_parameter

SMALLEST_BYTES = 2**16
"""Smaller tensors stay: a copy has a fixed cost."""


class OffloadedTensor:
    """Tensor in host memory, and on the device again once its block pass fetched it."""

    __slots__ = ("__weakref__", "back", "block_pass", "host")

    def __init__(self, host: Tensor, block_pass: BlockPass) -> None:
        self.host, self.block_pass = host, block_pass
        self.back: Tensor | None = None


class BlockPass:
    """One block's forward pass over one micro-batch.

    Fields:
        offloaded: the tensors that it moved; the graph alone keeps them alive.
        before: the pass of the block before, in the same micro-batch.
        sources: tensors whose copy is under way, until the device's queue comes after it.
    """

    def __init__(self, before: BlockPass | None, device: torch.device) -> None:
        self.before, self.device = before, device
        self.offloaded: list[weakref.ref[OffloadedTensor]] = []
        self.sources: dict[tuple[Any, ...], tuple[Tensor, OffloadedTensor]] = {}
        self.left: torch.cuda.Event | None = None
        self.returned: torch.cuda.Event | None = None
        self.fetched = False


class ActivationOffload:
    """Hooks on the saved tensors of one stage's blocks.

    Args:
        smallest_bytes: smaller tensors stay.

    Fields:
        moved_bytes: copied to the host so far.
    """

    def __init__(self, smallest_bytes: int = SMALLEST_BYTES) -> None:
        self._smallest = smallest_bytes
        self._streams: dict[torch.device, tuple[CopyStream, CopyStream]] = {}
        self._last: BlockPass | None = None
        self._held: list[BlockPass] = []  # whose sources are not let go yet
        self._seen: dict[int, StorageWeakRef] = {}  # storages that a block of this micro-batch has saved
        self.moved_bytes = 0

    def wrap(self, number: int, block: nn.Module) -> None:
        """Offload the tensors that ``block``, the stage's ``number``-th, saves; in place."""
        inner = block.forward

        def forward(*inputs: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*inputs, **named)
            block_pass = self._enter(number, inputs[0].device)
            with torch.autograd.graph.saved_tensors_hooks(self._pack(block_pass), self._unpack):
                output = inner(*inputs, **named)
            self._leave(block_pass)
            return output

        block.forward = forward

    def _enter(self, number: int, device: torch.device) -> BlockPass:
        if number == 0:
            self._last = None
            self._seen.clear()
        if device not in self._streams:
            self._streams[device] = CopyStream(device), CopyStream(device)
        self._last = BlockPass(self._last, device)
        return self._last

    def _leave(self, block_pass: BlockPass) -> None:
        """Release the sources of earlier blocks: the device's next work waits for their copies."""
        self._release()
        self._held.append(block_pass)
        for tensor, _ in block_pass.sources.values():
            storage = tensor.untyped_storage()
            self._seen[storage.data_ptr()] = StorageWeakRef(storage)

    def _release(self) -> None:
        for block_pass in self._held:
            self._streams[block_pass.device][0].follow(block_pass.left)
            block_pass.sources.clear()
        self._held.clear()

    def _pack(self, block_pass: BlockPass) -> Callable[[Tensor], Tensor | OffloadedTensor]:
        def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
            if self._stays(tensor):
                return tensor
            # alive until the block pass is released, so that no other tensor has this key
            key = (tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride(), tensor._version)
            if key not in block_pass.sources:
                source = tensor.detach()
                moved = OffloadedTensor(host_like(source), block_pass)
                block_pass.left = self._streams[block_pass.device][0].copy(moved.host, source)
                block_pass.offloaded.append(weakref.ref(moved))
                block_pass.sources[key] = source, moved
                self.moved_bytes += source.nbytes
            return block_pass.sources[key][1]

        return pack

    def _stays(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        if tensor.nbytes < self._smallest or storage.nbytes() < tensor.nbytes or of_a_parameter(tensor):
            return True
        seen = self._seen.get(storage.data_ptr())
        return seen is not None and not seen.expired() and seen == StorageWeakRef(storage)

    def _unpack(self, packed: Tensor | OffloadedTensor) -> Tensor:
        if not isinstance(packed, OffloadedTensor):
            return packed
        self._release()
        block_pass = packed.block_pass
        self._fetch(block_pass)
        self._streams[block_pass.device][1].follow(block_pass.returned)
        if block_pass.before is not None:
            self._fetch(block_pass.before)
        assert packed.back is not None
        return packed.back

    def _fetch(self, block_pass: BlockPass) -> None:
        """Start to copy all tensors back that the graph still holds."""
        if block_pass.fetched:
            return
        block_pass.fetched = True
        for reference in block_pass.offloaded:
            moved = reference()
            if moved is not None:
                moved.back = torch.empty_like(moved.host, device=block_pass.device)
                block_pass.returned = self._streams[block_pass.device][1].copy(moved.back, moved.host)


def apply_activation_offload(blocks: Sequence[nn.Module], smallest_bytes: int = SMALLEST_BYTES) -> None:
    """Offload the tensors that the blocks of one stage save, in place, after recomputation was applied."""
    offload = ActivationOffload(smallest_bytes)
    for number, block in enumerate(blocks):
        offload.wrap(number, block)
