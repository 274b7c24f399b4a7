"""Heartbeat page: a small memory-mapped file per worker, written by it, read by its node's agent.

Reading it needs no cooperation from the worker: it works while the worker holds the GIL, is stopped or
is dead. Every field is 8 bytes and written whole, so a reader sees old or new, never a mixture of one
field; the figures of a finished step are written before its step number.

Each phase carries its own limit: the worker measures how long its phases take and publishes, on entry,
the time after which the phase counts as a hang (`runtime.phase_limits`). The agent only compares.
``progress`` counts whatever moves: entries of phases, and within long ones what is built or read.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from picotron_ray.comm.collectives.pending import PENDING
from picotron_ray.config.schema.memory import MEMORY_CLASSES
from picotron_ray.config.schema.service import PHASES, ElasticConfig
from picotron_ray.config.support.evaluation import MOST_SETS
from picotron_ray.errors import SlotRoomError
from picotron_ray.observability.agent_metrics import STEP_BUCKETS_S
from picotron_ray.observability.metric import bucket_of
from picotron_ray.runtime.phase_limits import MOVING, PhaseLimits, StepWork
from picotron_ray.train.way_selection import THINGS

WANT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of a reader that is out of something itself, which say nothing of what it wanted to read."""
SIZE = 4096
MAGIC = 0x7069636F74726F31
_FIELDS = (
    *(("magic", "q"), ("pid", "q"), ("start_ticks", "q"), ("term", "q"), ("n", "q"), ("rank", "q")),
    *(("phase", "q"), ("phase_count", "q"), ("phase_since_s", "d"), ("phase_limit_s", "d")),
    *(("step", "q"), ("clean", "q"), ("sealed", "q"), ("pinned", "q"), ("skipped", "q"), ("tokens", "q")),
    *(("progress", "q"), ("spins", "q")),  # the second: 1 where waiting for the device takes a core
    ("complete", "q"),  # newest step of the generation that is sealed on all its ranks; -1: none yet
    ("skipped_step", "q"),  # newest step whose update was left out; -1: none
    ("bad_steps", "q"),  # how many there were in the generation
    *(("loss", "d"), ("grad_norm", "d"), ("learning_rate", "d"), ("step_time_s", "d")),
    ("padding_ratio", "d"),  # share of the newest step's tokens that is padding
    ("stage", "q"),  # of the curriculum, from 1 on; 0: there is none
    *(
        ("eval_step", "q"),
        ("eval_loss", "d"),
        ("eval_loss_before", "d"),  # of tasks, before their inner steps
        ("eval_sets", "q"),  # held-out sets beside that have a loss
        *((f"eval_set_{place}", "d") for place in range(MOST_SETS)),
        ("baseline_loss", "d"),
        ("snapshot_s", "d"),
        ("wait_s", "d"),
        ("pinned_wait_s", "d"),
    ),
    ("first_step_at_s", "d"),  # seconds since the epoch at which the generation finished its first step
    ("built_at_s", "d"),  # likewise, at which groups and model were there and restoring began
    ("restored_at_s", "d"),  # likewise, at which the first step began
    *(("cuda_allocated_bytes", "q"), ("cuda_reserved_bytes", "q")),  # -1: no CUDA
    ("memory_mode", "q"),  # place in planner.memory_pressure.MODES
    *((f"memory_{kind}_bytes", "q") for kind in MEMORY_CLASSES),  # of the accounted step; -1: none yet
    ("memory_peak_bytes", "q"),
    ("debugged", "q"),  # 1: a debugger is attached; one that is asked for is not yet
    ("pending_operations", "q"),  # collectives issued and not yet waited for, as the present phase began
    *((f"{thing}_{what}_s", "d") for thing in THINGS for what in ("predicted", "measured")),
    ("step_at_s", "d"),  # seconds since the epoch at which the newest step was finished
    *((f"spent_{phase}_s", "d") for phase in PHASES),  # of the generation, up to the present phase
    ("step_sum_s", "d"),
    *((f"step_count_{bucket}", "q") for bucket in range(len(STEP_BUCKETS_S) + 1)),
)
_PLACE = {name: (i, kind) for i, (name, kind) in enumerate(_FIELDS)}
_RECORD = struct.Struct("=" + "".join(kind for _, kind in _FIELDS))
MOVES_S = 0.05
"""What moves within a phase is published at most this often."""


