"""Recording of how long steps take, and of nothing else: what the cost of other tools is measured with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any


class StepSeconds:
    """Seconds of each recorded step, as the thread that trains sees them."""

    def __init__(self) -> None:
        self._began, self._steps_s = 0.0, list[float]()

    def prepare(self) -> None:
        """Nothing is to be prepared."""

    def start(self) -> None:
        """Begin with the next step."""

    def begin(self, step: int) -> None:
        """Read the clock."""
        self._began = perf_counter()

    def end(self, step: int) -> None:
        """Note a step."""
        self._steps_s.append(perf_counter() - self._began)

    def stop(self) -> None:
        """Nothing goes on."""

    def save(self, path: Path, limit_bytes: int) -> Mapping[str, Any]:
        """Tell the seconds; no file is written."""
        return {"steps_s": self._steps_s}
