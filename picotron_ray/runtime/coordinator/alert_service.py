"""Alerts of a run: windows are judged on a thread of their own, and what is found is told.

The coordinator's loop only hands windows over. Where the thread is behind, the oldest waiting window goes and
is counted. An error of a rule costs that window. What a finding asks for becomes an event of the machine,
which alone decides (``coordinator.rule_findings``).
"""

from __future__ import annotations

import difflib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

from picotron_ray.config.schema.alerts import AlertSilenceConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, RuleAct, RuleFinding
from picotron_ray.errors import ConfigError
from picotron_ray.observability.alerts.book import EVERY_RULE, AlertBook, Silence
from picotron_ray.observability.alerts.detectors import open_detectors
from picotron_ray.observability.alerts.finding import LEVELS, AlertFinding
from picotron_ray.observability.alerts.rules import BY_NAME
from picotron_ray.observability.alerts.sinks import AlertSink, SinkAddressError, address_of
from picotron_ray.observability.windows import TelemetryWindow
from picotron_ray.runtime.coordinator.run_record import RunRecord

log = logging.getLogger(__name__)
ALERT = "alert"
"""Kind of the run's events that tell findings."""
MOST_WAITING = 16
MOST_ASKED = 16


class AlertService:
    """Judge of a run's windows; its methods may be called from any thread, and none of them blocks."""

    def __init__(self, job: JobConfig, record: RunRecord, device: str) -> None:
        self._job, self._record = job, record
        self._gpu = device == "cuda"
        detectors, rules = open_detectors(job.alerts, gpu=self._gpu)
        self._book = AlertBook(
            detectors,
            rules,
            acts={each.rule: each.do for each in job.alerts.act},
            checkpoint_steps=job.checkpoint.interval_steps,
            silences=[_silence_of(each) for each in job.alerts.silences],
        )
        self.spec: GenerationSpec | None = None
        """Of the generation whose windows come, for the nodes of its ranks."""
        self._waiting: deque[tuple[TelemetryWindow, GenerationSpec | None]] = deque(maxlen=MOST_WAITING)
        self._asked: deque[RuleFinding] = deque(maxlen=MOST_ASKED)
        self._lock, self._news = threading.Lock(), threading.Event()
        self._ending, self._busy = False, False
        self.windows_dropped = self.errors = 0
        self._sinks = self._open_sinks()
        self._thread: threading.Thread | None = None

    def _open_sinks(self) -> list[AlertSink]:
        found = []
        for index, config in enumerate(self._job.alerts.sinks):
            name = f"alerts.sinks.{index} ({config.kind})"
            try:
                found.append(AlertSink(name, config, address_of(config), self._job.name, self._tell_of_sink))
            except SinkAddressError as error:
                self._record.note("warning", ALERT, f"{name}: {error}; its findings are not sent")
        return found

    def _tell_of_sink(self, text: str) -> None:
        self._record.note("warning", ALERT, text)

    # --- called on the coordinator's loop ----------------------------------------------------------------

    def take(self, window: TelemetryWindow) -> None:
        """Take a window, to be judged soon."""
        if self._ending:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="alerts", daemon=True)
            self._thread.start()
        if len(self._waiting) == MOST_WAITING:
            self.windows_dropped += 1
        self._waiting.append((window, self.spec))
        self._news.set()

    def asked(self) -> list[RuleFinding]:
        """Return the events that findings ask for, each once; those that are not obeyed come again."""
        found = []
        while self._asked:
            found.append(self._asked.popleft())
        return found

    def obeyed(self, rule: str) -> None:
        """Hear that something was done on what a rule found."""
        with self._lock:
            self._book.obeyed(rule)

    def finish(self, patience_s: float) -> None:
        """Judge and send what waits, for up to so long."""
        end = time.monotonic() + patience_s
        while (self._waiting or self._busy) and time.monotonic() < end:
            time.sleep(0.02)
        self._ending = True
        self._news.set()
        for sink in self._sinks:
            sink.finish(max(0.0, end - time.monotonic()))

    # --- called through Ray ------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return what fires, what is over, what is silenced, and what was dropped, as JSON values."""
        with self._lock:
            book = self._book
            return {
                "firing": [each.plain() for each in book.firing],
                "resolved": [each.plain() for each in book.past],
                "silences": [
                    {"rule": each.rule, "until_s": each.until_s, "why": each.why}
                    for each in book.silences
                    if each.until_s is None or each.until_s > time.time()
                ],
                "windows": book.windows,
                "windows_dropped": self.windows_dropped,
                "errors": self.errors,
                "untold": book.untold,
                "sent": sum(sink.sent for sink in self._sinks),
                "dropped": sum(sink.dropped for sink in self._sinks),
            }

    def silence(self, rule: str, seconds: float, why: str) -> None:
        """Silence a rule for so long, from now on."""
        with self._lock:
            self._check(rule)
            now = time.time()
            self._book.silence(Silence(rule, now + seconds, why), now)
        self._record.note("info", ALERT, f"rule {rule} is silenced for {seconds:.0f} s: {why or 'no reason'}")

    def unsilence(self, rule: str) -> None:
        """End the silences of a rule; what fires of it is told with the next window."""
        with self._lock:
            now = time.time()
            if not self._book.unsilence(rule, now):
                names = ", ".join(each.rule for each in self._book.silences) or "none"
                raise ConfigError(f"rule: saw {rule!r}, expected what a silence was given for: {names}")
            covered = any(each.covers(rule, now) for each in self._book.silences)
        still = f"; the silence of {EVERY_RULE} covers it still" if covered else ""
        self._record.note("info", ALERT, f"the silence of rule {rule} is ended{still}")

    def _check(self, rule: str) -> None:
        known = (*self._book.rules, EVERY_RULE)
        if rule in known:
            return
        if rule in BY_NAME:
            why = (
                ", which has no GPUs"
                if BY_NAME[rule].gpu and not self._gpu
                else ": alerts.rules of its config"
            )
            raise ConfigError(f"rule: saw {rule!r}, which is off in this run{why}")
        near = difflib.get_close_matches(rule, (*known, *BY_NAME), 1, 0.0)[0]
        raise ConfigError(
            f"rule: saw {rule!r}, which is no rule; nearest: {near} (`picotron-ray alerts rules`)"
        )

    # --- on the alerts' thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._ending:
            self._news.wait()
            self._news.clear()
            while self._waiting and not self._ending:
                self._busy = True
                window, spec = self._waiting.popleft()
                try:
                    self._judge(window, spec)
                except Exception:  # a rule that fails must not end alerts, nor the run
                    self.errors += 1
                    log.exception("a window could not be judged")
                self._busy = False

    def _judge(self, window: TelemetryWindow, spec: GenerationSpec | None) -> None:
        members = () if spec is None or str(spec.id) != window.generation else spec.members

        def node_of(rank: int) -> str:
            return members[rank].node if rank < len(members) else ""

        with self._lock:
            found, again = self._book.observe(window, node_of), self._book.again
        for each in found:
            self._tell(each)
        for each in again:
            self._ask(each)

    def _tell(self, found: AlertFinding) -> None:
        level = "info" if found.resolved or found.silenced else LEVELS[found.severity]
        words = f"{found.text} (silenced)" if found.silenced else found.text
        self._record.note(level, ALERT, words, found.plain())
        for sink in self._sinks:
            sink.send(found)
        if found.act and not found.resolved:
            self._ask(found)

    def _ask(self, found: AlertFinding) -> None:
        term, n = (int(part) for part in found.generation.split("."))
        act = cast(RuleAct, found.act)
        asked = RuleFinding(GenerationId(term, n), found.rule, act, found.step, found.node, found.said)
        self._asked.append(asked)


