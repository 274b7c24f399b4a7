"""Record of a run: events for the driver, generations, failures with their cost, and the summary.

Filled from what the coordinator handles; ``status`` reads it from other threads, so public methods lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.storage_urls import redact_words
from picotron_ray.config.support.evaluation import set_names
from picotron_ray.coordinator import messages as m
from picotron_ray.failures import FAILURE_RULES, FailureKind, explains
from picotron_ray.observability.goodput import GoodputAccount
from picotron_ray.runtime.coordinator.bad_steps import BadSteps
from picotron_ray.runtime.coordinator.event_log.files import LoggedLine
from picotron_ray.runtime.coordinator.event_log.memo import observations, plain_facts, read_facts
from picotron_ray.runtime.coordinator.going_back import gone_back
from picotron_ray.runtime.coordinator.lived_time import LivedTime
from picotron_ray.runtime.coordinator.obligations import Obligations
from picotron_ray.runtime.coordinator.records import (
    CommitFigures,
    Facts,
    FailureRecord,
    GenerationRecord,
    MetricFacts,
    Newest,
    bounded,
    failure_ages_s,
    goodput,
    newest_step,
    places,
    sign_of,
)
from picotron_ray.runtime.coordinator.storage_trouble import StorageTrouble
from picotron_ray.runtime.coordinator.summary import exit_code, summary_of, training_status

SEQ_GAP = 1_000_000
"""More events than an earlier term can have told since its last record; numbers of events never repeat."""
log = logging.getLogger(__name__)


class RunRecord:
    """Facts of the run; those of earlier terms come from their event logs, where they are at hand."""

    def __init__(self, job: JobConfig) -> None:
        self._job = job
        self._newest_commit: Newest | None = None  # of the machine, once it has begun
        self._lock = threading.RLock()
        self._facts = Facts(account=GoodputAccount(time.time()))
        self._term = 0
        self._began, self._seq = time.time(), 0
        self._finish: m.Finish | None = None
        self._summary: dict[str, Any] | None = None
        self._commit_figures: CommitFigures = {}
        self._running = False  # a generation of this term, or one that it adopted
        self._open: list[FailureRecord] = []  # no step has gone on since
        self._metrics: dict[str, Any] | None = None
        self._launch, self._lived = "", LivedTime()
        self._owed = Obligations()
        self._line = self._recalled = 0  # newest: line of this term's log, event of earlier terms
        self._continues = False  # events are numbered on from where an earlier term was
        self._trouble, self._bad_steps = StorageTrouble(), BadSteps()  # the first: with storage
        self._lost: set[str] = set()  # nodes, until they join again
        self.waits: dict[str, Any] | None = None  # `Machine.waits`
        self.orders: dict[str, Any] = {}  # `Machine.orders`
        self.telemetry: dict[str, Any] | None = None  # `Round.status`
        self.windows: Callable[[], dict[str, dict[str, float]]] = dict  # `Samples.windows`

    def begin(self, term: int, commit_figures: CommitFigures, newest: Newest | None = None) -> None:
        """Take over as the coordinator of ``term``; ``commit_figures`` grows with the commits."""
        with self._lock:
            self._term, self._commit_figures = term, commit_figures
            self._newest_commit = newest
            self._running = False  # generations so far were recalled
            self._trouble.begun()
            self.note("info", "term", f"coordinator of term {term}")

    # --- filling -----------------------------------------------------------------------------------------

    def note(
        self, level: str, kind: str, text: str, data: dict[str, Any] | None = None, at_s: float = 0.0
    ) -> None:
        """Note an event for people, without secrets; a driver asks for numbers that it has not seen.

        Args:
            at_s: seconds since the epoch; 0: now.
        """
        text, at_s = redact_words(text), at_s or time.time()
        with self._lock:
            self._seq += 1
            event = {"seq": self._seq, "t": at_s, "level": level, "kind": kind, "text": text}
            self._facts.events.append({**event, "data": bounded(data or {})})
            self._facts.count(level, kind, data or {})
            self._trouble.noted(level, kind)
        log.log(logging.getLevelNamesMapping()[level.upper()], "%s", text)  # for `picotron-ray logs`

    def attached(self, submission: dict[str, Any]) -> None:
        """Note a Ray job whose driver started or follows the run; known ones are not told again."""
        with self._lock:
            if submission not in self._facts.submissions:
                self._facts.submissions.append(submission)
                job = submission["submission_id"]
                self.note("info", "submission", f"driver in Ray job {job}", submission)

    def figures(self, node: str, figures: list[dict[str, Any]]) -> None:
        """Take the pages of all of a node's workers, as its heartbeat brought them."""
        with self._lock:
            if node in self._lost:
                return  # a heartbeat from before, which another node carried
            self._facts.take_pages(node, figures)
            for page in figures:
                self._facts.baseline_loss = max(self._facts.baseline_loss or 0.0, page["baseline_loss"])
                self._follow(page)

    def _follow(self, page: dict[str, Any]) -> None:
        record = self._facts.newest
        if record is None or (page["term"], page["n"]) != (record.id.term, record.id.n):
            return
        record.end_step = max(record.end_step, page["step"])
        self._facts.tokens = max(self._facts.tokens, page["tokens"])
        self._facts.evaluated(page, set_names(self._job))
        if page["skipped_step"] > self._facts.skipped_step:
            self._facts.skipped_step = page["skipped_step"]
            if text := self._bad_steps.line(page, self._job.data.global_batch):
                self.note("warning", "skipped", text, {"step": page["skipped_step"]})
        if page["rank"] == 0:
            self._facts.account.page(time.time(), page)
        if page["rank"] == 0 and page["step_time_s"] > 0:
            self._facts.step_times.append(page["step_time_s"])
        if page["first_step_at_s"]:
            self._went_on(record, page["first_step_at_s"])

    def recall(self, memo: dict[str, Any] | None, lines: Iterable[LoggedLine], launch: str = "") -> None:
        """Learn what earlier terms knew: their record, where there is one, and the lines of their logs since.

        Args:
            launch: identity of the launch that this coordinator belongs to, as the headers have it.
        """
        with self._lock:
            self._launch, before = launch, self._seq
            if memo is not None:
                self._remember(memo)
            for launch_then, event, commands, at_s in observations(lines):
                self._launch = launch_then
                self._lived.heard(launch_then, at_s)
                self._facts.account.launched(launch_then, at_s)
                self._began = min(self._began, at_s)
                self.observe(event, commands, at_s)
                for command in commands:
                    if isinstance(command, m.Alert):
                        self.note(command.level, command.kind, command.text, command.data, at_s)
            self._launch = launch
            self._lived.heard(launch, time.time())
            self._facts.account.launched(launch, time.time())
            self._recalled = self._seq if self._seq != before else 0

    def _remember(self, memo: dict[str, Any]) -> None:
        self._facts = read_facts(memo["facts"], memo["began_s"], memo["wall_s"])
        self._open = [self._facts.failures[index] for index in memo["open"]]
        self._began, self._trouble = memo["began_s"], StorageTrouble.read(memo["uncommitted"])
        self._owed.recall(memo)
        self._lived.recall(memo)
        self._seq, self._continues = memo["seq"] + SEQ_GAP, True

    def memo(self) -> dict[str, Any]:
        """Return the record as of the last line that was observed, as JSON values; ``recall`` reads it."""
        with self._lock:
            facts = self._facts.copied()
            memo = {
                "term": self._term,
                "line": self._line,
                "began_s": self._began,
                "seq": self._seq,
                "uncommitted": self._trouble.plain(),
                **self._owed.memo(),
                "open": places(self._facts.failures, self._open),
                "launch": self._launch,
                **self._lived.memo(),
                "loss": self._facts.leader(self._facts.newest).get("loss"),
            }
            away_s = self._lived.away_s(time.time(), facts.account)
        wall_s = time.time() - self._began
        # outside of the lock: the coordinator's loop must not wait for a record of thousands of workers
        share = goodput(facts, wall_s - away_s)
        return {**memo, "goodput": share, "wall_s": wall_s, "facts": plain_facts(facts)}

    def failed_s_ago(self) -> tuple[float, ...]:
        """Return how long ago each failure of the last day was, oldest first."""
        with self._lock:
            return failure_ages_s(self._facts, time.time() - self._began)

    def past(self) -> dict[str, Any]:
        """Arguments of `begin_event`: orders, layouts without memory, verdict and times of changes."""
        with self._lock:
            standing = self._owed.standing(self._launch, now_s := time.time())
            found = {"struck": self._facts.strikes, "standing": standing}
            return {**found, **self._facts.adaptation.past(now_s)}

    @property
    def owed(self) -> tuple[m.UserRequest, ...]:
        """Requests that this launch has not done yet, of whichever term."""
        with self._lock:
            return self._owed.requests(self._launch)

    @property
    def ended(self) -> m.Finish | None:
        """End of the run that an earlier term of this launch decided on; None: none has."""
        with self._lock:
            return self._owed.end(self._launch)

    @property
    def deaths(self) -> int:
        """Workers that this launch has lost and does not replace."""
        return self._owed.deaths(self._launch)

    def observe(self, event: m.Event, commands: list[m.Command], at_s: float, line: int = 0) -> None:
        """Follow the machine: note failures, and which generation came of each.

        Args:
            at_s: seconds since the epoch.
            line: number of the event's line in the term's log; 0: it has none.
        """
        with self._lock:
            self._line = line or self._line
            self._facts.account.passed(at_s, waiting=self.waits is not None)
            self._observe_event(event, at_s)
            self._owed.observe(self._launch, event, commands, at_s)
            self._lived.observe(commands, at_s, self._facts.account)
            for command in commands:
                if isinstance(command, m.RunGeneration):
                    self._generation(command.spec, at_s)
                elif isinstance(command, m.Alert) and command.kind == "failure":
                    self._judged(command.data, at_s)
                elif isinstance(command, m.Alert):
                    self._facts.alerted(command)
                elif isinstance(command, m.Finish):
                    self._facts.account.ended(at_s)
                    self._open.clear()  # no step followed; those of a later launch are no recovery

    def _observe_event(self, event: m.Event, at_s: float) -> None:
        if isinstance(event, m.WorkerExited):
            self._facts.forget_page(event.worker)
        elif isinstance(event, m.NodeLost):
            self._facts.take_pages(event.node, [])
            self._lost.add(event.node)
        elif isinstance(event, m.NodeJoined):
            self._lost.discard(event.node)
        self._trouble.observe(event)
        if isinstance(event, m.Appended) and event.kind == "commit" and event.seq:
            self._committed(event)
            self._facts.committed_at_s = at_s
        if isinstance(event, m.Planned) and not event.error:
            self._facts.planned_s.append(event.planned_s)
        record = self._facts.newest
        if record is None:
            return
        if isinstance(event, m.Outcome):
            if event.generation != record.id:
                return
            record.end_step = max(record.end_step, event.step)
            if event.kind in ("finished", "interrupted"):
                self._facts.account.left((record.id.term, record.id.n), at_s, event.kind == "finished")
            if event.first_step_at_s:
                self._went_on(record, event.first_step_at_s)
        if isinstance(event, m.Heartbeat) and event.generation == record.id:
            record.end_step = max(record.end_step, *event.steps.values(), 0)
            if record.end_step > record.start_step:
                self._went_on(record, at_s)
        if (sign := sign_of(event)) is not None and not self._lived.ends_for_a_rest(event):
            self._failed(*sign, record, at_s)
            bad = event.bad_step if isinstance(event, m.Outcome) and self._open else 0
            if bad and self._open[-1].kind in (FailureKind.NUMERICS, FailureKind.DIVERGED):
                self._open[-1].target = f"step {bad}"

    def _judged(self, data: dict[str, Any], at_s: float) -> None:
        """Note a failure that the machine found without a sign of its own, as at a term's beginning."""
        kind = FailureKind.named(str(data.get("cause", ""))) or FailureKind.FAILED
        if kind is FailureKind.START_FAILED or self._open or not self._facts.generations:
            return  # where a replacement does not start, the generation trains on
        kind, target = FAILURE_RULES[kind].reported_as, str(data.get("target", ""))
        self._failed(kind, target, self._facts.generations[-1], at_s)

    def _went_on(self, record: GenerationRecord, at_s: float) -> None:
        """Close the records of all failures before a generation, whose first step is finished."""
        for failure in [open_ for open_ in self._open if open_.struck != str(record.id)]:
            failure.recovered_s = at_s - (self._began + failure.detected_s)
            self._open.remove(failure)

    def _failed(self, kind: FailureKind, target: str, record: GenerationRecord, at_s: float) -> None:
        """Note a sign of a failure: the first one opens its record, the gravest one names it."""
        last = self._facts.failures[-1] if self._facts.failures else None
        struck = str(record.id)
        if target in record.involved and (last is None or last.struck != struck):
            failure = FailureRecord(kind, target, record.end_step, at_s - self._began, struck=struck)
            self._facts.failures.append(failure)
            self._open.append(failure)
            self._facts.account.failed(at_s)
        elif last is not None and explains(kind, last.kind) and target in self._facts.struck_by(last):
            last.kind, last.target = kind, target

    def _generation(self, spec: m.GenerationSpec, at_s: float) -> None:
        self._running = True
        generations = self._facts.generations
        reached = generations[-1].end_step if generations else 0
        self._facts.account.generation((spec.id.term, spec.id.n), at_s, spec.resume_step, reached)
        if generations and generations[-1].id == spec.id:
            return
        for failure in self._open:
            if generations and failure.struck == str(generations[-1].id):
                failure.restored(generations[-1], spec)
        if text := gone_back(generations, spec):
            self.note("info", "gone-back", text, at_s=at_s)
        if generations:
            generations[-1].end_step = max(spec.resume_step, generations[-1].start_step)
        self._facts.enter(GenerationRecord.of(spec), at_s)

    def _committed(self, event: m.Appended) -> None:
        generations = self._facts.generations
        if generations and generations[-1].id == event.generation:
            # a killed worker tells no outcome
            generations[-1].end_step = max(generations[-1].end_step, event.step)
        self._facts.committed(event.step, self._commit_figures.get(event.step, {}))

    def evidence(self, name: str, generation: str, news: bool = True) -> None:
        """Note what tells where the ranks of a generation were, by its name in storage; tell it where new."""
        with self._lock:
            if name not in self._facts.evidence.values():
                self._facts.evidence.setdefault(generation, name)  # the first is of all ranks
                if news:
                    self.note("info", "evidence", f"stacks of generation {generation} are in {name}")

    def serves(self, endpoints: dict[str, str], file: str) -> None:
        """Note metrics endpoints (``host:port`` by node or ``coordinator``) and the file that lists them."""
        with self._lock:
            self._metrics = {"endpoints": endpoints, "file": file}

    # --- reading -----------------------------------------------------------------------------------------

    def status(self, since: int, most_pages: int | None = None) -> dict[str, Any]:
        """Return the state for the driver; ``events`` are those numbered above ``since``.

        Args:
            most_pages: where there are more pages of workers, rank 0's alone is shown; None: all are.
        """
        with self._lock:
            page, pages = self._facts.leader(self._facts.newest), self._facts.pages
            if most_pages is not None and len(pages) > most_pages:
                pages = {page["worker"]: page} if page else {}
            going_on = self.orders.get("paused") or ("running" if self._running else "starting")
            return {
                "run": self._job.name,
                "submissions": list(self._facts.submissions),
                "state": self._finish.status if self._finish else going_on,
                "term": self._term,
                "continues": self._continues,
                "recalled": self._recalled,
                "stopping": self._owed.stopping(self._launch),
                "began_s": self._began,  # since the epoch; `detected_s` of failures counts from here
                **training_status(self._job, self._facts),
                **self._facts.account.told(time.time()),
                "waits": self.waits,
                "orders": self.orders,
                "telemetry": self.telemetry,
                "windows": self.windows() if most_pages is None else {},
                "uncommitted": bool(self._trouble),
                "committed": newest_step(self._facts, self._newest_commit),
                "pages": dict(pages),
                "metrics": self._metrics,
                "events": [event for event in self._facts.events if event["seq"] > since],
                "done": self._summary is not None,
                "exit_code": exit_code(self._finish.status, self._finish.again) if self._finish else None,
                "detail": self._finish.detail if self._finish else "",
                "summary": self._summary,
            }

    def measured(self) -> MetricFacts:
        """Return the facts that are served as metrics, beyond ``status``."""
        with self._lock:
            return self._facts.measured(dict(self._facts.leader(self._facts.newest)))

    def summary(self, finish: m.Finish) -> dict[str, Any]:
        """Return the content of summary.json, without the ledger's part, which is added when it is stored."""
        with self._lock:
            wall_s = time.time() - self._began
            until = self._began + wall_s, self._facts.account
            times = self._began, wall_s, wall_s - self._lived.away_s(*until), self._lived.rested_s(*until)
            return summary_of(self._job, self._facts, finish, *times)

    def done(self, finish: m.Finish, summary: dict[str, Any]) -> None:
        with self._lock:
            level = "info" if finish.status in ("finished", "stopped") else "error"
            self.note(level, finish.status, ": ".join(filter(None, (f"run {finish.status}", finish.detail))))
            self._finish, self._summary = finish, summary
