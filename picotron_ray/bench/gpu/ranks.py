"""Ranks of ``bench gpu`` on this machine, and what a coordinator would decide for them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from picotron_ray.bench.gpu.rank import NODE
from picotron_ray.bench.recovery.peers.host import environment
from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.codec import plain
from picotron_ray.coordinator.lineage import descend
from picotron_ray.coordinator.messages import Fragment, GenerationId, GenerationSpec, Member, SlotInfo, Source
from picotron_ray.coordinator.policies.restore_point import newest_slots
from picotron_ray.errors import PicotronError
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.heartbeat import PageView, read_page

TERM = 1
REPLY_S = 900.0
POLL_S = 0.005
Answer = dict[str, Any]


class Rank:
    """One process of `picotron_ray.bench.gpu.rank`."""

    def __init__(self, job_file: Path, folder: Path, name: str, kind: str) -> None:
        self.name, self._folder = name, folder
        self._log = (folder / f"{name}.log").open("wb")
        command = [
            sys.executable,
            "-m",
            "picotron_ray.bench.gpu.rank",
            str(job_file),
            str(folder),
            name,
            kind,
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment()
        )
        self._unread = b""

    def send(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, limit_s: float = REPLY_S) -> Answer:
        """Wait for a line; raises PicotronError where there is none in time, with the log's last line."""
        assert self._process.stdout is not None
        ready = select.poll()
        ready.register(self._process.stdout, select.POLLIN)
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            data = (
                os.read(self._process.stdout.fileno(), 1 << 16) if ready.poll(1000 * max(left_s, 0)) else b""
            )
            if not data:
                raise PicotronError(
                    f"{self.name}: no answer in {limit_s:g} s, or its end: {self._last_line()}"
                )
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        found: Answer = json.loads(line)
        return found

    def _last_line(self) -> str:
        lines = (self._folder / f"{self.name}.log").read_text(errors="replace").strip().splitlines()[-1:]
        return "".join(lines)[:300]

    def page(self) -> PageView | None:
        return read_page(self._folder / f"{self.name}.page")

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


class Ranks:
    """All ranks, the store in which they meet, and their generations so far."""

    def __init__(self, job: JobConfig, kind: str, folder: Path) -> None:
        """
        Args:
            folder: of the run, with its slots; it is made.
        """
        folder.mkdir(parents=True)
        self._folder, self._kind, self._made = folder, kind, 0
        self._job_file = folder / "job.json"
        self._job_file.write_text(job.model_dump_json())
        self._layouts: dict[GenerationId, Layout] = {}
        self.last: GenerationSpec | None = None
        self.members: list[Rank] = []
        store = [sys.executable, "-m", "picotron_ray.comm.rendezvous_store", "--parent-pid", str(os.getpid())]
        self._store = subprocess.Popen(store, stdout=subprocess.PIPE, text=True)
        assert self._store.stdout is not None
        self._address = json.loads(self._store.stdout.readline())

    def fill(self, count: int) -> None:
        """Start processes until there are ``count``, and wait until they are ready."""
        fresh = []
        while len(self.members) < count:
            name = f"rank-{self._made}"
            self._made += 1
            self.members.append(Rank(self._job_file, self._folder, name, self._kind))
            fresh.append(self.members[-1])
        for rank in fresh:
            rank.answer()

    def begin(self, layout: Layout, *, resume: bool = True) -> None:
        """Start a generation of the first ranks, from the newest state in slots or from step 0."""
        members = self.members[: layout.world_size]
        found = newest_slots(self._slots(), self._layouts, self.last) if resume else None
        source = found or Source("init")
        identity = GenerationId(TERM, len(self._layouts) + 1)
        places = tuple(Member(rank.name, NODE) for rank in members)
        lineage = descend(self.last, source) if resume else ()
        self.last = GenerationSpec(identity, places, layout, source, "bench gpu", lineage)
        self._layouts[identity] = layout
        order = {"spec": plain(self.last), **self._address, "told": str(self._told())}
        for rank in members:
            rank.send(order)

    def _told(self) -> Path:
        assert self.last is not None
        return self._folder / f"abort-{self.last.id.n}"

    def order_abort(self) -> None:
        """Have all living ranks leave their generation at once."""
        self._told().touch()

    def answers(self, members: Sequence[Rank]) -> list[Answer]:
        return [rank.answer() for rank in members]

    def wait_for_step(self, step: int) -> None:
        """Wait until all ranks of the generation have sealed a snapshot of ``step`` or later."""
        assert self.last is not None
        deadline = time.monotonic() + REPLY_S
        members = self.members[: self.last.layout.world_size]
        while not all((page := rank.page()) and page.complete >= step for rank in members):
            if time.monotonic() > deadline:
                raise PicotronError(f"bench gpu: step {step} was not sealed on all ranks in {REPLY_S:g} s")
            time.sleep(POLL_S)

    def kill(self, rank: Rank) -> float:
        """Kill a rank; returns the time, in seconds since the epoch."""
        at_s = time.time()
        rank.kill()
        self.members.remove(rank)
        return at_s

    def _slots(self) -> list[SlotInfo]:
        found = []
        for path, header in list_slots(self._folder):
            parts = tuple(Fragment(*part) for part in header.fragments)
            identity = GenerationId(header.term, header.n)
            found.append(SlotInfo(NODE, path.name, identity, header.step, header.rank, parts))
        return found

    def close(self) -> None:
        """End all processes; slots stay in the folder."""
        for rank in self.members:
            rank.kill()
        self._store.terminate()
        self._store.wait()
        assert self._store.stdout is not None
        self._store.stdout.close()
