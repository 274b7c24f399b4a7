"""Sinks: findings are posted by a thread each, with bounds, so that no receiver can hurt a run.

A sink has a queue of `MOST_WAITING` findings and `TRIES` tries for each. What does not fit, or is refused, is
dropped and counted. Redirects are not followed: an address that moved may be anybody's. Of an answer only the
status is read. An address may be a secret, so that no word of this module repeats it, errors included.

Alertmanager forgets an alert that is not repeated: what fires is sent again each `REPEAT_S`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import urllib3

from picotron_ray.config.schema.alerts import AlertSinkConfig
from picotron_ray.observability.alerts.finding import SEVERITIES, AlertFinding
from picotron_ray.observability.alerts.messages import ALERTS_PATH, encoded

log = logging.getLogger(__name__)
MOST_WAITING = 64
MOST_FIRING = 64
TRIES = 4
FIRST_WAIT_S = 0.5
REPEAT_S = 60.0
MOST_URL = 4096
Tell = Callable[[str], None]


class SinkAddressError(Exception):
    """The address of a sink is not known; the text names where it was looked for, and not what was found."""


def address_of(config: AlertSinkConfig, environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of a sink.

    Raises:
        SinkAddressError: it is not where the config says, or it is none.
    """
    where, found = "url", config.url
    if config.url_env is not None:
        where, found = f"the environment variable {config.url_env}", environment.get(config.url_env)
    elif config.url_file is not None:
        where = f"the file {config.url_file}"
        try:
            found = Path(config.url_file).read_text()[:MOST_URL].strip()
        except (OSError, ValueError) as error:
            raise SinkAddressError(f"{where} cannot be read ({type(error).__name__})") from None
    if not found:
        raise SinkAddressError(f"{where} is not set on the coordinator's node")
    if not found.startswith(("http://", "https://")):
        raise SinkAddressError(f"{where} holds no address that begins with http:// or https://")
    return found


class AlertSink:
    """Sender of one sink; ``send`` never blocks, and may be called from any thread."""

    def __init__(self, name: str, config: AlertSinkConfig, url: str, run: str, tell: Tell) -> None:
        """
        Args:
            name: that it has in words, such as ``alerts.sinks.0 (slack)``.
            tell: hears when findings are dropped, and when they are taken again.
        """
        self._name, self._config, self._run, self._tell = name, config, run, tell
        self._url = url.rstrip("/") + ALERTS_PATH if config.kind == "alertmanager" else url
        self._least = SEVERITIES.index(config.least)
        self._waiting: queue.Queue[AlertFinding] = queue.Queue(MOST_WAITING)
        self._firing: dict[tuple[str, str], AlertFinding] = {}
        self._http = urllib3.PoolManager(num_pools=1, maxsize=1, retries=False)
        self._ending, self._failing = threading.Event(), False
        self.sent = self.dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"alerts-{config.kind}", daemon=True)
        self._thread.start()

    def send(self, found: AlertFinding) -> None:
        """Take a finding to be sent, where it is grave enough and there is room."""
        if found.silenced or SEVERITIES.index(found.severity) < self._least:
            return
        self._note_firing(found)  # first: of what finds no room in the queue, what is over is not repeated
        try:
            self._waiting.put_nowait(found)
        except queue.Full:
            self.dropped += 1

    def finish(self, patience_s: float) -> None:
        """Send what waits, for up to so long; then give up."""
        end = time.monotonic() + patience_s
        while not self._waiting.empty() and time.monotonic() < end:
            time.sleep(0.02)
        self._ending.set()
        self._thread.join(max(0.0, end - time.monotonic()))

    # --- on the sink's thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        due = time.monotonic() + REPEAT_S
        while not self._ending.is_set():
            try:
                found = self._waiting.get(timeout=min(0.2, REPEAT_S))
            except queue.Empty:
                if time.monotonic() >= due:
                    due = time.monotonic() + REPEAT_S
                    self._repeat()
                continue
            self._deliver(found)

    def _note_firing(self, found: AlertFinding) -> None:
        if self._config.kind != "alertmanager":
            return
        self._firing.pop((found.rule, found.key), None)
        if not found.resolved and len(self._firing) < MOST_FIRING:
            self._firing[found.rule, found.key] = found

    def _repeat(self) -> None:
        for found in list(self._firing.values()):
            self._post(found)

    def _deliver(self, found: AlertFinding) -> None:
        wait_s, why = FIRST_WAIT_S, ""
        for number in range(TRIES):
            why, again = self._post(found)
            if not why:
                self.sent += 1
                self._took()
                return
            if not again or number == TRIES - 1 or self._ending.wait(wait_s):
                break
            wait_s *= 2
        self.dropped += 1
        if not self._failing:  # once, however long it lasts
            self._failing = True
            self._tell(f"{self._name} does not take findings: {why}; they are dropped and counted")

    def _took(self) -> None:
        if self._failing:
            self._failing = False
            self._tell(f"{self._name} takes findings again; {self.dropped} were dropped")

    def _post(self, found: AlertFinding) -> tuple[str, bool]:
        """Try once; returns why it failed, "" where it did not, and whether another try may help."""
        try:
            answer = self._http.request(
                "POST",
                self._url,
                body=encoded(self._config.kind, self._run, found),
                headers={"Content-Type": "application/json"},
                timeout=urllib3.Timeout(total=self._config.timeout_s),
                redirect=False,
                preload_content=False,
            )
        except urllib3.exceptions.HTTPError as error:
            return type(error).__name__, True  # its text has the address
        except (OSError, ValueError) as error:
            return type(error).__name__, False
        status = int(answer.status)
        answer.close()
        if 200 <= status < 300:
            return "", False
        return f"it answered {status}", status >= 500 or status == 429