@dataclass(frozen=True, slots=True)
class PageView:
    """One reading of a page; times in seconds of the node's monotonic clock, steps counted from 0."""

    worker: str
    pid: int
    start_ticks: int
    term: int
    n: int
    rank: int
    phase: str
    phase_count: int
    phase_since_s: float
    phase_limit_s: float
    progress: int
    spins: int
    step: int
    clean: int
    sealed: int
    pinned: int
    skipped: int
    tokens: int
    padding_ratio: float
    stage: int
    complete: int
    skipped_step: int
    bad_steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_time_s: float
    eval_step: int
    eval_loss: float
    eval_loss_before: float
    eval_set_losses: tuple[float, ...]  # of held-out sets beside, those that are evaluated
    baseline_loss: float
    snapshot_s: float
    wait_s: float
    pinned_wait_s: float
    first_step_at_s: float
    built_at_s: float
    restored_at_s: float
    cuda_allocated_bytes: int
    cuda_reserved_bytes: int
    memory_mode: int
    memory_bytes: tuple[int, ...]  # of the accounted step, by MEMORY_CLASSES; -1: none yet
    memory_peak_bytes: int
    debugged: int
    pending_operations: int
    step_at_s: float
    spent_s: tuple[float, ...]  # by PHASES, up to the present one
    communication_s: tuple[tuple[float, float], ...]  # predicted and measured, by `way_selection.THINGS`
    step_sum_s: float  # time of all steps that the process has finished, and their number by STEP_BUCKETS_S
    step_counts: tuple[int, ...]

    def figures(self) -> dict[str, Any]:
        """Return what a heartbeat carries of it: all but what the node's own agent compares and exports.

        Rank 0's says where the generation's seconds went, too.
        """
        found = {name: getattr(self, name) for name in CARRIED}
        leads = self.term and self.rank == 0
        if not leads:
            return found
        sets = {"eval_set_losses": self.eval_set_losses} if self.eval_set_losses else {}
        return {**found, **sets, **self.whereabouts(time.monotonic())}

    def whereabouts(self, now_s: float) -> dict[str, Any]:
        """Return when the newest step was finished, and the generation's seconds by phase, the present one's
        among them.
        """
        spent = {phase: seconds for phase, seconds in zip(PHASES, self.spent_s, strict=True) if seconds}
        spent[self.phase] = spent.get(self.phase, 0.0) + max(0.0, now_s - self.phase_since_s)
        return {"step_at_s": self.step_at_s, "phases_s": spent}

    def stalled(self, now_s: float) -> bool:
        """Whether the present phase has lasted longer than its limit."""
        return self.phase != "idle" and now_s - self.phase_since_s > self.phase_limit_s


_STAYS = {"start_ticks", "phase_count", "phase_limit_s", "progress", "spins", "clean", "sealed", "pinned"}
_STAYS |= {"skipped", "complete", "step_sum_s", "step_counts", "pending_operations", "communication_s"}
_STAYS |= {"eval_set_losses", "step_at_s", "spent_s", "memory_mode", "memory_bytes", "memory_peak_bytes"}
CARRIED = tuple(field.name for field in fields(PageView) if field.name not in _STAYS)
"""Fields of a page that heartbeats carry; 1,000 nodes bring them once a second."""


