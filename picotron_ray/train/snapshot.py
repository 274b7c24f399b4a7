"""Snapshots of one rank's state into host-memory slots, off the critical path.

``begin`` hands the copy of step k to a background thread. The loop computes step k+1 meanwhile, and calls
``wait_copied`` before its optimizer writes (`state_copies` says what is waited for on a device). DP replicas
on one node share the copying. A flush, at the end of a generation, holds the next replica's share too
(`layout.snapshot_shares`), so that the newest step survives any one of them; of a small state it holds all.
Every slot carries the ledger lines since the last commit.

Slots grow in the background where a generation writes more than the one before. There the pages of those
that have grown are locked, where a device writes into them (`slot_room`). Until both are done, snapshots that
no checkpoint asks for are skipped; without room to grow they still are, and it is tried again.

The ranks tell each other which step is sealed everywhere, in the exchange that ends every step
(`step_sync`). That costs no message and comes at once. An announcement by the coordinator, once a second,
would leave no slot free to write when a step takes 20 ms.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from picotron_ray.checkpoint.snapshot.replica_split import shared_tensors, split_for_replica, state_bytes
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, SlotKey, slot_bytes
from picotron_ray.checkpoint.snapshot.slot_pool import SlotPool
from picotron_ray.checkpoint.torch_state import StateTensor, look_for_nonfinite
from picotron_ray.data.batch import samples_of
from picotron_ray.errors import NumericsError, SlotRoomError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.snapshot_shares import flushed_shares
from picotron_ray.train.slot_room import Growth, SlotRoom
from picotron_ray.train.state_copies import HostCopies, StateCopies
from picotron_ray.train.update_policy import NON_FINITE

RELEASE_WAIT_S = 30.0
"""Time limit of a generation's last snapshot to get a slot that an upload still pins."""

log = logging.getLogger(__name__)


def _unheard() -> None:
    """Take no note of growth."""


def _checked() -> None:
    """Look at nothing a second time."""


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