def _silence_of(config: AlertSilenceConfig) -> Silence:
    until_s = None
    if config.until is not None:
        until_s = datetime.fromisoformat(config.until.replace("Z", "+00:00")).astimezone(UTC).timestamp()
    return Silence(config.rule, until_s, config.why)


class AlertCalls:
    """Methods of the coordinator's actor that speak of alerts."""

    _telemetry: Any

    @property
    def _alerts(self) -> AlertService | None:
        found: AlertService | None = self._telemetry.alerts
        return found

    def alerts(self) -> dict[str, Any] | None:
        """Return the findings of the run; None where alerts are off."""
        return None if self._alerts is None else self._alerts.status()

    def silence(self, rule: str, seconds: float, why: str = "") -> str:
        """Silence a rule; returns why it was not, "" where it was."""
        return _refusal(lambda alerts: alerts.silence(rule, seconds, why), self._alerts)

    def unsilence(self, rule: str) -> str:
        """End silences of a rule; returns why that was not done, "" where it was."""
        return _refusal(lambda alerts: alerts.unsilence(rule), self._alerts)


def _refusal(do: Callable[[AlertService], None], alerts: AlertService | None) -> str:
    if alerts is None:
        return "alerts are off in this run (alerts.enabled, telemetry.interval_s)"
    try:
        do(alerts)
    except ConfigError as error:
        return str(error)
    return ""