def process_start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot; guards against a reused pid. 0: no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, all threads, in seconds; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_alive(pid: int, start_ticks: int) -> bool:
    """Whether this very process exists and is not a zombie.

    Raises:
        OSError: this process cannot tell, for want of open files.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        if error.errno in WANT:
            raise
        return False
    return int(fields[19]) == start_ticks and fields[0] not in ("Z", "X")


class Page:
    """Writer's side of a page. ``on_phase`` runs at every phase entry (scripted faults hook in there)."""

    def __init__(
        self, path: Path, elastic: ElasticConfig, on_phase: Callable[[int, str], None] | None = None
    ) -> None:
        """Make the file.

        Raises:
            SlotRoomError: its file system is full.
        """
        self.on_phase = on_phase
        self._limits = PhaseLimits(elastic)
        self._phase, self._since, self._count = "idle", time.monotonic(), 0
        self._counted = self._since  # until then the seconds of the present phase are in ``spent``
        self.computing_step = 0
        self.least_limit_s = 0.0  # above 0 while a tool slows steps down, of which nothing is learned then
        temporary = path.with_suffix(".new")
        create = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, create, 0o600), "wb+") as file:
            allocate(temporary, path, file.fileno(), SIZE)
            mapped = memoryview(mmap.mmap(file.fileno(), SIZE))
        self._integers, self._floats = mapped.cast("q"), mapped.cast("d")
        self.put(
            pid=os.getpid(), start_ticks=process_start_ticks(os.getpid()), clean=-1, sealed=-1, pinned=-1
        )
        self.put(complete=-1, skipped_step=-1, cuda_allocated_bytes=-1, cuda_reserved_bytes=-1)
        self._forget_memory()
        self.put(eval_step=-1, phase_since_s=self._since, phase_limit_s=1e9, magic=MAGIC)
        temporary.rename(path)

    def put(self, **values: float) -> None:
        """Write fields, in the order given."""
        for name, value in values.items():
            at, kind = _PLACE[name]
            # one 8-byte store; struct.pack_into zeroes the field first, and readers would see that
            if kind == "d":
                self._floats[at] = value
            else:
                self._integers[at] = int(value)

    def count_step(self, seconds: float) -> None:
        """Count a step of this length here, since readers look too seldom to see every step."""
        bucket = f"step_count_{bucket_of(seconds, STEP_BUCKETS_S)}"
        step_sum_s = self.value("step_sum_s") + seconds
        self.put(**{bucket: self.value(bucket) + 1}, step_sum_s=step_sum_s, step_time_s=seconds)
        self.put(step_at_s=time.time())
        self._limits.stepped()

    def communication(self, figures: Mapping[str, tuple[float, float]]) -> None:
        """Note seconds of the newest step's communication, predicted and measured, by thing."""
        for thing, (predicted_s, measured_s) in figures.items():
            self.put(**{f"{thing}_predicted_s": predicted_s, f"{thing}_measured_s": measured_s})

    def count_bad(self, step: int) -> None:
        """Note a step whose update was left out."""
        self.put(bad_steps=self.value("bad_steps") + 1, skipped_step=step)

    def value(self, name: str) -> float:
        """Return a field as it was last written."""
        at, kind = _PLACE[name]
        return self._floats[at] if kind == "d" else self._integers[at]

    def begin(self, term: int, n: int, rank: int, step: int, work: StepWork | None = None) -> None:
        """Start a generation; the counters of the previous one are void.

        Args:
            work: what falls on this rank, by which hang limits are scaled; None: as before.
        """
        if work is not None:
            self._limits.begin(work)
        self.computing_step, self.least_limit_s = step + 1, 0.0
        self._forget_memory()
        self._counted = time.monotonic()
        self.put(step_at_s=0.0, **{f"spent_{phase}_s": 0.0 for phase in PHASES})
        self.put(built_at_s=0.0, restored_at_s=0.0, skipped_step=-1, bad_steps=0, complete=-1)
        self.communication(dict.fromkeys(THINGS, (-1.0, -1.0)))
        self.put(first_step_at_s=0.0, sealed=-1, pinned=-1, clean=-1, step=step, rank=rank, n=n, term=term)

    def _forget_memory(self) -> None:
        self.put(
            memory_mode=0, memory_peak_bytes=-1, **{f"memory_{kind}_bytes": -1 for kind in MEMORY_CLASSES}
        )

    def phase(self, name: str, limit_s: float | None = None) -> None:
        """Enter a phase: learn how long the last one took and publish the limit of this one.

        Args:
            limit_s: limit of this one, where its own history says nothing.
        """
        now = time.monotonic()
        self._spend(now)
        if name != self._phase:
            if not self.least_limit_s:
                self._limits.learn(self._phase, now - self._since)
            self._phase, self._since = name, now
        self._count += 1
        limit = 1e9 if name == "idle" else max(self.least_limit_s, limit_s or self._limits.limit(name))
        self.put(phase_limit_s=limit, phase_since_s=now, phase=PHASES.index(name), phase_count=self._count)
        self.put(progress=self.value("progress") + 1, pending_operations=PENDING.count)
        if self.on_phase is not None:
            self.on_phase(self.computing_step, name)

    def _spend(self, now_s: float) -> None:
        """Count the present phase's seconds so far."""
        name = f"spent_{self._phase}_s"
        self.put(**{name: self.value(name) + now_s - self._counted})
        self._counted = now_s

    @property
    def name(self) -> str:
        """The present phase."""
        return self._phase

    def storage_answered(self) -> None:
        """Start the limit of the phase ``storage`` anew; any thread may call this."""
        if self._phase == "storage":
            self.put(phase_since_s=time.monotonic())

    def moved(self) -> None:
        """Say that the present phase goes on; one that is judged by progress gets its whole limit again."""
        now = time.monotonic()
        if now - self._since < MOVES_S:
            return
        self.put(progress=self.value("progress") + 1)
        if self._phase in MOVING:
            self._spend(now)
            self._limits.learn(self._phase, now - self._since)
            self._since = now
            self.put(phase_limit_s=self._limits.limit(self._phase), phase_since_s=now)


