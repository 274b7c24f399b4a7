"""A recording of some steps of one rank: armed, then waiting, warming up, recording, saving, done.

All ranks that record begin after the same step. The last recorded step ends with all ranks held at its
boundary, so that saving a recording, which takes seconds, is no hang. Whatever fails here ends the recording
and not the run, but where ranks communicate in it (``together``): there the others would wait for ever.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

log = logging.getLogger(__name__)
ARMED_S = 60.0
"""Time after which a recording that was not told to begin is forgotten: whoever wanted it is gone."""
SAVE_S = 300.0
"""Time after which a recording that is not saved is given up: all ranks wait for it."""
State = Literal["armed", "running", "stopped", "saving", "done", "failed"]


class Recording(Protocol):
    """Recorder; called by the training thread, but for `save`."""

    def prepare(self) -> None:
        """Get ready, some steps before."""

    def start(self) -> None:
        """Begin to record."""

    def begin(self, step: int) -> None:
        """Hear that a recorded step begins."""

    def end(self, step: int) -> None:
        """Hear that a recorded step has ended."""

    def stop(self) -> None:
        """Stop recording; also called where nothing was begun."""

    def save(self, path: Path, limit_bytes: int) -> Mapping[str, Any]:
        """Write what was recorded; returns what is to be said of it.

        Raises:
            ValueError: it is larger than ``limit_bytes``.
        """


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """Steps that pass, that warm up, and that are recorded."""

    wait: int
    warmup: int
    active: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.wait + self.warmup + self.active


class WindowedTool:
    """One recording of one rank."""

    def __init__(
        self, key: str, window: RecordedSteps, recording: Recording, path: Path, limit_bytes: int
    ) -> None:
        """
        Args:
            key: names it, on all ranks alike.
            path: of the file that it becomes.
            limit_bytes: most that is written.
        """
        self.key, self.window, self.path = key, window, path
        self._recording, self._limit_bytes = recording, limit_bytes
        self.state: State = "armed"
        self.steps: list[int] = []
        self.rounds: list[tuple[int, int]] = []
        """Nanoseconds of this rank's clock around each exchange of the hold that ends it."""
        self._taken, self._armed_s, self._stopped_s = 0, time.monotonic(), 0.0
        self._unwanted = ""  # why, for the thread that trains: it alone can end what runs in it
        self._text = ""
        self._told: Mapping[str, Any] = {}

    @property
    def _together(self) -> bool:
        """Whether ranks communicate in the recording: then others wait for one that fails."""
        return bool(getattr(self._recording, "together", False))

    @property
    def stale(self) -> bool:
        """Whether it was armed long ago and nobody began it."""
        return self.state == "armed" and time.monotonic() - self._armed_s > ARMED_S

    @property
    def live(self) -> bool:
        """Whether it has begun and is not over."""
        return self.state in ("running", "stopped", "saving")

    @property
    def last(self) -> bool:
        """Whether the step at hand is the last one."""
        return self.state == "running" and self._taken == self.window.total

    def go(self) -> None:
        """Begin with the next step."""
        if self.state == "armed":
            self.state = "running"

    def begin(self, step: int) -> None:
        """Hear that a step begins."""
        if self.state != "running" or self._ended_unwanted():
            return
        self._taken += 1
        window = self.window
        try:
            if self._taken == window.wait + 1:
                self._recording.prepare()
            if self._taken == window.wait + window.warmup + 1:
                self._recording.start()
            if self._taken > window.wait + window.warmup:
                self.steps.append(step)
                self._recording.begin(step)
        except Exception as error:
            self._fail(error)
            if self._together:
                raise

    def end(self, step: int) -> None:
        """Hear that a step has ended; after the last one nothing is recorded any more."""
        if self.state != "running" or self._ended_unwanted() or not self.steps:
            return
        try:
            self._recording.end(step)
            if self.last:
                self._recording.stop()
                self.state, self._stopped_s = "stopped", time.monotonic()
        except Exception as error:
            self._fail(error)
            if self._together:
                raise

    def save(self) -> None:
        """Begin to write what was recorded, beside training, which is held."""
        if self.state == "stopped":
            self.state = "saving"
            threading.Thread(target=self._save, name="recording", daemon=True).start()

    def _save(self) -> None:
        try:
            told = self._recording.save(self.path, self._limit_bytes)
        except Exception as error:  # noqa: BLE001 (it is told by its state)
            if self.state == "saving":
                self._fail(error)
            return
        if self.state == "saving":  # else it took too long, and nobody waits for it
            self._told, self.state = told, "done"

    @property
    def holds(self) -> bool:
        """Whether all ranks are to wait for its end; after `SAVE_S` it is given up."""
        if self.state not in ("stopped", "saving"):
            return False
        if time.monotonic() - self._stopped_s < SAVE_S:
            return True
        self._fail(TimeoutError(f"it was not saved within {SAVE_S:g} s"))
        return False

    def give_up(self, why: str) -> None:
        """End it where it is not over, on the thread that trains: its generation has ended."""
        if self.state in ("armed", "running", "stopped"):
            self._fail(RuntimeError(why))

    def unwanted(self, why: str) -> None:
        """End it, from any thread, because nobody wants it any more.

        Hooks of the interpreter and torch's profiler belong to the thread that trains, so one that runs ends
        at that thread's next begin or end of a step. One in which ranks communicate runs to its end.
        """
        if self.state == "running":
            self._unwanted = "" if self._together else why
        elif self.live or self.state == "armed":
            self._fail(RuntimeError(why))

    def _ended_unwanted(self) -> bool:
        if self._unwanted:
            self._fail(RuntimeError(self._unwanted))
        return bool(self._unwanted)

    def _fail(self, error: Exception) -> None:
        log.warning("recording %s of this rank fails: %s: %s", self.key, type(error).__name__, error)
        self._text = " ".join(str(error).split())[:300] or type(error).__name__
        self.state = "failed"
        try:
            self._recording.stop()
        except Exception:  # it is over in any case
            log.exception("recording %s does not stop", self.key)

    def plain(self) -> dict[str, Any]:
        """As JSON values, for whoever asks."""
        size = self.path.stat().st_size if self.state == "done" and self.path.exists() else 0
        return {
            "state": self.state,
            "text": self._text,
            "file": self.path.name,
            "bytes": size,
            "steps": self.steps,
            "rounds": self.rounds,
            "pid": os.getpid(),
            **self._told,
        }

    def drop(self) -> None:
        """Remove what it wrote."""
        self.path.unlink(missing_ok=True)
