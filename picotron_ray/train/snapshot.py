"""Snapshots of one rank's state into host-memory slots, off the critical path.

``begin`` hands the copy of step k to a background thread. The loop computes step k+1 meanwhile, and calls
``wait_copied`` before its optimizer writes. DP replicas on one node share the copying. A flush, at the end of
a generation, holds all of the rank's state, so that a single surviving replica is enough. Every slot carries
the ledger lines since the last commit, for the same reason.

The ranks tell each other which step is sealed everywhere, in the exchange that ends every step
(`step_sync`). That costs no message and comes at once. An announcement by the coordinator, once a second,
would leave no slot free to write when a step takes 20 ms.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from picotron_ray.checkpoint.snapshot.replica_split import split_for_replica
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, SlotKey
from picotron_ray.checkpoint.snapshot.slot_pool import SlotPool
from picotron_ray.checkpoint.torch_state import StateTensor, buffers, first_nonfinite
from picotron_ray.data.batch import samples_of
from picotron_ray.errors import NumericsError
from picotron_ray.layout.layout import Layout

RELEASE_WAIT_S = 30.0
"""Time limit of a generation's last snapshot to get a slot that an upload still pins."""


@dataclass(frozen=True, slots=True)
class SnapshotWriter:
    """Place of a writing rank in its generation, and among its node's replicas."""

    term: int
    n: int
    rank: int
    layout: Layout
    global_batch: int
    group: int  # Layout.state_group of the rank
    index: int  # among the members of the group on this node
    count: int

    @classmethod
    def of(
        cls, generation: tuple[int, int], rank: int, layout: Layout, nodes: Sequence[str], global_batch: int
    ) -> SnapshotWriter:
        """Find the place of ``rank``. ``nodes``: the node of every rank."""
        mates = [r for r in layout.state_replicas(rank) if nodes[r] == nodes[rank]]
        return cls(
            term=generation[0],
            n=generation[1],
            rank=rank,
            layout=layout,
            global_batch=global_batch,
            group=layout.state_group(rank),
            index=mates.index(rank),
            count=len(mates),
        )


class Snapshotter:
    """Writes the snapshots of one generation; ``begin``, ``wait_copied`` and ``flush`` are the loop's."""

    def __init__(
        self,
        pool: SlotPool,
        writer: SnapshotWriter,
        state: Sequence[StateTensor],
        protected: SlotKey,
        on_sealed: Callable[[int, bool, float], None],
        on_phase: Callable[[str], None] | None = None,
        extra: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """
        Args:
            protected: key of the state that the generation resumed from; it stays until a newer state is
                sealed on all ranks.
            on_sealed: told (step, pinned, seconds taken) after each seal, from the background thread.
            extra: what the headers hold besides, as of the state at hand.
        """
        self._pool, self._writer = pool, writer
        self._whole = list(state)
        self._share = split_for_replica(self._whole, writer.index, writer.count)
        self._complete = protected
        self._on_sealed, self._on_phase, self._extra = on_sealed, on_phase, extra
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._pending: Future[None] | None = None
        self._pending_pinned = False
        self._lock = threading.Lock()
        self.sealed_step = -1
        self._sealed_whole = writer.count == 1
        self.skipped = 0
        self.cost_s = 0.0
        self.waited_s = 0.0
        self.pinned_wait_s = 0.0  # of the newest checkpoint's copy

    def begin(self, step: int, tail: Sequence[str], pinned: bool) -> bool:
        """Start to copy the state at ``step``; return False if no slot is free (skipped and counted)."""
        self.wait_copied()
        slot = self._pool.choose(self._complete)
        if slot is None:
            self.skipped += 1
            return False
        header = self._header(step, tail, self._writer.index, self._writer.count)
        self._pending = self._executor.submit(self._write, slot, header, self._share, pinned)
        self._pending_pinned = pinned
        return True

    def wait_copied(self) -> None:
        """Wait for the copy under way, after which the live state may be written.

        Raises what the copy raised.
        """
        if self._pending is not None:
            began = time.monotonic()
            pending, self._pending = self._pending, None
            pending.result()
            waited_s = time.monotonic() - began
            self.waited_s += waited_s
            if self._pending_pinned:
                self.pinned_wait_s = waited_s

    def observe(self, sealed: int) -> None:
        """Hear that every rank has sealed step ``sealed``: slots with older states may be overwritten."""
        if sealed >= 0:
            self._complete = max(self._complete, (self._writer.term, self._writer.n, sealed))

    def flush(self, step: int, tail: Sequence[str], pinned: bool) -> bool:
        """Seal all of the rank's state at ``step``, in the calling thread; False if no slot came free.

        Raises:
            NumericsError: the state is not finite.
        """
        self.wait_copied()
        if self.sealed_step == step and self._sealed_whole and not pinned:
            return True
        header = self._header(step, tail, 0, 1)
        deadline = time.monotonic() + (RELEASE_WAIT_S if pinned else 0.0)
        while (slot := self._pool.choose(self._complete)) is None:
            if time.monotonic() >= deadline:
                self.skipped += 1
                return False
            time.sleep(0.01)
        self._write(slot, header, [tensor for tensor in self._whole if tensor.primary], pinned)
        self._sealed_whole = True
        return True

    def close(self) -> None:
        """Wait for the copy under way and end the thread. The slots belong to the worker, and stay."""
        self._executor.shutdown(wait=True)
        self._whole, self._share, self._pending = [], [], None

    def _header(self, step: int, tail: Sequence[str], index: int, count: int) -> SlotHeader:
        writer = self._writer
        return SlotHeader(
            term=writer.term,
            n=writer.n,
            step=step,
            rank=writer.rank,
            fragments=((writer.group, index, count),),
            layout=writer.layout.to_dict(),
            cursor=step * writer.global_batch,
            ledger=tuple(tail),
            extra=self._extra(),
        )

    def _write(
        self, slot: SlotFile, header: SlotHeader, tensors: Sequence[StateTensor], pinned: bool
    ) -> None:
        began = time.monotonic()
        self._check(header, tensors)
        shards = tuple(tensor.shard for tensor in tensors)
        slot.write(header, shards, buffers(tensors), pinned=pinned, on_phase=self._on_phase)
        seconds = time.monotonic() - began
        self.cost_s = seconds if not self.cost_s else 0.8 * self.cost_s + 0.2 * seconds
        self.sealed_step = header.step
        self._on_sealed(header.step, pinned, seconds)

    def _check(self, header: SlotHeader, tensors: Sequence[StateTensor]) -> None:
        """Refuse a state that is not finite: each rank vouches for what it writes."""
        name = first_nonfinite(tensors)
        if name is not None:
            samples = samples_of(header.step, self._writer.global_batch)
            raise NumericsError(
                f"{name} after step {header.step} ({samples}): saw NaN or infinity, expected finite values;"
                " the state is not kept: lower the learning rate"
            )