def allocate(temporary: Path, path: Path, descriptor: int, size: int) -> None:
    """Take a page's room now: a store into a mapped hole of a full file system is a SIGBUS.

    Args:
        temporary: name of the open file, which is removed where there is no room.
        path: the page's own.

    Raises:
        SlotRoomError: its file system is full.
    """
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise SlotRoomError(
            f"snapshot.folder: no room for a page of {size} bytes in {path.parent}: {error.strerror}; make"
            " room there, or name another folder"
        ) from error


def read_page(path: Path) -> PageView | None:
    """Read a worker's page; None where it is absent or not yet complete.

    Raises:
        OSError: this process cannot tell, for want of open files.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        if error.errno in WANT:
            raise
        return None
    if len(raw) < SIZE:
        return None
    values: dict[str, Any] = dict(zip(_PLACE, _RECORD.unpack_from(raw), strict=True))
    if values.pop("magic") != MAGIC:
        return None
    values["phase"] = PHASES[values["phase"]]
    losses = [values.pop(f"eval_set_{place}") for place in range(MOST_SETS)]
    values["eval_set_losses"] = tuple(losses[: values.pop("eval_sets")])
    counts = [values.pop(f"step_count_{bucket}") for bucket in range(len(STEP_BUCKETS_S) + 1)]
    values["step_counts"] = tuple(counts)
    values["memory_bytes"] = tuple(values.pop(f"memory_{kind}_bytes") for kind in MEMORY_CLASSES)
    pairs = [(values.pop(f"{thing}_predicted_s"), values.pop(f"{thing}_measured_s")) for thing in THINGS]
    values["communication_s"] = tuple(pairs)
    values["spent_s"] = tuple(values.pop(f"spent_{phase}_s") for phase in PHASES)
    return PageView(worker=path.stem, **values)
