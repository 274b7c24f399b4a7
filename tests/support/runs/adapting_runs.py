"""Small real runs that adapt: started, disturbed, and measured by the times in their ledger."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.runtime.ray_cluster.names import event_folder
from tests.support.runs.ray_runs import Watched, check_ledger, ledger, start
from tests.support.runs.replays import check_replay

LOOP = (
    "precision=fp64",
    "telemetry.interval_s=1",
    "adapt.interval_s=1",
    "adapt.settle_steps=10",
    "adapt.budget=20",
    "cluster.start_timeout_s=200",
    "checkpoint.interval_steps=1000",
    "evaluate.interval_steps=1000",
)
"""A loop that looks each second, and nothing else that takes time now and then."""


def sleeps(*row_s: float) -> list[dict[str, Any]]:
    """Faults by which each rank sleeps so long per row, from the first step on."""
    return [slow(rank, seconds) for rank, seconds in enumerate(row_s)]


def slow(rank: int, row_s: float, step: int = 1) -> dict[str, Any]:
    return {"fault": "slow", "target": f"worker:{rank}", "step": step, "row_s": row_s}


@dataclass(frozen=True)
class Ended:
    """A run that ended.

    Fields:
        at_s: when each step ended, on the wall clock, from the first step on.
        told: its alerts of kind ``adapt``.
        telemetry: newest figures of its status, where it was watched.
    """

    summary: dict[str, Any]
    losses: list[float]
    at_s: list[float]
    told: list[dict[str, Any]]
    telemetry: dict[str, Any]

    def step_s(self, first: int, last: int) -> float:
        """Seconds per step of the steps after ``first`` up to ``last``."""
        return (self.at_s[last - 1] - self.at_s[first - 1]) / (last - first)

    @property
    def train_s(self) -> float:
        """From the end of the first step to that of the last one."""
        return self.at_s[-1] - self.at_s[0]

    @property
    def decisions(self) -> list[tuple[str, str]]:
        """Action and kind of each change."""
        data = [event["data"] for event in self.told]
        return [(one["action"], one["change"]) for one in data if one["action"] != "none"]

    @property
    def layouts(self) -> list[str]:
        return [generation["layout"] for generation in self.summary["generations"]]

    def last_start(self) -> int:
        """Step from which the last generation went on."""
        return int(self.summary["generations"][-1]["start_step"])


def adapting_job(
    storage: Path, name: str, *overrides: str, chaos: list[dict[str, Any]] | None = None
) -> JobConfig:
    """A small job whose loop looks each second."""
    faults = () if chaos is None else (f"chaos={json.dumps(chaos)}",)
    return load_job("tiny", [f"name={name}", f"storage.url={storage}", *LOOP, *overrides, *faults])


def adapting(
    storage: Path,
    name: str,
    *overrides: str,
    chaos: list[dict[str, Any]] | None = None,
    watch: Callable[[Watched], None] = lambda watched: None,
) -> Ended:
    """Run a small job to its end; its ledger must be whole and its event log replay."""
    job = adapting_job(storage, name, *overrides, chaos=chaos)
    watched = start(job)
    watch(watched)
    return ended(watched)


def ended(watched: Watched) -> Ended:
    """Follow a run to its end."""
    job, name = watched.job, watched.job.name
    summary = watched.finish(600)
    assert summary["status"] == "finished", f"{summary['detail']}\n{watched.log()}"
    print(f"\n{name}:\n{decision_log(watched)}")
    check_ledger(job)
    check_replay(event_folder(job.name))
    lines = ledger(job)
    told = [event for event in watched.events if event["kind"] == "adapt"]
    found = watched.status.get("telemetry") or {}
    return Ended(summary, [line["loss"] for line in lines], [line["at_s"] for line in lines], told, found)


def decided(action: str) -> Callable[[dict[str, Any]], bool]:
    """Condition on a status: such a decision is among its events."""
    return lambda status: any(
        event["kind"] == "adapt" and event["data"]["action"] == action for event in status["events"]
    )


def decision_log(watched: Watched) -> str:
    """What was decided and told of it, a line each."""
    kinds = ("adapt", "generation", "recovery", "calibration")
    return "\n".join(
        f"  {event['t']:.1f} {event['kind']}: {event['text']}"
        for event in watched.events
        if event["kind"] in kinds
    )
