"""A plan: the layout to run on so many devices, what a step and a device's memory go to, and what lost.

Pure, and torch-free: `plan` answers "in which layout, and how fast" for a job and hardware by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.fast_path import settled
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.best_first import BestFirst, Choice, kind_of
from picotron_ray.planner.cost import StepCost, step_cost
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.hardware import Hardware
from picotron_ray.planner.memory import budget_bytes, memory_estimate, rank_memory
from picotron_ray.planner.memory_causes import memory_by_cause
from picotron_ray.planner.model_sizes import blocks_again, flops_per_token
from picotron_ray.planner.refusal import (
    most_looked_at,
    offloading_that_does,
    why_none,
    without_budget,
    workers_that_do,
)
from picotron_ray.planner.routes import AxisRoute, routes_of
from picotron_ray.planner.search import distinct, why_dearer
from picotron_ray.planner.words import counted

TABLE = 10


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One layout with its step.

    Fields:
        cost: seconds by cause.
        memory_bytes: estimate of the fullest rank.
    """

    layout: Layout
    cost: StepCost
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Purchase:
    """A little more of something, and the step that it buys."""

    what: str
    step_s: float
    layout: Layout


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Layouts for ``gpus`` devices, the one to run first.

    Fields:
        table: the best layouts, the one to run first.
        rejected: layouts that lost or do not fit, with the reason.
        by_rank: memory by cause of every pipeline rank, in bytes.
        purchases: what the next node and the next tenth of memory would buy in seconds; none under a goal
            that is not seconds.
        reason: why the layout to run comes first, under a goal that is not seconds.
        seconds: that the search took.
        costed: candidates whose cost was computed.
    """

    job: JobConfig
    hardware: Hardware
    gpus: int
    budget_bytes: float
    table: tuple[PlannedStep, ...]
    rejected: tuple[tuple[Layout, str], ...]
    by_rank: tuple[dict[str, float], ...]
    purchases: tuple[Purchase, ...]
    seconds: float
    costed: int
    reason: str = ""

    @property
    def best(self) -> PlannedStep:
        return self.table[0]

    def routes(self) -> list[AxisRoute]:
        """The link of each axis above degree 1."""
        hardware = self.hardware
        sizes = distinct(hardware.node_sizes(self.gpus))
        return routes_of(self.best.layout, hardware.profile, sizes, hardware.link)

    def tokens_per_s(self, step_s: float) -> float:
        data = self.job.data
        return data.global_batch * data.sequence_length / step_s

    def tokens_range(self) -> tuple[float, float] | None:
        """Tokens per second at the least and most of rates that clusters reach; None: they are measured."""
        least, most = self.hardware.reached
        best = self.tokens_per_s(self.best.cost.total_s)
        return None if least == most else (least * best, most * best)

    def mfu(self, step: PlannedStep) -> float:
        """Model FLOPs utilization: of all devices given, idle ones included."""
        flops = flops_per_token(self.job.model, self.job.data.sequence_length)
        return flops * self.tokens_per_s(step.cost.total_s) / (self.gpus * self.hardware.peak_flops)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, with the names that scripts rely on."""
        best = self.best
        return {
            "layout": best.layout.to_dict(),
            "name": str(best.layout),
            "gpus": self.gpus,
            "hardware": self.hardware.name,
            "step_s": best.cost.total_s,
            "tokens_per_s": self.tokens_per_s(best.cost.total_s),
            "tokens_per_s_range": self.tokens_range(),
            "mfu": self.mfu(best),
            "memory_bytes": [rank["total"] for rank in self.by_rank],
            "memory_budget_bytes": self.budget_bytes,
            "breakdown": {
                "step_s": {name.removesuffix("_s"): value for name, value in asdict(best.cost).items()},
                "memory_bytes": list(self.by_rank),
            },
            "routes": [route._asdict() for route in self.routes()],
            "best": [self._row(step) for step in self.table],
            "reason": self.reason,
            "rejected": [{"layout": str(layout), "reason": reason} for layout, reason in self.rejected],
            "buys": [
                {"what": one.what, "step_s": one.step_s, "layout": str(one.layout)} for one in self.purchases
            ],
            "seconds": self.seconds,
            "costed": self.costed,
        }

    def _row(self, step: PlannedStep) -> dict[str, Any]:
        return {
            "layout": str(step.layout),
            "gpus": step.layout.world_size,
            "step_s": step.cost.total_s,
            "tokens_per_s": self.tokens_per_s(step.cost.total_s),
            "mfu": self.mfu(step),
            "memory_bytes": step.memory_bytes,
        }


def plan(
    job: JobConfig,
    gpus: int,
    hardware: Hardware,
    *,
    keep: int = TABLE,
    buys: bool = True,
    clock: Callable[[], float] = lambda: 0.0,
) -> PlanReport:
    """Find the fastest layouts of a job on so many devices.

    Args:
        keep: layouts in the table.
        buys: also look what a node or a tenth of memory more would give.
        clock: tells seconds, for ``PlanReport.seconds``.

    Raises:
        ConfigError: no layout fits; the line says what would do.
    """
    job = settled(for_devices(job, gpus, hardware.device), hardware.device)
    hardware = hardware.of_devices(gpus)
    started = clock()
    budget = budget_bytes(job, hardware.profile.memory_bytes)
    search = _search(job, gpus, hardware, hardware.profile, keep)
    seconds = clock() - started
    if not search.found:
        raise ConfigError(f"{why_none(job, gpus, hardware.profile)}{_what_would_do(job, gpus, hardware)}")
    sizes = distinct(hardware.node_sizes(gpus))
    table = without_zero_twins(
        PlannedStep(layout, step_cost(job, layout, hardware.profile, sizes), _total(job, layout))
        for layout in without_idle_twins([layout for _, layout in search.found])
    )
    best = table[0]
    lost = [(step.layout, why_dearer(best.cost, step.cost)) for step in table[1:]]
    large = [
        (layout, f"needs {needs / 1e9:.3g} GB at least, of {budget / 1e9:.3g} GB")
        for layout, needs in search.too_large
    ]
    return PlanReport(
        job=job,
        hardware=hardware,
        gpus=gpus,
        budget_bytes=budget,
        table=table,
        rejected=(*lost, *large),
        by_rank=tuple(memory_by_cause(job, best.layout, rank) for rank in range(best.layout.pp)),
        purchases=tuple(_purchases(job, gpus, hardware, best.cost.total_s)) if buys else (),
        seconds=seconds,
        costed=search.costed,
    )


