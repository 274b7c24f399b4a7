"""``debug NAME break`` and its siblings: breakpoints of a run that goes on, and looks at its values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from picotron_ray.debug.breakpoints import Breakpoint
from picotron_ray.debug.tensor_figures import histogram_text, whole_tensors
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import recordings
from picotron_ray.runtime.driver.tool_orders import RunTools

MOST_INSPECTED = 64
"""Ranks whose whole answers are put together for a look at all of the model, where it names no tensor."""
Change = Literal["enable", "disable", "rm"]


def add(run: str, place: str, condition: str, ranks: str, timeout_s: float) -> dict[str, Any]:
    """Set a breakpoint on ranks of a run; returns it.

    Raises:
        ConfigError: the run, the place, the condition or a rank does not allow it; nothing was set.
    """
    Breakpoint(1, place, condition, timeout_s=timeout_s).check()
    tools = RunTools(run)
    chosen = tools.ranks(ranks, range(tools.world_size))
    known = listed_on(tools)["breaks"]
    number = 1 + max((one["number"] for one in known), default=0)
    named = chosen if len(chosen) < tools.world_size else ()
    found = Breakpoint(number, place, condition, named, timeout_s).plain()
    order = {"what": "break", "break": found}
    tools.all_of(chosen[:1], order)  # one alone first: what it refuses, all would
    try:
        tools.all_of(chosen[1:], order)
    except ConfigError:
        tools.to_all(chosen, {"what": "rm", "number": number})
        raise
    return found


def listed(run: str) -> dict[str, Any]:
    """Breakpoints of a run, and what holds it now."""
    return listed_on(RunTools(run))


def listed_on(tools: RunTools) -> dict[str, Any]:
    """As `listed`, of tools that are at hand.

    Raises:
        ConfigError: no rank answers.
    """
    answers = tools.to_all(range(tools.world_size), {"what": "breaks"})
    heard = [answer for answer in answers.values() if "refused" not in answer]
    if not heard:
        raise ConfigError(next(iter(answers.values()))["refused"])
    found: dict[int, dict[str, Any]] = {}
    for answer in heard:
        for one in answer["breaks"]:
            hits = found.get(one["number"], {"hits": 0})["hits"]
            found[one["number"]] = {**one, "hits": hits + one["hits"]}
    return {
        "breaks": [found[number] for number in sorted(found)],
        "held_step": max(answer["held_step"] for answer in heard),
        "hits": [answer["hit"] for answer in heard if answer["hit"]],
    }


def change(run: str, number: int, what: Change) -> None:
    """Enable, disable or remove a breakpoint.

    Raises:
        ConfigError: there is none of that number.
    """
    tools = RunTools(run)
    found = tools.to_all(range(tools.world_size), {"what": what, "number": number})
    if not any(answer.get("known") for answer in found.values()):
        known = ", ".join(str(one["number"]) for one in listed_on(tools)["breaks"]) or "none"
        raise ConfigError(f"{what}: saw breakpoint {number}, expected one of the run's: {known}")


def go_on(run: str) -> tuple[int, list[int]]:
    """Have a run go on; returns the step after which it was held, and the breakpoints that may hold it again.

    Raises:
        ConfigError: no breakpoint holds it.
    """
    tools = RunTools(run)
    held = listed_on(tools)
    found = tools.to_all(range(tools.world_size), {"what": "continue"})
    if not any(answer.get("went_on") for answer in found.values()):
        raise ConfigError(f"continue: no breakpoint holds run {run}; it trains")
    return int(held["held_step"]), [one["number"] for one in held["breaks"] if one["enabled"]]


def inspect(run: str, scope: str, name: str, ranks: str, whole: bool) -> dict[str, Any]:
    """Look at values while a breakpoint holds the run.

    Args:
        whole: of the model, add up what ranks hold; else each rank's part is told.

    Raises:
        ConfigError: nothing holds the run, or there is no such value.
    """
    if scope not in ("local", "global", "model"):
        raise ConfigError(f"inspect: saw {scope!r}, expected local, global or model")
    tools = RunTools(run)
    hit_ranks = [hit["rank"] for hit in listed_on(tools)["hits"]]
    everyone = range(tools.world_size) if scope == "model" and whole else hit_ranks[:1] or [0]
    chosen = tools.ranks(ranks, list(everyone))
    if scope == "model" and not name and len(chosen) > MOST_INSPECTED:
        raise ConfigError(
            f"inspect model: saw {len(chosen)} ranks and no name, expected the name of a tensor or a layer,"
            f" or --ranks with at most {MOST_INSPECTED}"
        )
    answers = tools.all_of(chosen, {"what": "inspect", "scope": scope, "name": name})
    if scope != "model":
        return {"ranks": {str(rank): answer["values"] for rank, answer in answers.items()}}
    if not any(answer["tensors"] for answer in answers.values()):
        near = next((answer["near"][0] for answer in answers.values() if answer["near"]), "none")
        begin = dict.fromkeys(word for answer in answers.values() for word in answer.get("begin", ()))
        raise ConfigError(
            f"inspect model: saw {name!r}; nearest: {near}; names begin with {', '.join(begin)}"
            " (a moment's is MOMENT/NAME)"
        )
    if whole:
        return {"tensors": whole_tensors(answer["tensors"] for answer in answers.values())}
    return {"ranks": {str(rank): answer["tensors"] for rank, answer in answers.items()}}


def trace(run: str, kind: str, steps: int, ranks: str, to: Path, say: recordings.Say) -> list[dict[str, Any]]:
    """Trace calls, lines or memory of some steps; returns a file and what it holds for each rank.

    Raises:
        ConfigError: the run, its state, the kind, a rank or the folder does not allow it.
    """
    if kind not in ("call", "line", "memory"):
        raise ConfigError(f"trace: saw {kind!r}, expected call, line or memory")
    recordings.check_window(0, 0, steps, recorded="steps")
    with recordings.results_in("--to", to) as folder:
        tools = RunTools(run)
        chosen = tools.ranks(ranks, (0,))
        order = {"kind": kind, "wait": 0, "warmup": 0, "active": steps}
        key, answers = recordings.record(tools, chosen, order, say)
        try:
            recordings.make_folder("--to", folder)
            files = {rank: folder / f"{kind}_rank{rank}.json.gz" for rank in answers}
            for rank, file in files.items():
                recordings.fetch(tools, rank, file)
        finally:
            recordings.drop(tools, chosen, key)
    parts = ("steps", "events", "left_out")
    return [
        {"rank": rank, "file": str(files[rank]), **{part: answer[part] for part in parts}}
        for rank, answer in answers.items()
    ]


def break_lines(found: Mapping[str, Any]) -> list[str]:
    """Say breakpoints, and what holds the run."""
    text = []
    for data in found["breaks"]:
        off = "" if data["enabled"] else ", disabled"
        text.append(f"{Breakpoint.read(data)}: {data['hits']} hits{off}")
    for hit in found["hits"]:
        where = f" in {hit['function']}" if "function" in hit else ""
        text.append(
            f"breakpoint {hit['break']} was hit by rank {hit['rank']}{where} in step {hit['step']}: all ranks"
            f" stay after step {found['held_step']}"
        )
    return text or ["no breakpoints"]


def value_lines(found: Mapping[str, Any]) -> list[str]:
    """Say values."""
    if "tensors" in found:
        return [_tensor_line(name, figures) for name, figures in found["tensors"].items()]
    text: list[str] = []
    for rank, values in found["ranks"].items():
        pairs = values.items() if isinstance(values, Mapping) else _boxes(values)
        for name, value in pairs:
            shown = _tensor_line(name, value) if isinstance(value, Mapping) else f"{name} = {value}"
            text.append(f"rank {rank}: {shown}")
    return text


def _boxes(tensors: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(f"{one['name']} from {json.dumps(one['offset'])}", one) for one in tensors]


def _tensor_line(name: str, one: Mapping[str, Any]) -> str:
    if one["min"] is None:
        return f"{name}: {one['numel']} elements, {one['nonfinite']} not finite"
    bad = f", {one['nonfinite']} not finite" if one["nonfinite"] else ""
    extremes = f"norm {one['norm']:.6g}, from {one['min']:.6g} to {one['max']:.6g}"
    return f"{name}: {one['numel']} elements, {extremes}{bad}; {histogram_text(one['histogram'])}"
