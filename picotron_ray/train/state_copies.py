"""Way of the state out of the device for a snapshot: what is read when, by which thread and stream.

On CPUs the thread of snapshots copies straight from the live tensors into the slot. The copy itself is the
cost: it takes a core or memory bandwidth from the step, hidden or not, so that it may take half of the time.

On CUDA it runs beside the step, on a stream of its own, into pages of the slot that are locked
(`page_locks`):

1. ``begin``, on the training thread, records an event behind the last update. The own stream waits for it, so
   that it reads what that update has written, and waits for nothing that comes later.
2. The thread of snapshots queues the copies of the whole state, each to its place in the slot, and records an
   event behind the last.
3. ``follow``, on the training thread before the optimizer's first write, makes its stream wait for that
   event. The host waits for no copy: at most until all are queued, which is long before.
4. The thread of snapshots waits for the event, digests what lies in the slot, and seals it.

Where pages are not locked (CUDA has refused it, slots lie on a disk, a slot has just grown) step 2 is by a
ring of page-locked chunks (`CopyRing`): as many copies are queued as are free, and each is drained into the
slot, with its digest, once its event has come. ``follow`` then waits on the host for all copies but those
that the ring holds.

Live tensors are not freed while they are read: they are the engine's for its whole life, and the snapshotter
joins its thread, which has waited for its stream, before the engine goes. What is made on the own stream
(a contiguous copy) is freed on it. An abort leaves a slot unsealed, or one that is whole.

What a snapshot costs a step is then what the loop and its stream waited, at most 2 % of the steps between two
of them; and one must end before the next begins. Of the device's memory bandwidth a copy takes what the bus
carries, a hundredth. The ring has run on one H100 (docs/gpu.md), locked slots on no GPU yet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from picotron_ray.checkpoint.snapshot.slot_file import Content, Place
from picotron_ray.checkpoint.torch_state import StateTensor, buffers
from picotron_ray.comm.collectives.exposed import ExposedTime

HOST_SHARE, DEVICE_SHARE = 0.5, 0.02
"""Largest share of time that snapshots may take: of copying on CPUs, of waiting for copies on CUDA."""
CHUNK_BYTES, CHUNKS = 32 << 20, 4
"""Of the ring: 128 MiB of page-locked memory a worker, made where a slot's pages are not locked."""

MOST_TIMES = 999

log = logging.getLogger(__name__)


class CopyTimes(NamedTuple):
    """Times of one snapshot by the device's events, in seconds.

    Fields:
        copy_s: on the own stream, from the first copy to the end of the last.
        exposed_s: of that, what the stream that trains has waited before the optimizer's first write.
        host_wait_s: what the training thread has waited until the last copy was queued.
        direct: 1 where the device wrote into the slot by itself, 0 where it went through the ring.
    """

    copy_s: float
    exposed_s: float
    host_wait_s: float
    direct: float


class StateCopies(Protocol):
    """Way of the state into host memory.

    Fields:
        taken: times of the newest snapshots, by the device's events; none without a device.
    """

    taken: list[CopyTimes]

    def begin(self) -> None:
        """Take the state as it is now; called on the training thread before a snapshot is handed over."""

    def reading(self) -> AbstractContextManager[None]:
        """Be entered by the thread that reads the state, for as long as it does."""

    def buffers(self, state: Sequence[StateTensor], *, moving: bool) -> Content:
        """Return what `SlotFile.write` takes, one for each tensor."""

    def make_ring(self) -> None:
        """Make now what copies into slots without locked pages need: later a limit of memory may hold."""

    def looks_first(self, needed: bool) -> bool:
        """Whether to look for values that are not finite before the slot is written; then the host may.

        Args:
            needed: the slot holds a state that is to stay unless another one takes its place.
        """

    def follow(self, pending: Future[None]) -> None:
        """Return once the state may be written by what the training thread does or queues from now on.

        Raises what the copy has raised.
        """

    def apart_s(self, cost_s: float) -> float:
        """Seconds that two snapshots are apart at least; ``cost_s``: what one takes, digest included."""


class HostCopies:
    """Straight from tensors in host memory."""

    def __init__(self) -> None:
        self.taken: list[CopyTimes] = []

    def begin(self) -> None:
        """Do nothing: `follow` waits until all is read."""

    def reading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def buffers(self, state: Sequence[StateTensor], *, moving: bool) -> Content:
        return buffers(state, moving=moving)

    def make_ring(self) -> None:
        """Do nothing: there is none."""

    def looks_first(self, needed: bool) -> bool:
        return True  # at the same cost

    def follow(self, pending: Future[None]) -> None:
        pending.result()

    def apart_s(self, cost_s: float) -> float:
        return cost_s / HOST_SHARE


