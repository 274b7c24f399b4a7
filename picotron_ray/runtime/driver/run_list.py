"""Runs below a storage URL, and the differences of two of them: from storage alone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.storage.run_names import run_names
from picotron_ray.config.export import flatten
from picotron_ray.config.schema.service import RUN_NAME, StorageConfig
from picotron_ray.config.storage_urls import redact, url_problems
from picotron_ray.errors import ConfigError, CorruptError, NotFoundError
from picotron_ray.observability.report.page import duration
from picotron_ray.runtime.driver.find_stored import find_stored_run
from picotron_ray.runtime.run_storage.run_account import newest_loss, newest_step, run_account
from picotron_ray.runtime.run_storage.stored_run import StoredRun, read_brief

THREADS = 8
FIGURES = ("goodput", "wall_s", "step", "loss", "eval_loss")


def list_runs(url: str) -> list[dict[str, Any]]:
    """Return a row for each run below a URL: ``name, state, step, steps, loss, goodput, updated_s``.

    A URL that is a run's own gives the row of that run.

    ``updated_s`` is its newest sign in seconds since the epoch. A run that cannot be read has the state
    "unreadable", and ``problem``.

    Raises:
        ConfigError: there is no such place, or the URL is none.
        StorageError: storage does not answer.
    """
    config = StorageConfig(url=url)
    for _, problem in url_problems(config):
        raise ConfigError(f"URL: {problem}")
    try:
        names = run_names(config)
    except NotFoundError as error:
        raise ConfigError(f"URL: {error}; expected a folder of runs, or s3://bucket/prefix") from error
    with ThreadPoolExecutor(THREADS) as threads:
        rows = threads.map(partial(_row, config), names)
        found = [row for row in rows if row is not None]
    return found or _run_at(url)


def _run_at(url: str) -> list[dict[str, Any]]:
    """Return the row of the run that a URL is the address of; nothing where it is none."""
    place = url if url.startswith("s3://") else str(Path(url.removeprefix("file://")).expanduser().absolute())
    above, _, name = place.rstrip("/").rpartition("/")
    config = StorageConfig(url=above or "/")
    if not re.fullmatch(RUN_NAME, name) or any(url_problems(config)):
        return []
    row = _row(config, name)
    return [] if row is None else [row]


def _row(config: StorageConfig, name: str) -> dict[str, Any] | None:
    row: dict[str, Any] = {"name": name, "state": "unreadable", "step": 0, "steps": None}
    row |= {"loss": None, "goodput": None, "updated_s": None}
    try:
        run = read_brief(open_storage(config, name), name)
    except NotFoundError:
        return None  # a folder of something else
    except (CorruptError, KeyError, TypeError) as error:
        return {**row, "problem": str(error)}
    goodput = run_account(run)["goodput"]
    known = {"step": newest_step(run), "steps": run.config.get("steps"), "loss": newest_loss(run)}
    updated_s = run.vitals.updated_s or None
    return {**row, **known, "state": run.vitals.state, "goodput": goodput, "updated_s": updated_s}


def run_lines(rows: list[dict[str, Any]], url: str) -> Iterator[str]:
    """Yield a table of runs."""
    if not rows:
        yield f"no run is in {redact(url)}"
        return
    cells = [["name", "state", "step", "loss", "goodput", "age"]]
    for row in rows:
        age = "-" if row["updated_s"] is None else duration(max(0.0, time.time() - row["updated_s"]))
        goodput = "-" if row["goodput"] is None else f"{row['goodput']:.1%}"
        loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
        step = f"{row['step']}/{row['steps']}" if row["steps"] else str(row["step"])
        cells.append([row["name"], row["state"], step, loss, goodput, age])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


# --- differences ----------------------------------------------------------------------------------------


def diff_runs(one: str, two: str) -> dict[str, Any]:
    """Return in what two runs differ, each named as for a report.

    ``config`` and ``environment`` have both values by key, ``figures`` too, ``curves`` the losses at the
    newest common step and where they are furthest apart; null where there is no common step.
    """
    a, b = _of_two("first", one), _of_two("second", two)
    accounts = run_account(a), run_account(b)
    return {
        "runs": [a.name, b.name],
        "config": _differences(flatten(a.config), flatten(b.config)),
        "environment": _differences(flatten(a.environment), flatten(b.environment)),
        "figures": {name: [account[name] for account in accounts] for name in FIGURES},
        "seconds": {
            cause: [account["seconds"][cause] for account in accounts] for cause in accounts[0]["seconds"]
        },
        "curves": _curves(a, b),
    }


def _of_two(which: str, word: str) -> StoredRun:
    try:
        return find_stored_run(word)
    except ConfigError as error:
        raise ConfigError(f"{which} {error}") from error


def _differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, list[Any]]:
    keys = sorted(one.keys() | two.keys())
    return {key: [one.get(key), two.get(key)] for key in keys if one.get(key) != two.get(key)}


def _curves(a: StoredRun, b: StoredRun) -> dict[str, Any] | None:
    """Compare the losses at the steps of ``a`` that lie within those of ``b``."""
    if not a.steps or not b.steps:
        return None
    steps = np.array([one.step for one in a.steps])
    inside = (steps >= b.steps[0].step) & (steps <= b.steps[-1].step)
    if not inside.any():
        return None
    losses = np.array([one.loss for one in a.steps])[inside]
    others = np.interp(steps[inside], [one.step for one in b.steps], [one.loss for one in b.steps])
    furthest = int(np.abs(losses - others).argmax())

    def at(place: int) -> dict[str, Any]:
        return {"step": int(steps[inside][place]), "loss": [float(losses[place]), float(others[place])]}

    return {"newest": at(-1), "furthest": at(furthest)}


def diff_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield differences as text."""
    one, two = found["runs"]
    yield f"{one} against {two}"
    for part in ("config", "environment"):
        yield f"{part}:" if found[part] else f"{part}: equal"
        yield from (f"  {key}: {a} against {b}" for key, (a, b) in found[part].items())
    yield "figures:"
    for name, (a, b) in found["figures"].items():
        yield f"  {name}: {_short(a)} against {_short(b)}"
    curves = found["curves"]
    if curves is None:
        yield "curves: no common steps"
        return
    yield "curves:"
    for where, text in (("newest", "newest common step"), ("furthest", "furthest apart, step")):
        a, b = curves[where]["loss"]
        yield f"  loss at the {text} {curves[where]['step']}: {a:.6g} against {b:.6g}"


def _short(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}"
