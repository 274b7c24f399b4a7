"""``profile``: steps of a run that goes on, as one trace of several ranks, and what they wait for."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from picotron_ray.coordinator.messages import RunFigures
from picotron_ray.coordinator.policies.bottleneck import bottlenecks
from picotron_ray.debug.clock_offsets import clock_offsets
from picotron_ray.debug.merged_trace import RankTrace, merged
from picotron_ray.debug.profile_report import device_shares, longest, mean_row
from picotron_ray.debug.rank_record import named
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.driver import recordings
from picotron_ray.runtime.driver.measured_gains import NOT_MEASURED, Gains, advice
from picotron_ray.runtime.driver.tool_orders import Answers, RunTools

MOST_RANKS = 16
"""Ranks of one profile, whose traces are merged in this process's memory."""
MERGED, SUMMARY = "trace.json.gz", "summary.json"


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Options of the command line; see its help."""

    wait: int
    warmup: int
    active: int
    ranks: str
    to: Path
    shapes: bool
    stacks: bool
    measured: Path | None = None


def profile(run: str, options: ProfileOptions, say: recordings.Say) -> dict[str, Any]:
    """Profile a run; returns the summary, which is also written beside the traces.

    Raises:
        ConfigError: the run, its state, a rank, the window or a folder does not allow it.
    """
    recordings.check_window(options.wait, options.warmup, options.active)
    there = next((file for name in (MERGED, SUMMARY) if os.path.exists(file := options.to / name)), None)
    if there is not None:
        raise ConfigError(f"--to: {there} is there already, of an earlier profile; name another folder")
    with recordings.results_in("--to", options.to) as folder:
        return _profiled(run, options, folder, say)


def _profiled(run: str, options: ProfileOptions, folder: Path, say: recordings.Say) -> dict[str, Any]:
    gains = Gains.read(options.measured)
    tools = RunTools(run)
    ranks = tools.ranks(options.ranks, representative(tools.spec.layout))
    if len(ranks) > MOST_RANKS:
        raise ConfigError(f"--ranks: saw {len(ranks)}, expected at most {MOST_RANKS}; name those of interest")
    order = {
        "kind": "profile",
        **{name: getattr(options, name) for name in ("wait", "warmup", "active", "shapes", "stacks")},
    }
    key, answers = recordings.record(tools, ranks, order, say)
    try:
        files = _fetched(tools, answers, folder)
    finally:
        recordings.drop(tools, ranks, key)
    try:
        found = _summary(tools, answers, files, folder)
        found["suggestions"] = advice(found["bottlenecks"], gains)
        (folder / SUMMARY).write_text(json.dumps(found, indent=1))
    except OSError as error:
        raise ConfigError(f"--to: {folder} cannot be written: {error.strerror or error}") from error
    return found


def representative(layout: Layout) -> tuple[int, ...]:
    """Ranks that stand for all: the first of each pipeline stage, of many those spread over the pipeline.

    >>> representative(Layout(dp=2, pp=2)), len(representative(Layout(pp=64)))
    ((0, 2), 8)
    """
    most = MOST_RANKS // 2
    per_stage = layout.world_size // layout.pp
    stages = range(layout.pp)
    if layout.pp > most:
        stages = sorted({round(place * (layout.pp - 1) / (most - 1)) for place in range(most)})  # type: ignore[assignment]
    return tuple(stage * per_stage for stage in stages)


def _fetched(tools: RunTools, answers: Answers, folder: Path) -> dict[int, Path]:
    """Traces by rank, where the TensorBoard plugin finds them."""
    target = recordings.make_folder("--to", folder / "tensorboard")
    stamp = time.time_ns() // 1_000_000
    files = {rank: target / f"{tools.run}_rank{rank}.{stamp}.pt.trace.json.gz" for rank in answers}
    for rank, file in files.items():
        recordings.fetch(tools, rank, file)
    return files


def _summary(tools: RunTools, answers: Answers, files: Mapping[int, Path], folder: Path) -> dict[str, Any]:
    offsets = clock_offsets({rank: answer["rounds"] for rank, answer in answers.items()})
    ranks: dict[str, Any] = {}
    traces: list[RankTrace] = []
    for rank, file in files.items():
        with gzip.open(file) as source:
            trace = json.load(source)
        member = tools.spec.members[rank]
        title = f"rank {rank} on node {member.node[:8]}"
        traces.append(RankTrace(rank, title, trace, offsets[rank]))
        events, answer = trace.get("traceEvents", ()), answers[rank]
        ranks[str(rank)] = {
            "worker": member.worker,
            "node": member.node,
            "file": str(file),
            "clock_ahead_s": offsets[rank].ahead_ns / 1e9,
            "clock_within_s": offsets[rank].within_ns / 1e9,
            "steps": answer["steps"],
            "events": answer["events"],
            **mean_row(answer.get("rows", ())),
            "device": device_shares(events),
            "longest": longest(events),
            "memory_by_class": answer["memory_by_class"],
        }
    about = {"run": tools.run, "generation": str(tools.spec.id), "layout": str(tools.spec.layout)}
    exact = max((one["clock_within_s"] for one in ranks.values()), default=0.0)
    with gzip.open(folder / MERGED, "wt", 3) as whole:
        json.dump(merged(traces, {**about, "clocks_within_s": exact}), whole)
    figures, judged_by = _figures(tools, list(ranks.values()))
    found = bottlenecks(figures) if figures is not None else []
    return {
        **about,
        "trace": str(folder / MERGED),
        "tensorboard": str(folder / "tensorboard"),
        "steps": next(iter(ranks.values()))["steps"],
        "clocks_within_s": exact,
        "ranks": ranks,
        "bottlenecks_from": judged_by,
        "bottlenecks": [{"bottleneck": one.bottleneck, "text": one.text} for one in found],
    }


def _figures(tools: RunTools, ranks: Sequence[Mapping[str, Any]]) -> tuple[RunFigures | None, str]:
    """Figures to judge by: the run's own telemetry of undisturbed steps, else of the recorded ones."""
    told = tools.status.get("telemetry")
    if told and told.get("generation") == str(tools.spec.id):
        memory = told["memory"]
        return RunFigures(
            steps=told["steps"],
            last_step=told["last_step"],
            step_s=told["step_s"]["mean"],
            phase_s={phase: window["mean"] for phase, window in told["phase_s"].items()},
            replica_row_s=tuple(told["replica_row_s"]),
            replica_rows=tuple(told["replica_rows"]),
            stage_s=tuple(told["stage_s"]),
            peak_bytes=memory["peak_bytes"],
            device_bytes=memory["device_bytes"],
            utilization=told["utilization"],
            ranks=told["ranks"],
            waits_seen=told["waits_seen"],
        ), f"telemetry of {told['ranks']} ranks over {told['steps']} undisturbed steps"
    rows = [one for one in ranks if one.get("phase_s")]
    if not rows:
        return None, "nothing: telemetry is off (telemetry.interval_s)"
    fullest = max(rows, key=lambda one: one["peak_bytes"] / max(1, one["device_bytes"]))
    phases = rows[0]["phase_s"]
    return RunFigures(
        steps=len(rows[0]["steps"]),
        last_step=max(rows[0]["steps"]),
        step_s=mean(one["step_s"] for one in rows),
        phase_s={phase: mean(one["phase_s"][phase] for one in rows) for phase in phases},
        peak_bytes=fullest["peak_bytes"],
        device_bytes=fullest["device_bytes"],
        ranks=len(rows),
        waits_seen=all(one["waits_seen"] for one in rows),
    ), f"the recorded steps of {len(rows)} ranks, which the profiler slows down"


