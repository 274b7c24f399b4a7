"""Planner's process, as the coordinator sees it: questions go there, answers come back as events.

The search holds Python's lock for seconds, so it runs in a process of its own (``server``), which a
thread here waits for. A process that dies, or does not answer within ``ANSWER_LIMIT_S``, is replaced, and the
question is put again. After ``MOST_TRIES`` the machine is told that there is no answer: it goes on with its
default layout and asks again later. Nobody else ever waits for any of this.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import LayoutQuestion, Planned
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime import child_process

log = logging.getLogger(__name__)
ANSWER_LIMIT_S = 120.0
MOST_TRIES = 3
RESTART_PAUSE_S = 0.5
COMMAND = (sys.executable, "-m", "picotron_ray.runtime.planning.server")


class PlannerGoneError(Exception):
    """The planner's process ended, or did not answer in time."""


class PlannerProcess:
    """The process and the thread that waits for it; made at the coordinator's start, to be ready early."""

    def __init__(
        self,
        job: JobConfig,
        device: str,
        report: Callable[[Planned], None],
        command: Sequence[str] = COMMAND,
        limit_s: float = ANSWER_LIMIT_S,
    ) -> None:
        """
        Args:
            device: ``"cuda"`` or ``"cpu"``.
            report: takes the answers, on the thread here.
        """
        self._head = json.dumps({"job": job.model_dump(mode="json"), "device": device})
        self._report, self._command, self._limit_s = report, tuple(command), limit_s
        self._wanted: list[LayoutQuestion] = []
        self._changed = threading.Condition()
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        threading.Thread(target=self._run, name="planner", daemon=True).start()

    # --- called from other threads -------------------------------------------------------------------

    def ask(self, questions: Sequence[LayoutQuestion]) -> None:
        """Have these answered, the first one first; what waits from before is dropped."""
        with self._changed:
            self._wanted = list(questions)
            self._changed.notify()

    def close(self) -> None:
        """End the process; no answer comes any more."""
        with self._changed:
            self._closing = True
            process = self._process
            self._changed.notify()
        if process is not None:
            process.kill()

    @property
    def pid(self) -> int | None:
        """Process id, for drills; None while there is none."""
        return None if self._process is None else self._process.pid

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        tries = 0
        while (question := self._next()) is not None:
            try:
                event = self._answer(question)
            except (PlannerGoneError, OSError, ValueError) as error:
                if self._closing:
                    break
                log.warning("the planner's process is replaced: %s", error)
                self._end()
                tries += 1
                if tries < MOST_TRIES:
                    time.sleep(RESTART_PAUSE_S)
                    continue
                event = Planned(question, error=f"the planner failed {tries} times ({error})")
            tries = 0
            self._done(question)
            if not self._closing:
                self._report(event)
        self._end()

    def _next(self) -> LayoutQuestion | None:
        """Wait for a question, with the process up; None: the end."""
        with contextlib.suppress(PlannerGoneError, OSError):
            self._up()
        with self._changed:
            self._changed.wait_for(lambda: self._closing or bool(self._wanted))
            return None if self._closing else self._wanted[0]

    def _done(self, question: LayoutQuestion) -> None:
        with self._changed:
            self._wanted = [one for one in self._wanted if one != question]

    def _answer(self, question: LayoutQuestion) -> Planned:
        process = self._up()
        self._write(process, json.dumps(asdict(question)))
        found = json.loads(self._read_line(process))
        layout = None if found["layout"] is None else Layout.from_dict(found["layout"])
        return Planned(
            question, layout, found["cost_s"], found["reason"], found["runner_up"], found["planned_s"]
        )

    def _up(self) -> subprocess.Popen[bytes]:
        """Return the living process, or a new one that knows the job."""
        if self._process is None:
            process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            with self._changed:
                self._process, self._unread = process, b""
                if self._closing:
                    process.kill()
            self._write(process, self._head)
        return self._process

    def _write(self, process: subprocess.Popen[bytes], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()

    def _read_line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        until = time.monotonic() + self._limit_s
        while b"\n" not in self._unread:
            left_s = until - time.monotonic()
            if left_s <= 0 or not child_process.readable(process.stdout.fileno(), left_s):
                raise PlannerGoneError(f"no answer within {self._limit_s:g} s")
            found = os.read(process.stdout.fileno(), 1 << 16)
            if not found:
                raise PlannerGoneError(f"it ended with {process.wait()}")
            self._unread += found
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _end(self) -> None:
        """Kill the process, and reap it."""
        process, self._process = self._process, None
        if process is not None:
            child_process.end(process)
