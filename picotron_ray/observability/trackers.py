"""Trackers: curves of a run in CSV and JSON lines, TensorBoard, Weights & Biases, MLflow.

Rows come from the committed ledger, written once their step is committed: every step exactly once and in
order, whatever failed in between, and never a step that training takes back. So a curve grows by a
checkpoint interval at a time; what happens right now is on the metrics endpoints. Evaluations come from
the heartbeats of the workers, one for each step at which a heartbeat saw a new one.

All trackers of a run are written by one process, its coordinator. CSV and JSON lines are read back by a
later coordinator, which goes on where they end. The others cannot be read back: a file beside them holds
the newest step they have, so a coordinator that dies in the instant between may give them one batch of rows
again, with equal values at equal steps.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from picotron_ray.config.schema.service import TrackerConfig
from picotron_ray.errors import ConfigError, install_extra
from picotron_ray.observability.tracker_owner import foreign_owner

Row = dict[str, Any]
"""``step`` and figures by name."""
STEP_KEYS = ("step", "loss", "grad_norm", "learning_rate", "tokens", "samples", "term", "n", "at_s")
"""Columns of a step; ``tokens`` and ``samples`` since step 0, ``at_s`` since the epoch."""
EVAL_KEYS = ("step", "eval_loss")
PLOTTED = ("loss", "grad_norm", "learning_rate", "tokens")
_EXTRAS = ("wandb", "mlflow")
"""Kinds that need the extra, and the module, of their name."""


class Tracker(Protocol):
    """Destination of rows. All methods block; calls come one at a time."""

    @property
    def last_step(self) -> int:
        """Newest step that was written; 0: none."""
        ...

    @property
    def last_eval_step(self) -> int: ...

    def write(self, steps: Sequence[Row], evaluations: Sequence[Row]) -> None:
        """Add rows of ``STEP_KEYS`` and of ``EVAL_KEYS``, each newer than those before."""
        ...

    def rewind(self, step: int) -> None:
        """Take back rows above ``step``, to which the run went back, as far as the tracker can."""
        ...

    def close(self) -> None: ...


def check_trackers(configs: Sequence[TrackerConfig], run: str = "") -> None:
    """Check that the trackers' packages are installed, and that no folder seen from here holds the curve of
    another run; ConfigError with a line for each that is not, or does.
    """
    problems = [
        f"trackers.{index}.kind: {config.kind} is not installed; {install_extra(config.kind)},"
        " or leave this tracker out"
        for index, config in enumerate(configs)
        if config.kind in _EXTRAS and find_spec(config.kind) is None
    ]
    problems += [
        f"trackers.{index}.folder: {why}"
        for index, config in enumerate(configs)
        if config.folder and run and (why := foreign_owner(Path(config.folder), run))
    ]
    seen: set[tuple[str, str | None]] = set()
    for index, config in enumerate(configs):
        if (config.kind, config.folder) in seen:
            problems.append(
                f"trackers.{index}.folder: saw {config.folder!r}, where an earlier {config.kind} tracker"
                " writes; name another folder, or leave one out"
            )
        seen.add((config.kind, config.folder))
    if problems:
        raise ConfigError(*problems)


def row_of(line: Row) -> Row:
    """Make a step's row from its ledger line; lines of older versions lack some figures."""
    row = {key: line.get(key) for key in STEP_KEYS}
    return {**row, "tokens": line["step"] * line["tokens"], "samples": line["samples"][1]}


class _Rows:
    """File of rows that is read back: a line each, whole lines only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def whole_lines(self) -> list[str]:
        """Read all lines, without a last one that a crash cut short."""
        if not self.path.exists():
            return []
        return self.path.read_text().rpartition("\n")[0].splitlines()

    def keep(self, lines: Sequence[str]) -> None:
        """Replace all that is there."""
        temporary = self.path.with_name(self.path.name + ".new")
        temporary.write_text("".join(f"{line}\n" for line in lines))
        temporary.rename(self.path)

    def add(self, lines: Sequence[str]) -> None:
        with self.path.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))


class JsonLinesTracker:
    """``metrics.jsonl``: an object a line, of a step or of an evaluation."""

    def __init__(self, folder: Path) -> None:
        self._file = _Rows(folder / "metrics.jsonl")
        self.last_step = self.last_eval_step = 0
        self._go_on(self._file.whole_lines())

    def _go_on(self, lines: Sequence[str]) -> None:
        rows = [json.loads(line) for line in lines]
        self.last_step = max((row["step"] for row in rows if "loss" in row), default=0)
        self.last_eval_step = max((row["step"] for row in rows if "eval_loss" in row), default=0)
        self._file.keep(lines)

    def write(self, steps: Sequence[Row], evaluations: Sequence[Row]) -> None:
        rows = sorted([*steps, *evaluations], key=lambda row: (row["step"], "eval_loss" in row))
        self._file.add([json.dumps({key: _finite(value) for key, value in row.items()}) for row in rows])
        self.last_step = max([self.last_step, *(row["step"] for row in steps)])
        self.last_eval_step = max([self.last_eval_step, *(row["step"] for row in evaluations)])

    def rewind(self, step: int) -> None:
        self._go_on([line for line in self._file.whole_lines() if json.loads(line)["step"] <= step])

    def close(self) -> None:
        """Nothing is open."""


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class CsvTracker:
    """``steps.csv`` and ``evaluations.csv``, with a header each."""

    def __init__(self, folder: Path) -> None:
        self._steps, self._evaluations = _Rows(folder / "steps.csv"), _Rows(folder / "evaluations.csv")
        self.last_step = self._go_on(self._steps, STEP_KEYS)
        self.last_eval_step = self._go_on(self._evaluations, EVAL_KEYS)

    def _go_on(self, file: _Rows, keys: Sequence[str], upto: float = math.inf) -> int:
        lines = [line for line in file.whole_lines()[1:] if int(line.partition(",")[0]) <= upto]
        file.keep([",".join(keys), *lines])
        return int(lines[-1].partition(",")[0]) if lines else 0

    def write(self, steps: Sequence[Row], evaluations: Sequence[Row]) -> None:
        self.last_step = self._add(self._steps, STEP_KEYS, steps, self.last_step)
        self.last_eval_step = self._add(self._evaluations, EVAL_KEYS, evaluations, self.last_eval_step)

    def _add(self, file: _Rows, keys: Sequence[str], rows: Sequence[Row], last: int) -> int:
        with file.path.open("a", newline="") as opened:
            csv.writer(opened, lineterminator="\n").writerows([row[key] for key in keys] for row in rows)
        return max([last, *(row["step"] for row in rows)])

    def rewind(self, step: int) -> None:
        self.last_step = self._go_on(self._steps, STEP_KEYS, step)
        self.last_eval_step = self._go_on(self._evaluations, EVAL_KEYS, step)

    def close(self) -> None:
        """Nothing is open."""


class TrackerProgress:
    """Newest steps of a tracker that cannot be asked, in a file beside it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last_step = self.last_eval_step = 0
        self.begun = path.exists()
        if self.begun:
            self.last_step, self.last_eval_step = json.loads(path.read_text())

    def reach(self, step: int, eval_step: int) -> None:
        self.last_step, self.last_eval_step = step, eval_step
        temporary = self._path.with_name(self._path.name + ".new")
        temporary.write_text(json.dumps([step, eval_step]))
        temporary.rename(self._path)