def lines(found: Mapping[str, Any]) -> list[str]:
    """Say a summary."""
    first, last = found["steps"][0], found["steps"][-1]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    text = [
        f"trace of {named([int(rank) for rank in found['ranks']])}, {steps}:"
        f" {found['trace']} (open it at ui.perfetto.dev, or in chrome://tracing)"
    ]
    if len(found["ranks"]) > 1:
        text.append(f"clocks of the ranks agree within {1e6 * found['clocks_within_s']:.0f} microseconds")
    text.append(f"TensorBoard: {found['tensorboard']}")
    for rank, one in found["ranks"].items():
        shares = ", ".join(f"{part} {100 * share:.0f} %" for part, share in one.get("share", {}).items())
        text.append(
            f"rank {rank}: " + (f"{one['step_s']:.4g} s a step: {shares}" if shares else "no telemetry")
        )
        if one["device"]:
            text.append(
                "  device: "
                + ", ".join(f"{part} {100 * share:.0f} %" for part, share in one["device"].items())
            )
        if one["memory_by_class"]:
            sizes = one["memory_by_class"].items()
            text.append("  memory: " + ", ".join(f"{kind} {size / 1e6:,.1f} MB" for kind, size in sizes))
    text.append(f"bottlenecks, by {found['bottlenecks_from']}:" + ("" if found["bottlenecks"] else " none"))
    text += [f"  {one['bottleneck']}: {one['text']}" for one in found["bottlenecks"]]
    return [*text, *_suggestion_lines(found["suggestions"])]


def _suggestion_lines(suggestions: Sequence[Mapping[str, Any]]) -> list[str]:
    measured = [f"  try {one['change']}: {one['gain']}" for one in suggestions if one["ratio"] is not None]
    others = ", ".join(one["change"] for one in suggestions if one["ratio"] is None)
    return [*measured, *([f"  try {others} ({NOT_MEASURED})"] if others else [])]
