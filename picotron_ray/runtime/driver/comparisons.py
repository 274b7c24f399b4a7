"""``debug NAME inconsistency`` and ``race``: one step of all ranks of a run that goes on, compared."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from picotron_ray.debug import inconsistency as places
from picotron_ray.debug import races as raced
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import recordings
from picotron_ray.runtime.driver.tool_orders import RunTools

ONE_STEP = {"wait": 0, "warmup": 0, "active": 1}


def inconsistency(run: str, say: recordings.Say) -> dict[str, Any]:
    """Compare what ranks hold and compute alike in one step.

    Raises:
        ConfigError: the run or its state does not allow it.
    """
    tools = RunTools(run)
    if tools.world_size == 1:
        raise ConfigError(f"inconsistency: run {run} has one rank, expected two or more that are compared")
    reports = _reports(tools, "inconsistency", say)
    found, counts = places.compared(reports)
    unlike = any(report.get("activations") is None for report in reports.values())
    return {
        "step": _step(reports),
        "ranks": tools.world_size,
        "compared": counts,
        "first": found[0].plain() if found else None,
        "differences": [place.plain() for place in found[: places.MOST_PLACES]],
        "left_out": max(0, len(found) - places.MOST_PLACES),
        "notes": ["activations: replicas compute on different numbers of rows"] if unlike else [],
        "suggestions": places.suggestions(found, counts, run),
    }


def race(run: str, say: recordings.Say) -> dict[str, Any]:
    """Run the passes of one step again on all ranks, and watch its sums.

    Raises:
        ConfigError: the run or its state does not allow it.
    """
    tools = RunTools(run)
    reports = _reports(tools, "race", say)
    found = raced.races(reports, tools.spec.layout)
    sharded = tools.spec.layout.zero and tools.spec.layout.replicas > 1
    return {
        "step": _step(reports),
        "ranks": tools.world_size,
        "compared": sum(len(run[kind]) for run in reports[0]["runs"][:1] for kind in raced.PASSES),
        "races": [each.plain() for each in found],
        "notes": ["sums of gradients that ZeRO cuts are torch's own, and not watched"] if sharded else [],
        "suggestions": raced.suggestions(found, run),
    }


def _reports(tools: RunTools, kind: str, say: recordings.Say) -> dict[int, Any]:
    """Have all ranks look at the same step; by rank, what each of them tells."""
    ranks = range(tools.world_size)
    key, _ = recordings.record(tools, ranks, {"kind": kind, **ONE_STEP}, say)
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = {}
            for rank in ranks:
                file = Path(folder) / f"{rank}.json"
                recordings.fetch(tools, rank, file)
                found[rank] = json.loads(file.read_text())
            return found
    finally:
        recordings.drop(tools, ranks, key)


def _step(reports: Mapping[int, Mapping[str, Any]]) -> int:
    return max(int(report["step"]) for report in reports.values())


def inconsistency_lines(found: Mapping[str, Any]) -> list[str]:
    """Say what was found."""
    counts = ", ".join(f"{count} {stage}" for stage, count in found["compared"].items())
    text = [f"step {found['step']}, {found['ranks']} ranks; compared: {counts}"]
    shown = [_place(data) for data in found["differences"][:10]]
    if not shown:
        text.append("no difference")
    else:
        more = len(found["differences"]) + found["left_out"] - len(shown)
        text += [f"first difference: {shown[0]}", *shown[1:]] + ([f"and {more} more"] if more else [])
    return text + _endings(found)


def race_lines(found: Mapping[str, Any]) -> list[str]:
    """Say what was found."""
    text = [f"step {found['step']}, {found['ranks']} ranks; {found['compared']} places of each run twice"]
    text += [str(raced.Race(**data)) for data in found["races"]] or ["no race"]
    return text + _endings(found)


def _place(data: Mapping[str, Any]) -> str:
    groups = tuple(map(tuple, data["groups"]))
    return str(places.DifferingPlace(data["stage"], data["name"], groups, tuple(data["suspects"])))


def _endings(found: Mapping[str, Any]) -> list[str]:
    notes = [f"not compared: {note}" for note in found["notes"]]
    return notes + [f"{number}. {text}" for number, text in enumerate(found["suggestions"], 1)]