class DeviceCopies:
    """Beside the work of a CUDA device; see the module."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._chunks: list[Tensor] = []  # of the ring, where it is used
        self._ready: torch.cuda.Event | None = None
        self._read: torch.cuda.Event | None = None  # behind the last copy
        self._queued = threading.Event()  # the last copy is, or none will be
        self._exposed = ExposedTime(device)
        self._host_wait_s = self._stall_s = 0.0
        self._direct = False
        self._first = torch.cuda.Event(enable_timing=True)  # before the first copy
        self.taken: list[CopyTimes] = []

    def begin(self) -> None:
        self._count()
        self._exposed.begin()
        self._host_wait_s, self._read = 0.0, None
        self._queued.clear()
        self._ready = torch.cuda.current_stream(self._device).record_event()

    def _count(self) -> None:
        """Take the times of the snapshot before: sealed, and the host has waited for the device since."""
        if self._read is None:
            return
        copy_s = self._first.elapsed_time(self._read) / 1e3
        found = CopyTimes(copy_s, self._exposed.seconds, self._host_wait_s, float(self._direct))
        stalled_s = found.exposed_s + found.host_wait_s
        self._stall_s = 0.8 * self._stall_s + 0.2 * stalled_s if self._stall_s else stalled_s
        self.taken = [*self.taken[-MOST_TIMES:], found]

    @contextmanager
    def reading(self) -> Iterator[None]:
        assert self._ready is not None
        try:
            with torch.cuda.stream(self._stream):  # of this thread: streams are a thread's own choice
                self._stream.wait_event(self._ready)
                self._first.record(self._stream)
                try:
                    yield
                finally:
                    self._stream.synchronize()  # nothing reads live tensors any more, whatever was raised
        finally:
            self._queued.set()

    def buffers(self, state: Sequence[StateTensor], *, moving: bool) -> Content:
        """Return what queues the copies, once the slot is open for them, and yields what has arrived.

        Where the host reads some by itself (offloaded or encoded moments), `follow` waits for the whole.
        """
        return partial(self._arriving, state, moving)

    def make_ring(self) -> None:
        self._chunks = self._chunks or page_locked_chunks()

    def looks_first(self, needed: bool) -> bool:
        if needed:
            assert self._ready is not None
            self._ready.synchronize()  # the device may still be writing what the host looks at
        return needed

    def _arriving(
        self, state: Sequence[StateTensor], moving: bool, places: Sequence[Place] | None
    ) -> Iterator[Any]:
        assert self._ready is not None
        copied = [entry for entry in state if not (moving and entry.still) and entry.shard.box.numel]
        ours = [self._is_ours(entry) for entry in copied]
        if not all(ours):
            self._ready.synchronize()  # the device may still be writing what the host reads
        self._direct = places is not None
        by_device = [entry for entry, is_ours in zip(copied, ours, strict=True) if is_ours]
        on_queued = self._all_queued if all(ours) else None
        if places is None:
            return self._through_ring(state, moving, by_device, on_queued)
        return self._into_places(state, moving, by_device, places, on_queued)

    def _into_places(
        self,
        state: Sequence[StateTensor],
        moving: bool,
        by_device: Sequence[StateTensor],
        places: Sequence[Place],
        on_queued: OnQueued | None,
    ) -> Iterator[Any]:
        """Queue copies of the whole state at once; yield each place once all are there."""
        wanted = {id(entry) for entry in by_device}
        for entry, place in zip(state, places, strict=True):
            if id(entry) in wanted:
                assert isinstance(entry.tensor, Tensor)
                live = entry.tensor.detach()
                start_copy(torch.from_numpy(place).view(live.dtype).view(live.shape), live)
        last = _recorded(self._stream)
        if on_queued is not None:
            on_queued(last)

        def arrived() -> Iterator[Any]:
            last.synchronize()
            for entry, place in zip(state, places, strict=True):
                if id(entry) in wanted:
                    yield place
                else:
                    yield from buffers([entry], moving=moving)

        return arrived()

    def _through_ring(
        self,
        state: Sequence[StateTensor],
        moving: bool,
        by_device: Sequence[StateTensor],
        on_queued: OnQueued | None,
    ) -> Iterator[Any]:
        """Queue as many copies as the ring holds; yield the parts of each tensor as they arrive."""
        self.make_ring()
        pieces = [piece for entry in by_device for piece in pieces_of(entry)]
        transfer = CopyRing(self._stream, self._chunks, pieces, on_queued)
        transfer.queue()
        wanted = {id(entry) for entry in by_device}

        def arrived() -> Iterator[Any]:
            for entry in state:
                if id(entry) in wanted:
                    yield transfer.parts(len(pieces_of(entry)))
                else:
                    yield from buffers([entry], moving=moving)

        return arrived()

    def _is_ours(self, entry: StateTensor) -> bool:
        tensor = entry.tensor
        return isinstance(tensor, Tensor) and tensor.device.type == self._device.type

    def _all_queued(self, last: torch.cuda.Event) -> None:
        self._read = last
        self._queued.set()

    def follow(self, pending: Future[None]) -> None:
        began = time.monotonic()
        self._queued.wait()
        if self._read is None or pending.done():  # it has failed, or the host reads; or it is known already
            pending.result()
        self._host_wait_s = time.monotonic() - began
        if self._read is not None:
            with self._exposed.waiting():
                torch.cuda.current_stream(self._device).wait_event(self._read)

    def apart_s(self, cost_s: float) -> float:
        return max(self._stall_s / DEVICE_SHARE, cost_s)


Piece = Callable[[], Tensor]
"""Makes a part of a tensor, as bytes on the device."""
OnQueued = Callable[[torch.cuda.Event], None]
"""Hears the event of the last copy, once that is queued."""


def pieces_of(entry: StateTensor) -> list[Piece]:
    """Cut a tensor into parts of a chunk at most, in the order of its bytes."""
    assert isinstance(entry.tensor, Tensor)
    live = entry.tensor.detach()

    def part(start: int) -> Tensor:
        return live.contiguous().view(-1).view(torch.uint8)[start : start + CHUNK_BYTES]

    return [partial(part, start) for start in range(0, live.numel() * live.element_size(), CHUNK_BYTES)]


class CopyRing:
    """Copies of pieces into a ring of chunks, in order, as far ahead as chunks are free.

    Args:
        stream: the current one of the thread that calls this.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream,
        chunks: Sequence[Tensor],
        pieces: Sequence[Piece],
        on_queued: OnQueued | None,
    ) -> None:
        self._stream, self._free, self._left = stream, list(chunks), deque(pieces)
        self._under_way: deque[tuple[Tensor, Tensor, torch.cuda.Event]] = deque()
        self._on_queued = on_queued

    def queue(self) -> None:
        """Start copies into all chunks that are free."""
        while self._left and self._free:
            source, chunk = self._left.popleft()(), self._free.pop()
            target = chunk[: source.numel()]
            start_copy(target, source)
            event = _recorded(self._stream)
            self._under_way.append((chunk, target, event))
            if not self._left and self._on_queued is not None:
                self._on_queued(event)

    def parts(self, count: int) -> Iterator[Any]:
        """Yield the next ``count`` parts as they arrive; each is valid until the next one is asked for."""
        for _ in range(count):
            self.queue()
            chunk, target, event = self._under_way.popleft()
            event.synchronize()
            yield target.numpy()
            self._free.append(chunk)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record an event on a stream; a thread that waits for it sleeps."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(stream)
    return event


def start_copy(target: Tensor, source: Tensor) -> None:
    """Queue a copy on the current stream; a source with holes is made contiguous there."""
    target.copy_(source, non_blocking=True)


def page_locked_chunks() -> list[Tensor]:
    """Make the ring; of pageable memory, and said so, where the driver locks none."""
    shape = (CHUNKS, CHUNK_BYTES)
    try:
        ring = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # torch.AcceleratorError is one too
        why = str(error).splitlines()[0]
        log.warning(
            "no page-locked memory for %d MiB of snapshot copies (%s): they go through pageable memory, which"
            " is slower; lower the number of workers of this node, or raise its limit of locked memory",
            CHUNKS * CHUNK_BYTES >> 20,
            why,
        )
        ring = torch.empty(shape, dtype=torch.uint8)
    return list(ring)


def state_copies(device: torch.device) -> StateCopies:
    """Choose the way of a device."""
    return DeviceCopies(device) if device.type == "cuda" else HostCopies()
