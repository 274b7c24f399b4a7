"""Telemetry of a run: what agents send, summed up by replicas and stages, and handed to the machine.

Each worker's figures are added to sums as they come, and a few of them to a row of numbers, so that thousands
of ranks take 60 bytes each. A round ends once all ranks have been heard of; after an interval, once all
replicas and stages have; after two intervals with what there is. The machine gets the sums. Whoever explains
the run (rules, pages, the archive) gets a window: the round flattened, and who was slow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.telemetry import AXES, STEP_PHASES
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import (
    Alert,
    Appended,
    Begin,
    Command,
    Event,
    GenerationSpec,
    Measured,
    RuleFinding,
    RunFigures,
)
from picotron_ray.coordinator.rule_findings import RULE_ACT
from picotron_ray.observability.rank_table import RankTable
from picotron_ray.observability.windows import (
    Samples,
    TelemetryWindow,
    known,
    run_figures,
    window_of_round,
)
from picotron_ray.runtime.coordinator.alert_service import AlertService
from picotron_ray.runtime.coordinator.archive_keeper import ArchiveKeeper
from picotron_ray.runtime.coordinator.health_sums import HealthSums
from picotron_ray.runtime.coordinator.link_figures import RoundLinks
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.coordinator.utilization import devices_of, utilization
from picotron_ray.runtime.telemetry_page import MemoryFigures
from picotron_ray.runtime.telemetry_window import SERIES, Window, WorkerFigures

NO_EVENTS = 1 << 62
ALERTS_PATIENCE_S = 5.0
MOST_SHOWN = 32
"""Ranks that the status shows one by one; of more, the slowest."""
SAMPLED = ("loss", "grad_norm", "learning_rate", "step_time_s")
"""Figures of which each step that a heartbeat shows is a sample; of the others each window is."""
PageFigures = dict[str, Any]
"""What a heartbeat carries of a worker's page."""


class RankSpread:
    """Window over the windows of many ranks, without keeping them."""

    def __init__(self) -> None:
        self._count, self._sum, self._squares = 0, 0.0, 0.0
        self._max, self._min = float("-inf"), float("inf")

    def add(self, one: Window) -> None:
        """Add a rank's window."""
        self._count += 1
        self._sum += one.mean
        self._squares += one.std**2 + one.mean**2
        self._max, self._min = max(self._max, one.max), min(self._min, one.min)

    @property
    def window(self) -> Window:
        """The window over all that was added; at least one was."""
        mean = self._sum / self._count
        return Window(mean, self._max, self._min, max(0.0, self._squares / self._count - mean**2) ** 0.5)


