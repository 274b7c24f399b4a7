"""Recordings of what Python does in some steps: calls, lines, or memory by phase.

They are written as traces for the same viewer as a profile.
A recording is bounded: what comes after ``MOST_EVENTS`` is counted and left out.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from picotron_ray.runtime.worker.tools.profiler import STEP, OnPhase

MOST_EVENTS = 200_000
PACKAGE = str(Path(__file__).resolve().parents[3])
Memory = Callable[[], Mapping[str, float]]


class PythonTrace:
    """Calls of Python functions of the thread that trains, or lines of this package's and the model's.

    Args:
        lines: lines too; else calls alone.
        model_file: of a model of the user's own; empty: there is none.
    """

    def __init__(self, *, lines: bool, model_file: str = "") -> None:
        self._lines, self._model_file = lines, model_file
        self._events: list[dict[str, Any]] = []
        self._left_out = 0
        self._open: list[tuple[str, float]] = []
        self._before: Any = None
        self._on = False
        self._step_s = 0.0

    def prepare(self) -> None:
        """Nothing is to be prepared."""

    def start(self) -> None:
        """Begin with the next step."""

    def begin(self, step: int) -> None:
        """Trace the thread that calls this."""
        self._step_s, self._on, self._open = time.time(), True, []
        if self._lines:
            self._before = sys.gettrace()
            sys.settrace(self._traced)
        else:
            self._before = sys.getprofile()
            sys.setprofile(self._called)

    def end(self, step: int) -> None:
        """Trace no more."""
        if not self._on:
            return
        self._on = False
        (sys.settrace if self._lines else sys.setprofile)(self._before)
        self._note(f"{STEP}{step}", self._step_s, time.time())

    def stop(self) -> None:
        """Trace no more, also where a step has not ended."""
        self.end(-1)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            self._open.append(
                (f"{code.co_qualname} {_short(code.co_filename)}:{code.co_firstlineno}", time.time())
            )
        elif event == "return" and self._open:
            name, began = self._open.pop()
            self._note(name, began, time.time())

    def _traced(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) and file != self._model_file:
            return None
        if event == "line":
            now = time.time()
            self._note(f"{_short(file)}:{frame.f_lineno} {frame.f_code.co_qualname}", now, now)
        return self._traced

    def _note(self, name: str, began: float, ended: float) -> None:
        if len(self._events) >= MOST_EVENTS:
            self._left_out += 1
            return
        span = {"ts": 1e6 * began, "dur": 1e6 * (ended - began)}
        self._events.append({"ph": "X", "cat": "python", "name": name, **span, "pid": os.getpid(), "tid": 1})

    def save(self, path: Path, limit_bytes: int) -> Mapping[str, Any]:
        """Write the events as a trace."""
        return write_events(path, self._events, self._left_out)


class MemoryRecording:
    """Memory at each phase of the recorded steps.

    Args:
        memory: reads it, in bytes by name.
        listen: as of `profiler.Profile`.
    """

    def __init__(self, memory: Memory, listen: Callable[[OnPhase | None], None]) -> None:
        self._memory, self._listen = memory, listen
        self._events: list[dict[str, Any]] = []
        self._left_out = 0

    def prepare(self) -> None:
        """Nothing is to be prepared."""

    def start(self) -> None:
        """Hear of phases from now on."""
        self._listen(self._entered)

    def begin(self, step: int) -> None:
        """Note memory as a step begins."""
        self._entered(step, "step")

    def _entered(self, step: int, phase: str) -> None:
        if len(self._events) >= MOST_EVENTS:
            self._left_out += 1
            return
        at = {"ts": 1e6 * time.time(), "pid": os.getpid(), "tid": 1}
        self._events.append({"ph": "C", "name": "memory", "args": dict(self._memory()), **at})
        self._events.append({"ph": "i", "s": "t", "name": f"{phase} of step {step}", **at})

    def end(self, step: int) -> None:
        """Note memory as a step ends."""
        self._entered(step, "end")

    def stop(self) -> None:
        """Hear of phases no more."""
        self._listen(None)

    def save(self, path: Path, limit_bytes: int) -> Mapping[str, Any]:
        """Write the figures as a trace."""
        return write_events(path, self._events, self._left_out)


def write_events(path: Path, events: list[dict[str, Any]], left_out: int) -> Mapping[str, Any]:
    """Write events as a compressed trace; returns what is to be said of them."""
    with gzip.open(path, "wt", 3) as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": 0}, file)
    return {"events": len(events), "left_out": left_out}


def _short(file: str) -> str:
    parts = Path(file).parts
    return "/".join(parts[-2:])
