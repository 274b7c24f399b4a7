"""Process groups of one generation that another thread can abort, and that leave the process reusable.

A worker process lives through many generations. Each one opens a `ProcessGroups` over the standing store
(rendezvous_store.py) under a prefix of its own. When a peer dies or the coordinator interrupts, `abort` shuts
the connections of exactly those groups (sockets.py). Every blocked collective of this process then raises
within milliseconds, and so do the peers'. After `close` the next generation opens in the same process.

Groups besides the default one (a mesh) are made inside ``with groups.forming():``. At its end the ranks
exchange the addresses on which their gloo devices listen. From then on `abort` knows its own connections for
certain. While groups are forming it finds them by before/after difference, and keeps sweeping until the
forming thread is out. All ranks meet in the store before any connection is made, so an earlier interrupt only
has to release a wait on the store.

NCCL has an abort of its own that is known to hang (pytorch#119215, #149153). It runs on a thread with a time
limit. Where the limit has passed `abort` returns False, and the process must be killed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from picotron_ray.comm import torch_groups
from picotron_ray.comm.abortable_wait import AbortWatch, unwatch, watch
from picotron_ray.comm.collectives.pending import PENDING
from picotron_ray.comm.group_release import PROMPT_S, release
from picotron_ray.comm.operation_record import OPERATIONS
from picotron_ray.comm.renamed import all_gather_single
from picotron_ray.comm.sockets import Address, SocketInfo, shut_connections, tcp_sockets
from picotron_ray.errors import PeerLostError

NCCL_ABORT_S = 5.0
SWEEP_S = 0.002
# Texts by which gloo reports a lost peer; torch raises them as bare RuntimeError.
LOST_PEER_TEXTS = (
    "gloo",
    "Connection",
    "connection",
    "Socket",
    "socket",
    "Broken pipe",
    "imed out",
    "timeout",
)


def meet_poll_s(world_size: int) -> float:
    """Seconds between two looks of a rank that waits in the store: 2,000 a second of all ranks at most."""
    return max(0.05, world_size / 2000)


class ProcessGroups:
    """The process groups of one rank in one generation.

    Args:
        host, port: address of the standing TCPStore server.
        prefix: unique to the generation; keys of other generations are never seen.
        rank, world_size: place in the generation.
        backend: "gloo" or "nccl".
        timeout_s: limit of a collective, in seconds.
        rendezvous_s: limit of the wait for the other ranks, in seconds.
        device: under NCCL, the GPU of this process; its communicators then connect at once.

    Fields:
        nodes: once connected, where each rank runs: its host and its network namespace.
    """

    def __init__(
        self,
        host: str,
        port: int,
        prefix: str,
        rank: int,
        world_size: int,
        backend: str = "gloo",
        timeout_s: float = 300.0,
        rendezvous_s: float = 60.0,
        device: torch.device | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self._server = (host, port)
        self._prefix = prefix
        self.timeout = timedelta(seconds=timeout_s)
        self._rendezvous_s = rendezvous_s
        self._device = device if backend == "nccl" else None
        self._aborted = threading.Event()
        self._forming = False
        self._rounds = 0
        self.nodes: tuple[str, ...] = ()
        self._before: set[str] = set()  # inodes that were open before this generation
        self._store_inodes: set[str] = set()
        self._listening: set[Address] = set()  # of this process's gloo devices
        self._known: set[Address] = set()  # of all ranks' gloo devices, this one's included
        self._client: TCPStore | None = None
        self._store: PrefixStore | None = None
        self._initialised = False
        self._watch: AbortWatch | None = None
        self._left_behind = False
        self._hook = sys.excepthook

    @classmethod
    def open(
        cls,
        host: str,
        port: int,
        prefix: str,
        rank: int,
        world_size: int,
        backend: str = "gloo",
        timeout_s: float = 300.0,
        rendezvous_s: float = 60.0,
    ) -> ProcessGroups:
        """Construct and `connect`, for callers that need no abort of the rendezvous itself."""
        groups = cls(host, port, prefix, rank, world_size, backend, timeout_s, rendezvous_s)
        groups.connect()
        return groups

    def connect(self) -> None:
        """Meet the other ranks and make the default process group.

        Raises PeerLostError if the generation was aborted, the store is gone, or a rank did not come.
        """
        with self.guard("rendezvous"):
            self._before = {info.inode for info in tcp_sockets()}
            self._hook = sys.excepthook
            PENDING.clear()
            OPERATIONS.begin(self.backend, self._is_ours)
            with self.forming(publish=False):
                self._connect_store()
                self._meet()
                dist.init_process_group(
                    self.backend,
                    store=self._store,
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=self.timeout,
                    device_id=self._device,
                )
                self._initialised = True
                if self.backend == "gloo":
                    self._watch = watch(self._aborted)
                self._exchange_addresses()

    def _connect_store(self) -> None:
        host, port = self._server
        limit = timedelta(seconds=self._rendezvous_s)
        self._client = TCPStore(host, port, is_master=False, timeout=limit)
        self._store = PrefixStore(self._prefix, self._client)
        self._store_inodes = {
            info.inode
            for info in tcp_sockets()
            if info.peer is not None and info.peer[1] == port and info.inode not in self._before
        }
        self.check()

    def _meet(self) -> None:
        """Wait in the store, where an abort can reach, until every rank is here."""
        assert self._store is not None
        arrived = self._store.add("arrived", 1)
        if arrived > self.world_size:  # torch would find the addresses of those before, who are gone
            raise PeerLostError(
                f"{self._prefix}: {arrived} ranks have come, {self.world_size} belong to it: a generation of"
                " this name has been in this store before; begin one of another name"
            )
        if arrived == self.world_size:
            self._store.set("all-arrived", "1")
        self._store.wait(["all-arrived"], timedelta(seconds=self._rendezvous_s))
        self.check()

    def wait_for_all(self, what: str, meanwhile: Callable[[], None]) -> None:
        """Wait in the store, for as long as it takes, until every rank has called this for ``what``.

        Args:
            meanwhile: called again and again; what it raises ends the wait.

        Raises PeerLostError if the generation was aborted or the store is gone.
        """
        with self.guard(what):
            self.check()
            assert self._store is not None
            if self._store.add(f"count/{what}", 1) == self.world_size:
                self._store.set(f"all/{what}", "1")
            while not self._store.check([f"all/{what}"]):
                self.check()
                meanwhile()
                time.sleep(meet_poll_s(self.world_size))
            self.check()

    @contextlib.contextmanager
    def forming(self, publish: bool = True) -> Iterator[None]:
        """Allow further groups inside, made by all ranks in the same order. Ends with an exchange."""
        self._forming = True
        try:
            self.check()
            yield
            if publish:
                self._exchange_addresses()
            self.check()
        finally:
            self._forming = False

    def _exchange_addresses(self) -> None:
        """Tell all ranks where this one runs, and where its gloo devices listen; over the default group.

        Each reading all others' in the store would be rank² reads. NCCL is aborted without addresses.
        """
        self._rounds += 1
        node = f"{platform.node()}/{os.stat('/proc/self/ns/net').st_ino}"
        words = [node]
        if self.backend == "gloo":
            self._listening = {
                info.local for info in tcp_sockets() if info.listening and info.inode not in self._before
            }
            words += [f"{host}|{port}" for host, port in sorted(self._listening)]
        elif self.nodes:
            return
        found = [text.split() for text in self._all_gather_text(" ".join(words))]
        self.nodes = tuple(node for node, *_ in found)
        for _, *listening in found:
            for item in listening:
                host, _, port = item.partition("|")
                self._known.add((host, int(port)))

    def _all_gather_text(self, mine: str) -> list[str]:
        """Gather a text from every rank."""
        data = mine.encode()
        sizes = self.all_gather(torch.tensor([len(data)], device=self._device)).view(-1).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.all_gather(padded.to(self._device)).cpu().numpy()
        return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]

    # --- abort ---------------------------------------------------------------------------------------

    @property
    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted.is_set()

    @property
    def given_up(self) -> bool:
        """Whether an operation was left behind (abortable_wait.py); its sockets close after its timeout.

        After `close` this is true also where no caller had waited for the operation.
        """
        return self._left_behind or (self._watch is not None and self._watch.given_up)

    def check(self) -> None:
        """Raise PeerLostError if the groups were aborted."""
        if self.aborted:
            raise PeerLostError("the generation was aborted")

    def _is_ours(self, info: SocketInfo) -> bool:
        if info.inode in self._before:
            return False
        if info.inode in self._store_inodes:
            return True
        if self._forming:  # connections that no list names yet
            return True
        return info.local in self._known or info.peer in self._known

    def abort(self) -> bool:
        """Make every blocked or later collective of this generation raise.

        Any thread may call it at any time, also again.

        Returns False only where NCCL did not abort within its bound: kill the process then.
        """
        self._aborted.set()
        shut_connections(self._is_ours)
        if self._forming:
            threading.Thread(target=self._sweep, name="abort-sweep", daemon=True).start()
        if self.backend != "gloo" and self._initialised:
            return self._abort_backend()
        return True

    def _sweep(self) -> None:
        """Shut connections for as long as another thread may still be opening them."""
        deadline = time.monotonic() + self._rendezvous_s
        while self._forming and time.monotonic() < deadline:
            shut_connections(self._is_ours)
            time.sleep(SWEEP_S)

    def _abort_backend(self) -> bool:
        def run() -> None:
            with contextlib.suppress(RuntimeError):
                torch_groups.abort_all()

        thread = threading.Thread(target=run, name="nccl-abort", daemon=True)
        thread.start()
        thread.join(NCCL_ABORT_S)
        return not thread.is_alive()

    def lost_peer(self, error: BaseException) -> bool:
        """Whether ``error`` came from a dead peer or an abort, rather than from a mistake in the program."""
        if isinstance(error, (PeerLostError, dist.DistError)):
            return True
        if not isinstance(error, RuntimeError):
            return False
        if self.aborted or any(text in str(error) for text in LOST_PEER_TEXTS):
            return True
        # pipeline stages wrap what went wrong in them
        return error.__cause__ is not None and self.lost_peer(error.__cause__)

    @contextlib.contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Turn torch's errors about lost peers into PeerLostError; other errors pass.

        The original error is not chained: its traceback's frames would keep the groups alive.
        """
        try:
            yield
        except Exception as error:
            if not self.lost_peer(error):
                raise
            why = "this generation was aborted" if self.aborted else str(error).splitlines()[0][:300]
            lost = PeerLostError(f"rank {self.rank} lost a peer during {doing}: {why}")
            traceback.clear_frames(error.__traceback__)
            try:
                raise lost
            except PeerLostError:
                lost.__context__ = None
                raise

    # --- use and end -----------------------------------------------------------------------------------

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather one small tensor of the same shape from all ranks: [n] -> [world_size, n]."""
        gathered = values.new_empty((self.world_size * values.numel(),))
        all_gather_single(gathered, values.reshape(-1))
        return gathered.view(self.world_size, *values.shape)

    def close(self) -> None:
        """Destroy the groups; every engine, mesh and traceback over them must be gone before.

        Nothing here waits for a peer: where an operation still runs, the groups stay behind until its
        timeout, with a thread of their own (group_release.py).
        """
        if self.aborted:
            shut_connections(self._is_ours)
        self._left_behind = self.given_up
        if self._watch is not None:
            unwatch()
            self._watch = None
        OPERATIONS.end()
        self._initialised = False
        self._store = None
        self._client = None
        if dist.is_initialized():
            groups = torch_groups.living_groups()
            dist.destroy_process_group()
            gone = release(groups, 0.0 if self._left_behind else PROMPT_S)
            self._left_behind = not gone
        sys.excepthook = self._hook  # init_process_group wraps it once more each time