def without_idle_twins(layouts: Iterable[Layout]) -> list[Layout]:
    """The layouts, in their order, without those that differ from an earlier one in replicas alone.

    Besides those, in micro-batch and recomputation: each has those that are best for it.
    """
    first: dict[Layout, Layout] = {}
    for one in layouts:
        first.setdefault(replace(kind_of(one), dp=1, replicate=1), one)
    return list(first.values())


def without_zero_twins(steps: Iterable[PlannedStep]) -> tuple[PlannedStep, ...]:
    """The steps, in their order, without those that differ in their ZeRO stage alone and are as good."""
    first: dict[tuple[Layout, str, str], PlannedStep] = {}
    for step in steps:
        alike = replace(step.layout, zero=1)
        first.setdefault((alike, f"{step.cost.total_s:.9g}", f"{step.memory_bytes:.9g}"), step)
    return tuple(first.values())


def for_devices(job: JobConfig, gpus: int, device: str = "cuda") -> JobConfig:
    """The job on so many devices instead of its worker counts, in a definite precision."""
    least = min(job.cluster.min_workers, gpus)
    cluster = job.cluster.model_copy(update={"device": device, "max_workers": gpus, "min_workers": least})
    automatic = "bf16" if device == "cuda" else "fp32"
    precision = automatic if job.precision == "auto" else job.precision
    return job.model_copy(update={"cluster": cluster, "precision": precision})


def _search(
    job: JobConfig,
    gpus: int,
    hardware: Hardware,
    profile: DeviceProfile,
    keep: int,
    limit_s: float = math.inf,
    above: int = 0,
) -> BestFirst:
    budget = budget_bytes(job, profile.memory_bytes)
    search = BestFirst(job, profile, distinct(hardware.node_sizes(gpus)), budget, keep, limit_s)
    search.run(gpus, above)
    return search


def searched(job: JobConfig, hardware: Hardware, gpus: int) -> Choice | None:
    """The fastest layout of a job with definite precision, and its seconds per step; None where none fits."""
    hardware = hardware.of_devices(gpus)
    job = settled(job, hardware.device)
    found = _search(job, gpus, hardware, hardware.profile, 1).found
    return found[0] if found else None


def _total(job: JobConfig, layout: Layout) -> float:
    return memory_estimate(job, layout).total_bytes


def _purchases(job: JobConfig, gpus: int, hardware: Hardware, step_s: float) -> list[Purchase]:
    """Steps with one node more, and with a tenth more memory; left out where they would be no shorter.

    What runs on the devices at hand alone is not looked at again on more of them.
    """
    more = gpus + (hardware.node_size if gpus % hardware.node_size == 0 else 1)
    roomier = replace(hardware.profile, memory_bytes=1.1 * hardware.profile.memory_bytes)
    gigabytes = 0.1 * hardware.device_bytes / 1e9
    one, added = "GPU" if hardware.device == "cuda" else "worker", more - gpus
    machine = "" if not hardware.cores or gpus % hardware.node_size else " on one more such machine"
    bought = []
    for what, count, profile, above in (
        (f"{counted(added, f'more {one}')}{machine}", more, hardware.profile, gpus),
        (f"{gigabytes:.3g} GB more a {one}", gpus, roomier, 0),
    ):
        found = _search(job, count, hardware, profile, 1, step_s, above).found
        if found:
            bought.append(Purchase(what, *found[0]))
    return bought


def _what_would_do(job: JobConfig, gpus: int, hardware: Hardware) -> str:
    """Name the fewest devices that would do, of those looked at."""
    enough = workers_that_do(job, gpus, hardware.profile, hardware.node_size)
    if enough is None and without_budget(job, hardware.profile) is not None:
        return "; with that key no number of workers that was looked at would do"
    if enough is None:
        most = most_looked_at(gpus)
        none = f"no number up to {hardware.said(most)} would do: " if gpus < most else ""
        text = f"; {none}take larger ones, or a smaller model"
    elif hardware.cores:
        machines = counted(-(-enough // hardware.node_size), "machine")
        text = f"; {enough} workers on {machines} such as {hardware.name} would do"
    else:
        text = f"; {hardware.said(enough)} would do"
    keys = offloading_that_does(job, gpus, hardware.profile) if hardware.device == "cuda" else ""
    if not keys:
        return text
    return f"; {keys} would do on {gpus}" if enough is None else f"{text}; so would {keys} on {gpus}"


def fullest_rank(job: JobConfig, layout: Layout) -> int:
    """The pipeline rank whose memory estimate is largest."""
    return max(
        range(layout.pp),
        key=lambda rank: rank_memory(job, layout, rank, blocks_again(job, layout, rank)).total_bytes,
    )