class Round:
    """Sums over the ranks of one generation that were heard of since ``opened_s``."""

    def __init__(self, spec: GenerationSpec, opened_s: float) -> None:
        layout = spec.layout
        self.id, self.layout, self.opened_s = spec.id, layout, opened_s
        self._heard, self.ranks = bytearray(layout.world_size), 0
        self._series = [RankSpread() for _ in SERIES]
        self._row_s, self._rows = [0.0] * layout.dp, [0] * layout.dp
        self._replicas = bytearray(layout.dp)
        self._stage_s, self._staged = [0.0] * layout.stages, [0] * layout.stages
        self._sent, self._utilization = [0.0] * len(AXES), 0.0
        self._steps, self._last_step = 0, 0
        self._waits_seen = True
        self._worst, self._least_free = MemoryFigures(), 0
        self.table = RankTable(layout.world_size)
        self._members = spec.members  # no list of their nodes: a round stays small
        self.health: dict[str, dict[str, float]] = {}
        """What each node told of its machine."""
        self.links = RoundLinks()

    @property
    def complete(self) -> bool:
        """Whether all ranks were heard of."""
        return self.ranks == len(self._heard)

    @property
    def covers(self) -> bool:
        """Whether at least one rank of each replica and of each stage was."""
        return all(self._replicas) and all(self._staged)

    def add(self, one: WorkerFigures) -> None:
        """Add a rank's figures; those of a rank that was heard of, or that there is not, are left out."""
        if not 0 <= one.rank < len(self._heard) or self._heard[one.rank]:
            return
        self._heard[one.rank] = 1
        self.ranks += 1
        for spread, window in zip(self._series, one.series, strict=True):
            spread.add(window)
        dp = self.layout.coordinates(one.rank).dp
        self._replicas[dp] = 1
        self._row_s[dp], self._rows[dp] = max(self._row_s[dp], one.row_s), max(self._rows[dp], one.rows)
        for stage, seconds in one.stage_s.items():
            if 0 <= stage < len(self._stage_s):
                self._stage_s[stage] += seconds
                self._staged[stage] += 1
        for place, nbytes in enumerate(one.sent_bytes):
            self._sent[place] += nbytes
        self._utilization += one.utilization
        self._steps, self._last_step = max(self._steps, one.steps), max(self._last_step, one.last_step)
        self._waits_seen = self._waits_seen and one.waits_seen
        self._remember(one.memory)
        self._fill(one)
        if one.health:
            self.health[self._members[one.rank].node] = one.health
        self.links.add(one.links)

    def _fill(self, one: WorkerFigures) -> None:
        means, memory = (window.mean for window in one.series), one.memory
        held = memory.allocated, memory.peak, memory.device
        self.table.put(one.rank, (*means, one.utilization, *held))

    def _remember(self, memory: MemoryFigures) -> None:
        if self.ranks == 1 or memory.largest_free < self._least_free:
            self._least_free = memory.largest_free
        if self.ranks == 1 or _fullness(memory) > _fullness(self._worst):
            self._worst = memory

    def figures(self) -> RunFigures:
        """Return the sums as the machine gets them; at least one rank was heard of."""
        means = [spread.window.mean for spread in self._series]
        worst = self._worst
        return RunFigures(
            steps=self._steps,
            last_step=self._last_step,
            step_s=means[0],
            phase_s=dict(zip(STEP_PHASES, means[1:], strict=True)),
            replica_row_s=tuple(self._row_s) if self._waits_seen else (),
            replica_rows=tuple(self._rows),
            stage_s=tuple(s / max(1, n) for s, n in zip(self._stage_s, self._staged, strict=True)),
            sent_bytes={axis: sent / self.ranks for axis, sent in zip(AXES, self._sent, strict=True) if sent},
            peak_bytes=worst.peak,
            device_bytes=worst.device,
            reserved_bytes=worst.reserved,
            allocated_bytes=worst.allocated,
            utilization=self._utilization / self.ranks,
            ranks=self.ranks,
            waits_seen=self._waits_seen,
        )

    def status(self, figures: RunFigures) -> dict[str, Any]:
        """Return the sums as the run's status shows them, in JSON values; without those of machines."""
        windows = dict(zip(SERIES, (spread.window for spread in self._series), strict=True))
        return {
            "generation": str(self.id),
            "ranks": figures.ranks,
            "steps": figures.steps,
            "last_step": figures.last_step,
            "step_s": windows.pop("step")._asdict(),
            "phase_s": {phase: window._asdict() for phase, window in windows.items()},
            "replica_row_s": list(figures.replica_row_s),
            "replica_rows": list(figures.replica_rows),
            "stage_s": list(figures.stage_s),
            "sent_bytes": figures.sent_bytes,
            "memory": {
                "allocated_bytes": figures.allocated_bytes,
                "reserved_bytes": figures.reserved_bytes,
                "peak_bytes": figures.peak_bytes,
                "largest_free_bytes": self._least_free,
                "device_bytes": figures.device_bytes,
            },
            "utilization": figures.utilization,
            "waits_seen": figures.waits_seen,
            "slow_ranks": self._slow_ranks(),
        }

    def _slow_ranks(self) -> list[dict[str, Any]]:
        """Return the slowest ranks with all their columns, the slowest first; the first ones, where waits are
        not told from computing, and so nobody is known to be slow.
        """
        if not self._waits_seen:
            return self.table.rows(range(min(MOST_SHOWN, self.table.ranks)))
        slow = self.table.slowest(MOST_SHOWN)
        rows = self.table.rows([one.rank for one in slow])
        return [{**row, **one._asdict()} for row, one in zip(rows, slow, strict=True)]


def _fullness(memory: MemoryFigures) -> tuple[float, int]:
    return (memory.peak / memory.device if memory.device else 0.0, memory.peak)