def flush_bytes(state: Sequence[StateTensor], index: int, count: int) -> int:
    """Bytes of a slot that holds what replica ``index`` of ``count`` on its node flushes."""
    shares = flushed_shares(index, count, state_bytes(state))
    return slot_bytes([tensor.shard for tensor in shared_tensors(state, shares, count)])


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
        growth: Growth = lambda: nullcontext(_unheard),
        copies: StateCopies | None = None,
    ) -> None:
        """
        Args:
            protected: key of the state that the generation resumed from; it stays until a newer state is
                sealed on all ranks.
            on_sealed: told (step, pinned, seconds taken) after each seal, from the background thread.
            extra: what the headers hold besides, as of the state at hand.
            growth: entered while the loop waits for slots to grow; what it yields is called as they do.
            copies: way of the state into host memory; None: it is there.
        """
        self._copies = HostCopies() if copies is None else copies
        self._pool, self._writer = pool, writer
        self._whole = [tensor for tensor in state if tensor.primary]
        self._share = split_for_replica(self._whole, writer.index, writer.count)
        capacity = flush_bytes(self._whole, writer.index, writer.count)
        self._complete = protected
        self._kept: SlotKey | None = None
        self._on_sealed, self._on_phase, self._extra = on_sealed, on_phase, extra
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._room = SlotRoom(pool, capacity, lambda: self._complete, growth, self._executor)
        self._pending: Future[None] | None = None  # a copy that the live state is not safe from yet
        self._sealing: Future[None] | None = None  # the same until its slot is sealed
        self._pending_pinned = False
        self._hurry = threading.Event()
        self._no_room = False
        self._told = ""
        self.sealed_step = -1
        self._sealed_whole = writer.count == 1
        self.skipped = 0
        self.cost_s = 0.0
        self.waited_s = 0.0
        self.pinned_wait_s = 0.0  # of the newest checkpoint's copy
        self._room.grow()

    def lock_pages(self) -> None:
        """Lock the pages of slots before the first step, and make the ring for those that have none then.

        Nothing where no device writes into them.
        """
        grows = self._room.busy
        self._room.lock_before_steps()
        if grows or not self._pool.locked:
            self._copies.make_ring()

    def begin(self, step: int, tail: Sequence[str], pinned: bool) -> bool:
        """Start to copy the state at ``step``; False if no slot is free, or the one before is not sealed yet.

        Such a snapshot is skipped and counted. A pinned one waits for the one before.
        """
        self.wait_copied()
        if self._sealing is not None and not pinned and not self._sealing.done():
            self.skipped += 1
            return False
        self.wait_sealed()
        if self._no_room:
            self._no_room = False
            self._room.grow()
        if self._room.busy and not pinned:
            self.skipped += 1
            return False
        self._wait_grown()
        if self._pool.missing:
            self._executor.submit(self._pool.fill)  # before this copy: touching new memory takes long
        slot = self._choose()
        if slot is None:
            self.skipped += 1
            return False
        header = self._header(step, tail, (self._writer.index,))
        self._copies.begin()
        self._pending = self._executor.submit(self._write_if_room, slot, header, self._share, pinned)
        self._sealing = self._pending
        self._pending_pinned = pinned
        return True

    def _choose(self) -> SlotFile | None:
        return self._pool.choose(self._complete, (self._writer.term, self._writer.n), self._kept)

    def _part_of(self, step: int) -> SlotFile | None:
        """Slot with this rank's share of ``step`` alone, to be written anew with what a flush holds.

        A rank that dies while it copies step k is behind in what it has sealed. The others then hold k - 1, k
        and k + 1, and no slot is free: without the dead one's share of k + 1 two steps would be lost.
        """
        return self._pool.holding((self._writer.term, self._writer.n, step))

    def wait_copied(self) -> None:
        """Wait for the copy under way, after which the live state may be written.

        Raises what the copy raised.
        """
        if self._pending is None and self._sealing is not None and self._sealing.done():
            self.wait_sealed()
        if self._pending is not None:
            began = time.monotonic()
            pending, self._pending = self._pending, None
            try:
                self._copies.follow(pending)
            except Exception:
                self._sealing = None  # told once
                raise
            waited_s = time.monotonic() - began
            self.waited_s += waited_s
            if self._pending_pinned:
                self.pinned_wait_s = waited_s

    def wait_sealed(self) -> None:
        """Wait until what was begun is sealed too. Raises what its writing raised."""
        if self._pending is not None:
            self.wait_copied()
        sealing, self._sealing = self._sealing, None
        if sealing is not None:
            sealing.result()

    @property
    def apart_s(self) -> float:
        """Seconds that snapshots of this rank are apart at least, from what they have cost so far."""
        return self._copies.apart_s(self.cost_s)

    def observe(self, sealed: int) -> None:
        """Hear that every rank has sealed step ``sealed``: slots with older states may be overwritten."""
        if sealed >= 0:
            self._complete = max(self._complete, (self._writer.term, self._writer.n, sealed))

    def keep(self, step: int) -> None:
        """Keep the slot of a state that is known to be sound for as long as another one can be written."""
        self._kept = (self._writer.term, self._writer.n, step)

    def flush(self, step: int, tail: Sequence[str], pinned: bool) -> bool:
        """Seal what a flush holds at ``step``, in the calling thread; False if no slot came free.

        Raises:
            NumericsError: the state is not finite.
            SlotRoomError: ``pinned``, and there is no room even for this rank's own share.
        """
        self.wait_sealed()
        self._room.end()
        self._wait_grown()
        if self.sealed_step == step and self._sealed_whole and not pinned:
            return True
        deadline = time.monotonic() + (RELEASE_WAIT_S if pinned else 0.0)
        while (slot := self._choose() or self._part_of(step)) is None:
            if time.monotonic() >= deadline or self._hurry.is_set():
                self.skipped += 1
                return False
            time.sleep(0.01)
        shares = flushed_shares(self._writer.index, self._writer.count, state_bytes(self._whole))
        for held in (shares, shares[:1]):  # its own alone where there is no room for the other's
            self._copies.begin()
            try:
                self._write(slot, self._header(step, tail, held), self._tensors(held), pinned)
            except SlotRoomError as error:
                problem = error
            else:
                self._sealed_whole = held == shares
                return True
        if pinned:
            raise problem
        self._skip(problem)
        return False

    def stop_waiting(self) -> None:
        """Wait for no slot any more; any thread may call this."""
        self._hurry.set()
        self._room.stop_waiting()

    def close(self) -> None:
        """Wait for the copy under way and end its thread. The slots belong to the worker, and stay."""
        self._room.close()
        self._executor.shutdown(wait=True)
        self._whole, self._share, self._pending, self._sealing = [], [], None, None

    def _tensors(self, shares: Sequence[int]) -> list[StateTensor]:
        return shared_tensors(self._whole, shares, self._writer.count)

    # --- room --------------------------------------------------------------------------------------------

    def _wait_grown(self) -> None:
        """Wait for the slots to grow; without room, write what fits into them as they are."""
        try:
            self._room.wait_grown()
        except SlotRoomError as error:
            self._tell(error)

    def _write_if_room(
        self, slot: SlotFile, header: SlotHeader, tensors: Sequence[StateTensor], pinned: bool
    ) -> None:
        try:
            self._write(slot, header, tensors, pinned)
        except SlotRoomError as error:
            self._skip(error)

    def _skip(self, problem: SlotRoomError) -> None:
        self.skipped += 1
        self._no_room = True
        self._tell(problem)

    def _tell(self, problem: SlotRoomError) -> None:
        """Say once a generation what is missing; the free space that it names changes all the time."""
        if not self._told:
            self._told = str(problem)
            log.warning("rank %d skips snapshots that do not fit: %s", self._writer.rank, problem)

    # --- writing -----------------------------------------------------------------------------------------

    def _header(self, step: int, tail: Sequence[str], shares: Sequence[int]) -> SlotHeader:
        """Header of a slot with these of the node's shares; all of them together are one whole."""
        writer = self._writer
        whole = len(shares) == writer.count
        fragments = [(writer.group, index, writer.count) for index in shares]
        return SlotHeader(
            term=writer.term,
            n=writer.n,
            step=step,
            rank=writer.rank,
            fragments=((writer.group, 0, 1),) if whole else tuple(fragments),
            layout=writer.layout.to_dict(),
            cursor=step * writer.global_batch,
            ledger=tuple(tail),
            extra=self._extra(),
        )

    def _write(
        self, slot: SlotFile, header: SlotHeader, tensors: Sequence[StateTensor], pinned: bool
    ) -> None:
        began, locked = time.monotonic(), slot.locked
        shards = tuple(tensor.shard for tensor in tensors)
        with self._copies.reading():
            nonfinite = look_for_nonfinite(tensors)  # before the copies: read when they are done
            check: Callable[[], None] = partial(self._check, header, nonfinite)
            if self._copies.looks_first(self._holds_needed(slot, header)):
                check()  # what the slot holds is not void yet
                check = _checked
            content = self._copies.buffers(tensors, moving=slot.holds(header, shards))
            slot.write(header, shards, content, pinned=pinned, check=check, on_phase=self._on_phase)
        seconds = time.monotonic() - began
        self.cost_s = seconds if not self.cost_s else 0.8 * self.cost_s + 0.2 * seconds
        self.sealed_step = header.step
        self._on_sealed(header.step, pinned, seconds)
        if locked and not slot.locked:  # it has grown
            self._room.lock_pages()

    def _holds_needed(self, slot: SlotFile, header: SlotHeader) -> bool:
        """Whether a slot holds a state that is known to be sound, or this rank's share of the same one."""
        return slot.key is not None and slot.key in (self._kept, header.key)

    def _check(self, header: SlotHeader, nonfinite: Callable[[], str | None]) -> None:
        """Refuse a state that is not finite: each rank vouches for what it writes."""
        name = nonfinite()
        if name is not None:
            samples = samples_of(header.step, self._writer.global_batch)
            raise NumericsError(
                f"{name} after step {header.step} ({samples}): saw NaN or infinity, expected finite values;"
                " the state is not kept: lower the learning rate",
                header.step,
                NON_FINITE,
            )
