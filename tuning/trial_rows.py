"""Results of trials: rows of plain data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ray.tune import ResultGrid

from tuning.errors import StudyStorageError

ENDED = ("finished", "failed", "stopped")
FIGURES = (
    "step", "tokens_per_s", "loss", "eval_loss", "wall_s", "free_memory", "utilisation", "score", "ran",
    "workers", "failures", "run", "took_over",
)  # fmt: skip


STORAGE_SIGNS = (StudyStorageError.__name__, "No space left on device")
OWN_TYPE = re.compile(r"^(picotron_ray|tuning)[\w.]*: ")


def rows_of(grid: ResultGrid) -> list[dict[str, Any]]:
    """One row per trial, in the order of their numbers."""
    rows = [row_of(trial) for trial in trials_of(grid)]
    return sorted(rows, key=lambda row: str(row["trial"]))


def row_of(trial: Any) -> dict[str, Any]:
    """A trial as plain data: its point, its figures, and what became of it.

    ``status``: finished; stopped (by the scheduler or the budget); failed, with a reason; pending, running or
    paused; or unfinished, where the study was interrupted.
    """
    figures = trial.last_result or {}
    status = _status(trial, figures)
    return {
        "trial": trial.trial_id,
        "status": status,
        "point": dict(trial.config),
        **{name: _plain(figures.get(name)) for name in FIGURES},
        "reason": _reason(trial) if status == "failed" else "",
    }


def trials_of(grid: ResultGrid) -> list[Any]:
    """Tune's trials; the grid's own results leave out those that never reported, and what they tried."""
    return list(grid._experiment_analysis.trials)


def storage_failed(trial: Any) -> bool:
    """Whether a trial failed because storage is full or gone, which says nothing about its point."""
    text = str(trial.get_error() or "") if trial.status == "ERROR" else ""
    return any(sign in text for sign in STORAGE_SIGNS)


def _plain(value: Any) -> Any:
    """The value, or None for what JSON has no number for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _status(trial: Any, figures: Mapping[str, Any]) -> str:
    if trial.status == "ERROR":
        return "failed"
    if figures.get("finished"):
        return "finished"
    if trial.status in ("PENDING", "RUNNING", "PAUSED"):
        return str(trial.status).lower()
    return "stopped" if figures.get("done") else "unfinished"  # an interrupted Tune calls both terminated


def _reason(trial: Any) -> str:
    """The last line of the error that Tune kept: the exception's message, after its type if not our own."""
    lines = str(trial.get_error() or "").strip().splitlines()
    return OWN_TYPE.sub("", lines[-1].strip())[:500] if lines else "unknown"