class RunTelemetry:
    """Rounds of a run, one after the other; may be called from several threads.

    Times are passed in, in seconds of one monotonic clock.
    """

    def __init__(self, interval_s: float | None, record: RunRecord) -> None:
        """``record``: of the run, whose status shows the newest round that ended."""
        self._interval_s, self._record = interval_s or 0.0, record
        self.job: JobConfig | None = None
        self._memory: MachineMemory | None = None
        self._lock = threading.Lock()
        self._round: Round | None = None
        self._samples, self._sampled = Samples(), (0, 0, 0)  # the second: term, n and step of the last one
        self.listeners: list[Callable[[TelemetryWindow], None]] = []
        """Called with each window, on the coordinator's loop: whatever takes long goes elsewhere."""
        self.newest: tuple[RankTable, str] | None = None
        """Ranks of the newest round, and its generation."""
        self._archive: ArchiveKeeper | None = None
        self._health = HealthSums()
        self._best: dict[str, float] = {}  # bandwidth by axis, of this coordinator's time
        self.alerts: AlertService | None = None
        record.windows = self._windows

    def archived(self, archive: ArchiveKeeper) -> RunTelemetry:
        """Have windows archived with the commits; returns this object."""
        self._archive = archive
        self.listeners.append(archive.add)
        return self

    def observe(
        self, event: Event, memory: MachineMemory | None = None, commands: Sequence[Command] = ()
    ) -> None:
        """Follow the machine: a term begins, commits bring windows to storage, and findings are answered.

        Args:
            memory: of the machine, which knows the devices; None: MFU is not told.
            commands: that the event led to.
        """
        self._memory = memory
        for each in commands:
            if isinstance(each, Alert) and each.kind == RULE_ACT and each.data["done"] and self.alerts:
                self.alerts.obeyed(each.data["rule"])
        archive = self._archive
        if archive is None:
            return
        if isinstance(event, Begin):
            archive.begin(event.term)
        elif isinstance(event, Appended) and event.kind == "commit" and event.seq:
            archive.keep()

    def judged(self, alerts: AlertService) -> RunTelemetry:
        """Have windows judged by rules; returns this object."""
        self.alerts = alerts
        self.listeners.append(alerts.take)
        return self

    def finish(self, patience_s: float) -> None:
        """Bring the last windows to storage, and findings to sinks; blocks up to ``patience_s`` for each."""
        if self.alerts is not None:
            self.alerts.finish(min(patience_s, ALERTS_PATIENCE_S))
        if self._archive is not None:
            self._archive.finish(patience_s)

    def take(
        self,
        spec: GenerationSpec | None,
        found: Sequence[WorkerFigures],
        now_s: float,
        pages: Sequence[PageFigures] = (),
    ) -> None:
        """Add what an agent sent; figures of any generation but ``spec``'s are dropped.

        Args:
            pages: of the agent's workers.
        """
        if spec is not None:
            self._sample(spec, pages)
        fresh = [one for one in found if spec is not None and (one.term, one.n) == (spec.id.term, spec.id.n)]
        if not fresh or spec is None:
            return
        with self._lock:
            if self._round is None or self._round.id != spec.id:
                self._round = Round(spec, now_s)
            for one in fresh:
                self._round.add(one)

    def _sample(self, spec: GenerationSpec, pages: Sequence[PageFigures]) -> None:
        """Sample rank 0's page, where it shows a step that was not sampled yet."""
        for page in pages:
            at = page["term"], page["n"], page["step"]
            if page["rank"] == 0 and at[:2] == (spec.id.term, spec.id.n) and page["step_time_s"] > 0:
                with self._lock:
                    if at > self._sampled:
                        self._sampled = at
                        self._samples.add(known({name: page[name] for name in SAMPLED}))

    def _windows(self) -> dict[str, dict[str, float]]:
        with self._lock:
            return self._samples.windows()

    def due(self, spec: GenerationSpec | None, now_s: float) -> list[Measured | RuleFinding]:
        """Return the event of a round that is over, and those that findings of earlier ones ask for."""
        asked: list[Measured | RuleFinding] = []
        if self.alerts is not None:
            self.alerts.spec = spec
            asked += self.alerts.asked()
        return [*self._round_over(spec, now_s), *asked]

    def _round_over(self, spec: GenerationSpec | None, now_s: float) -> Iterable[Measured]:
        with self._lock:
            held = self._round
            if held is None:
                return ()
            if spec is None or held.id != spec.id:
                self._round = None
                return ()
            age_s = now_s - held.opened_s
            if not (
                held.complete
                or (age_s >= self._interval_s and held.covers)
                or (age_s >= 2 * self._interval_s and held.ranks)
            ):
                return ()
            self._round = None
        figures = held.figures()
        health, links = self._health.joined(held.health), held.links.told(self._best)
        told = {**held.status(figures), "health": health, "links": links}
        self._record.telemetry = told
        self._tell(held, told)
        return (Measured(held.id, figures),)

    def _tell(self, held: Round, told: dict[str, Any]) -> None:
        status = self._record.status(NO_EVENTS, most_pages=0)
        more = run_figures(status, self._record.measured().leader)
        job, devices = self.job, set() if self._memory is None else devices_of(self._memory)
        if job is not None and (found := utilization(job, status, devices)) is not None:
            more["mfu_ratio"] = found[0]
        window = window_of_round(time.time(), told, more, held.table)
        with self._lock:
            self.newest = held.table, str(held.id)
            sampled = {name: value for name, value in window.figures.items() if name not in SAMPLED}
            self._samples.add(sampled)
        for listener in self.listeners:
            listener(window)


def open_telemetry(
    job: JobConfig, record: RunRecord, is_newest: Callable[[], bool | None], device: str
) -> RunTelemetry:
    """Return the telemetry of a run, whose windows are judged and go to its storage, with its events.

    Args:
        is_newest: whether no newer term was claimed; None: not known.
        device: of the workers, "cuda" or "cpu".
    """
    run = RunTelemetry(job.telemetry.interval_s, record)
    run.job = job

    if job.alerts.enabled and job.telemetry.interval_s is not None:
        run.judged(AlertService(job, record, device))

    def events(since: int) -> list[dict[str, Any]]:
        return list(record.status(since, most_pages=0)["events"])

    def storage() -> Storage:
        return open_storage(job.storage, job.name)

    return run.archived(ArchiveKeeper(storage, is_newest, events, lambda: run.newest, record.note))
