"""Spans of the run on their way to an OpenTelemetry collector, on a thread of their own.

A collector that is slow or away costs the run nothing: spans wait in a queue of bounded length, the oldest
are dropped, and the run's record says so once, and when it is over. Address and headers that hold a secret
come from the environment of the coordinator's node, as ``OTEL_EXPORTER_OTLP_HEADERS``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.observability.spans import (
    ROOT,
    RunSpan,
    Value,
    generation_key,
    recovery_spans,
    step_spans,
)
from picotron_ray.runtime.coordinator.otlp import open_exporter
from picotron_ray.runtime.coordinator.run_record import RunRecord

log = logging.getLogger(__name__)
MOST_WAITING = 4096
MOST_AT_ONCE = 512
INTERVAL_S = 5.0
END_S = 10.0
"""Longest wait for the last spans."""
SETTLED_S = 5.0
"""After a recovery its repeated steps are counted for so long."""
NO_EVENT = 2**62
Exporter = Callable[[Sequence[RunSpan]], str]
"""Sends spans; returns why the collector did not take them, "" where it did."""
MOST_WHY = 200


class SpanExport:
    """Follower of a run that sends its spans; ``observe`` never blocks."""

    def __init__(self, job: JobConfig, record: RunRecord, send: Exporter | None = None) -> None:
        """
        Args:
            send: None: to ``telemetry.otel.endpoint``.
        """
        self._record, self._every = record, job.telemetry.otel.sample_steps
        self._send = send or open_exporter(job)
        self._waiting: deque[RunSpan] = deque()
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._open: m.GenerationSpec | None = None
        self._open_s, self._since_s = 0.0, time.time()
        self._told: set[int] = set()  # failures
        self._sampled, self._ending, self._failing = -1, False, False
        self.sent = self.dropped = 0
        self._thread = threading.Thread(target=self._work, name="spans", daemon=True)
        self._thread.start()

    def observe(self, event: m.Event, commands: list[m.Command], at_s: float) -> None:
        """Follow what the machine handled: generations begin and end, commits are durable."""
        if isinstance(event, m.Appended) and event.kind == "commit" and event.seq:
            self._committed(event, at_s)
        spec = self._open
        if isinstance(event, m.Outcome) and spec is not None and event.generation == spec.id:
            self._left(at_s, str(getattr(event.kind, "value", event.kind)), event.step)
        for command in commands:
            if isinstance(command, m.RunGeneration):
                self._left(at_s, "replaced")
                self._open, self._open_s = command.spec, at_s
            elif isinstance(command, m.Finish):
                self._left(at_s, command.status)

    def _left(self, at_s: float, how: str, step: int = 0) -> None:
        spec, self._open = self._open, None
        if spec is None:
            return
        about: dict[str, Value] = {
            "layout": str(spec.layout),
            "workers": len(spec.members),
            "reason": spec.reason,
            "source": spec.source.kind,
            "resume_step": spec.resume_step,
            "ended": how,
            **({"end_step": step} if step else {}),
        }
        key = generation_key(spec.id.term, spec.id.n)
        self._put(RunSpan("generation", key, ROOT, self._open_s, at_s, about))

    def _committed(self, event: m.Appended, at_s: float) -> None:
        newest: dict[str, Any] = next(iter(reversed(self._record.measured().checkpoints)), {})
        figures = newest if newest.get("step") == event.step else {}
        about = {"step": event.step, **{n: v for n, v in figures.items() if isinstance(v, int | float)}}
        parent = generation_key(event.generation.term, event.generation.n)
        began_s = at_s - float(figures.get("commit_s") or 0.0)
        self._put(RunSpan("commit", f"commit {event.step} {parent}", parent, began_s, at_s, about))

    def _put(self, *spans: RunSpan) -> None:
        with self._lock:
            self._waiting.extend(spans)
            while len(self._waiting) > MOST_WAITING:
                self._waiting.popleft()
                self.dropped += 1

    def finish(self, status: str) -> None:
        """End the run's span and send what waits; gives up after `END_S`."""
        self._ask(ending=True)
        told = self._record.status(NO_EVENT, 1)
        failed = status not in ("finished", "stopped")
        about = {"run": told["run"], "status": status, "step": told["step"]}
        self._put(RunSpan(ROOT, ROOT, "", told["began_s"], time.time(), about, failed))
        self._ending = True
        self._wake.set()
        self._thread.join(END_S)

    # --- on the thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            ending = self._ending
            try:
                if not ending:
                    self._ask()
                self._deliver()
            except Exception as error:
                log.warning("spans: %s", error, exc_info=error)
            if ending:
                return
            self._wake.wait(INTERVAL_S)

    def _ask(self, ending: bool = False) -> None:
        """Look for recoveries that are over, and for a step to sample.

        Args:
            ending: nothing more will be counted for a recovery.
        """
        told = self._record.status(NO_EVENT, 1)
        for number, failure in enumerate(told["failures"]):
            over_s = told["began_s"] + failure["detected_s"] + (failure["recovered_s"] or 0.0) + SETTLED_S
            open_ = failure["recovered_s"] is None or (over_s > time.time() and not ending)
            if number in self._told or open_:
                continue
            self._told.add(number)
            if over_s > self._since_s:  # what an earlier coordinator told is not told again
                self._put(*recovery_spans(told["began_s"], number, failure))
        page: dict[str, Any] = self._record.measured().leader
        if self._every and page and page["step"] // self._every > self._sampled:
            self._sampled = page["step"] // self._every
            self._put(*step_spans(page))

    def _deliver(self) -> None:
        while True:
            with self._lock:
                batch = [self._waiting[at] for at in range(min(MOST_AT_ONCE, len(self._waiting)))]
            if not batch:
                return
            why = self._send(batch)
            self._said(why)
            if why:
                return
            with self._lock:
                for span in batch:
                    if self._waiting and self._waiting[0] is span:
                        self._waiting.popleft()
                self.sent += len(batch)

    def _said(self, why: str) -> None:
        """Tell once that the collector does not take spans and why, and when it does again."""
        if bool(why) is self._failing:
            return
        self._failing = bool(why)
        if not why:
            self._record.note(
                "info", "otel", f"OpenTelemetry: spans are taken again; {self.dropped} were lost"
            )
        else:
            why = " ".join(why.split())[:MOST_WHY]
            text = f"OpenTelemetry: the collector takes no spans ({why}); the newest wait, the run goes on"
            self._record.note("warning", "otel", text)
