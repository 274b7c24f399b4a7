"""Statistics of the benchmarks: events to figures, medians and ratios. Pure.

A kill has five times, the same for every framework:

- **detect**: signal → first sign noticed by the process that acts on it (our coordinator, Ray Train's
  controller, a torchft survivor).
- **rebuild**: detection → process groups formed again and the model built, on the slowest member.
- **restore**: model built → training state loaded, on the slowest member.
- **total without replay**: signal → first optimizer step finished by the new membership, whatever its
  number. What it has over the sum of the three is that step itself.
- **total**: signal → first optimizer step finished by the new membership whose number was never finished
  before. A framework that went back to a checkpoint computes the steps in between once more.

A step that the old membership still finishes after the signal (the victim had done its share) counts as
finished before it. Lost steps are those computed again. A sample is lost if it belongs to one of the steps
around the kill (`WINDOW_STEPS` to both sides) and no update that the weights carry in the end contains it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from picotron_ray.bench.common.event_log import Event

WINDOW_STEPS = 20
Rows = tuple[int, int]
"""Half-open range of global sample numbers."""


@dataclass(frozen=True, slots=True)
class KillFigures:
    """Figures of a kill; see the module. ``step``: the highest step finished before it."""

    detect_s: float
    rebuild_s: float
    restore_s: float
    total_s: float
    total_without_replay_s: float
    lost_steps: int
    lost_samples: int
    step: int


FIGURES = tuple(name for name in KillFigures.__dataclass_fields__ if name != "step")


def kill_from_events(events: Sequence[Event], killed_s: float, global_batch: int) -> KillFigures:
    """Compute a kill's figures from the events of a peer, which must reach past its first new step.

    Events are those of one framework in order of time; ``era`` names a membership:
    ``fed`` (era, step, rows) before its gradients are exchanged, ``step`` (era, step) when its update is
    done, ``detected``, ``built`` (era), ``restored`` (era).
    """
    old = {event["era"] for event in events if "era" in event and event["t"] <= killed_s}
    done = [event for event in events if event["what"] == "step"]
    horizon = max(event["step"] for event in done if event["era"] in old)
    new = [event for event in done if event["era"] not in old]
    first = new[0]
    beyond = next(event for event in new if event["step"] > horizon)
    detected = _first_sign(events, first["era"], killed_s)
    built, restored = (_slowest(events, what, first) for what in ("built", "restored"))
    return KillFigures(
        detect_s=detected - killed_s,
        rebuild_s=built - detected,
        restore_s=restored - built,
        total_s=beyond["t"] - killed_s,
        total_without_replay_s=first["t"] - killed_s,
        lost_steps=max(0, horizon + 1 - first["step"]),
        lost_samples=lost_samples(rows_of_steps(events), horizon, global_batch),
        step=horizon,
    )


def _first_sign(events: Sequence[Event], era: str, killed_s: float) -> float:
    """Find the time of the first sign; a group formed anew is one too, where no exchange failed before."""
    signs = (e for e in events if e["what"] == "detected" or (e["what"] == "built" and e["era"] == era))
    return float(next(event["t"] for event in signs if event["t"] > killed_s))


def _slowest(events: Sequence[Event], what: str, first: Event) -> float:
    """Find the time at which the last member of the first new step's membership came through ``what``."""
    times = [
        e["t"] for e in events if e["what"] == what and e["era"] == first["era"] and e["t"] <= first["t"]
    ]
    return float(max(times))


def rows_of_steps(events: Iterable[Event]) -> dict[int, list[Rows]]:
    """List the rows of each finished step's update; a step that was finished twice has the last one's."""
    updates = {event["step"]: event["era"] for event in events if event["what"] == "step"}
    rows: dict[int, list[Rows]] = {step: [] for step in updates}
    for event in events:
        if event["what"] == "fed" and updates.get(event["step"]) == event["era"]:
            rows[event["step"]].append((event["rows"][0], event["rows"][1]))
    return rows


def lost_samples(rows: Mapping[int, Sequence[Rows]], horizon: int, global_batch: int) -> int:
    """Count samples of the steps around ``horizon`` that no update contains."""
    lost = 0
    for step in range(max(1, horizon + 1 - WINDOW_STEPS), horizon + WINDOW_STEPS + 1):
        base = (step - 1) * global_batch
        fed = {sample for first, last in rows.get(step, ()) for sample in range(first, last)}
        lost += len(set(range(base, base + global_batch)) - fed)
    return lost


def summary(kills: Sequence[KillFigures], step_s: float) -> dict[str, Any]:
    """Sum up: medians of all figures, quartiles of the total, the time of an undisturbed step, every run."""
    medians = {name: statistics.median(getattr(kill, name) for kill in kills) for name in FIGURES}
    low, _, high = quartiles([kill.total_s for kill in kills])
    return {
        **medians,
        "total_quartiles_s": [low, high],
        "step_s": step_s,
        "runs": [asdict(kill) for kill in kills],
    }


def recovery_ratios(ours: Mapping[str, Any], ray_train: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Ratio of Ray Train's medians to ours; None where Ray Train was left out."""
    return {
        f"ratio_{name.removesuffix('_s')}": None if ray_train is None else ray_train[name] / ours[name]
        for name in ("total_s", "total_without_replay_s")
    }


def step_time(steps: Sequence[tuple[float, int]]) -> float:
    """Mean seconds per step between the first and the last of (time in seconds, step)."""
    (first_s, first), (last_s, last) = steps[0], steps[-1]
    return (last_s - first_s) / (last - first)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile (linear between values); of one value: that value thrice."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
