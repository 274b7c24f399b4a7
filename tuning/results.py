"""Results of a stage's trials: rows of plain data, as table and as files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from ray.tune import ResultGrid

from picotron_ray.layout.layout import Layout

FIGURES = ("step", "tokens_per_s", "loss", "eval_loss", "wall_s", "failures")
COLUMNS = ("stage", "trial", "status", "layout", "learning_rate", *FIGURES, "reason")


def rows_of(stage: str, grid: ResultGrid) -> list[dict[str, Any]]:
    """One row per trial, in the order of their numbers.

    ``status``: finished; stopped (by the scheduler); failed, with a reason; or unfinished, where the sweep
    was interrupted.
    """
    # The grid's own results leave out trials that never reported, and with them what they tried.
    rows = [_row(stage, trial) for trial in grid._experiment_analysis.trials]
    return sorted(rows, key=lambda row: str(row["trial"]))


def _row(stage: str, trial: Any) -> dict[str, Any]:
    figures = trial.last_result or {}
    status = _status(trial, figures)
    reason = _reason(trial) if status == "failed" else ""
    return {
        "stage": stage,
        "trial": trial.trial_id,
        "status": status,
        "layout": str(Layout.from_dict(trial.config["layout"])),
        "learning_rate": trial.config["learning_rate"],
        **{name: figures.get(name) for name in FIGURES},
        "reason": reason,
    }


def _status(trial: Any, figures: dict[str, Any]) -> str:
    if trial.status == "ERROR":
        return "failed"
    if figures.get("finished"):
        return "finished"
    return "stopped" if figures.get("done") else "unfinished"  # an interrupted Tune calls both terminated


def _reason(trial: Any) -> str:
    """The last line of the error that Tune kept, which is the exception with its message."""
    lines = str(trial.get_error() or "").strip().splitlines()
    return lines[-1].strip()[:500] if lines else "unknown"


def as_csv(rows: Iterable[dict[str, Any]]) -> str:
    """All columns, a row per trial."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line per trial, for people."""
    return [
        f"{row['trial']}  {row['status']:10}  {row['layout']:24}  lr {row['learning_rate']:.3g}"
        f"  {_number(row['tokens_per_s'], ',.0f')} tokens/s  eval_loss {_number(row['eval_loss'], '.4f')}"
        + (f"  {row['reason']}" if row["reason"] else "")
        for row in rows
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
