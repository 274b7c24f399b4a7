"""Goals of a plan: the fastest layout, the leanest, the fewest or cheapest devices for a deadline.

A search for the fastest layout stands behind each: more devices never make it slower, since they may idle,
so the fewest that meet a deadline are found by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.time_span import seconds_of
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.after_loss import after_loss_s, devices_left, said_after
from picotron_ray.planner.cost import StepCost, step_cost
from picotron_ray.planner.hardware import Hardware
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.memory_causes import memory_by_cause
from picotron_ray.planner.plan import (
    TABLE,
    PlannedStep,
    PlanReport,
    plan,
    without_idle_twins,
    without_zero_twins,
)
from picotron_ray.planner.refusal import lean_layouts
from picotron_ray.planner.search import distinct
from picotron_ray.planner.words import said_bytes

GoalName = Literal["throughput", "memory", "fewest", "cheapest", "robust", "balanced"]
CANDIDATES = 40
"""Fastest layouts of different kinds among which the most robust or a balanced one is taken."""
RECOVERY_S = 120.0
"""Seconds that an interruption costs at size: detection, re-meshing, loading; the run's own are measured."""
WEIGHTS = {"compute": 0.4, "communication": 0.3, "memory": 0.3}
"""Shares of the balanced goal, each part relative to the largest among the candidates."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Aim of a plan.

    Fields:
        tokens: of the whole run; 0: not said.
        deadline_s: seconds that the run may take; infinite: any.
        price: of one device and hour; 0: not said.
        interruptions: of one device, per hour.
        losing: nodes whose loss a robust layout is judged by.
    """

    name: GoalName = "throughput"
    tokens: float = 0.0
    deadline_s: float = math.inf
    price: float = 0.0
    interruptions: float = 0.0
    losing: int = 1


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """A whole run on the plan's devices: hours with its interruptions, and the price of all devices."""

    hours: float
    price: float


def deadline_of(text: str) -> float:
    """Seconds of a time above 0 such as ``36h``, ``90m`` or ``3d``. Raises ConfigError for anything else."""
    seconds = seconds_of(text)
    if not seconds:
        raise ConfigError(f"--deadline: saw {text}, expected a time above 0 such as 36h, 90m or 3d")
    return seconds


def tokens_of(text: str | None) -> float | None:
    """Tokens of a number such as ``2e12``; None for none. Raises ConfigError for anything else.

    >>> tokens_of("2e12")
    2000000000000.0
    """
    try:
        return None if text is None else float(text)
    except ValueError:
        raise ConfigError(f"--tokens: saw {text}, expected a number above 0, such as 2e12") from None


def price_of(text: str) -> tuple[float, float]:
    """Price and interruptions per device and hour, of ``gpu-hour=2.5,interruptions=0.01``.

    >>> price_of("gpu-hour=2.5")
    (2.5, 0.0)

    Raises ConfigError for anything else.
    """
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    expected = "expected gpu-hour=PRICE, and for spot devices ,interruptions=RATE per device and hour"
    try:
        values = {name: float(value) for name, value in parts.items()}
    except ValueError:
        raise ConfigError(f"--price: saw {text}, {expected}") from None
    known = {"gpu-hour", "interruptions"}
    if values.keys() - known or "gpu-hour" not in values or not all(
        math.isfinite(value) and value >= 0 for value in values.values()
    ) or not values["gpu-hour"]:  # fmt: skip
        raise ConfigError(f"--price: saw {text}, {expected}")
    return values["gpu-hour"], values.get("interruptions", 0.0)


def goal_of(
    name: str, tokens: float | None, deadline: str | None, price: str | None, losing: int | None
) -> Goal:
    """The goal of a command line.

    Raises ConfigError where its parts contradict each other, or one is missing.
    """
    if name not in get_args(GoalName):
        raise ConfigError(f"--goal: saw {name}, expected one of {', '.join(get_args(GoalName))}")
    if tokens is not None and not (math.isfinite(tokens) and tokens > 0):
        raise ConfigError(f"--tokens: saw {tokens}, expected a number above 0, such as 2e12")
    if (deadline or price) and not tokens:
        asked = "--deadline" if deadline else "--price"
        raise ConfigError(f"{asked}: saw no --tokens, expected those of the run")
    if name == "fewest" and not deadline:
        raise ConfigError("--goal fewest: saw no --deadline, expected the time that the run may take")
    if name == "cheapest" and not price:
        raise ConfigError("--goal cheapest: saw no --price, expected gpu-hour=PRICE")
    if losing is not None and name != "robust":
        raise ConfigError(f"--losing: saw it with --goal {name}, expected --goal robust; drop one of them")
    per_hour, interruptions = price_of(price) if price else (0.0, 0.0)
    return Goal(
        name,  # type: ignore[arg-type]
        tokens or 0.0,
        deadline_of(deadline) if deadline else math.inf,
        per_hour,
        interruptions,
        1 if losing is None else losing,
    )


def run_estimate(report: PlanReport, goal: Goal) -> RunEstimate | None:
    """Hours and price of the whole run; None where its tokens are not said."""
    if not goal.tokens:
        return None
    seconds = run_seconds(report, goal)
    return RunEstimate(seconds / 3600, goal.price * report.gpus * seconds / 3600)


def run_seconds(report: PlanReport, goal: Goal) -> float:
    """Seconds of the whole run: its steps, and what its interruptions cost (half a step is lost each).

    They come all the while, also as one is recovered from. So a share of each second is lost; infinite where
    it is all.
    """
    step_s = report.best.cost.total_s
    lost = goal.interruptions * report.gpus / 3600 * _interruption_s(report)
    return goal.tokens / report.tokens_per_s(step_s) / (1 - lost) if lost < 1 else math.inf


def _interruption_s(report: PlanReport) -> float:
    return RECOVERY_S + report.best.cost.total_s / 2


def said_hours(hours: float) -> str:
    """A run's time in words.

    >>> said_hours(36.25), said_hours(2480.0)
    ('36.2 h', '2,480.0 h (103 days)')
    """
    return f"{hours:,.1f} h" + (f" ({hours / 24:,.0f} days)" if hours >= 72 else "")


def plan_for(
    job: JobConfig, gpus: int, hardware: Hardware, goal: Goal, clock: Callable[[], float] = lambda: 0.0
) -> PlanReport:
    """The plan for a goal on at most ``gpus`` devices.

    Raises ConfigError where no layout fits, or no number of devices meets the deadline; the line names the
    best there is.
    """
    if goal.name in ("fewest", "cheapest"):
        count = (_fewest if goal.name == "fewest" else _cheapest)(job, gpus, hardware, goal)
        return plan(job, count, hardware, clock=clock)
    if goal.name == "throughput":
        found = plan(job, gpus, hardware, clock=clock)
    elif goal.name == "memory":
        found = _leanest(plan(job, gpus, hardware, buys=False, clock=clock))
    else:
        found = _reordered(plan(job, gpus, hardware, keep=CANDIDATES, buys=False, clock=clock), goal)
    _check_deadline(found, goal)
    return found


def _check_deadline(found: PlanReport, goal: Goal) -> None:
    if goal.tokens and not _timely(found, goal):
        raise ConfigError(_too_late(found, goal))


def _timely(found: PlanReport, goal: Goal) -> bool:
    return math.isfinite(seconds := run_seconds(found, goal)) and seconds <= goal.deadline_s


def _too_late(found: PlanReport, goal: Goal) -> str:
    seconds = run_seconds(found, goal)
    if math.isinf(seconds):
        between = 3600 / (goal.interruptions * found.gpus)
        return (
            f"--price: saw interruptions={goal.interruptions:g}, one each {between:.3g} s on"
            f" {found.hardware.said(found.gpus)}, expected more than the {_interruption_s(found):.3g} s"
            " that each costs: such a run never ends; RATE counts interruptions of one device in an hour"
        )
    return (
        f"--deadline: saw {goal.deadline_s / 3600:,.1f} h for {goal.tokens:.3g} tokens, expected at least"
        f" {said_hours(seconds / 3600)}, the best of up to {found.hardware.said(found.gpus)}, in"
        f" {found.best.layout}; raise --gpus, or the deadline"
    )


def _sizes(gpus: int, hardware: Hardware) -> list[int]:
    """Numbers of devices worth a look: parts of one node, then whole nodes, and all of them."""
    node = hardware.node_size
    return sorted({*range(1, min(node, gpus)), *range(node, gpus + 1, node), gpus})


def _fewest(job: JobConfig, gpus: int, hardware: Hardware, goal: Goal) -> int:
    sizes = _sizes(gpus, hardware)
    most = plan(job, gpus, hardware, keep=1, buys=False)
    low, high = -1, len(sizes) - 1
    if not _timely(most, goal):
        if not goal.interruptions:
            raise ConfigError(_too_late(most, goal))
        return _fewest_of(job, sizes, hardware, goal)
    return _first_timely(job, sizes, hardware, goal, low, high)


def _first_timely(
    job: JobConfig, sizes: list[int], hardware: Hardware, goal: Goal, low: int, high: int
) -> int:
    """The first size that meets the deadline, of those from place ``low``, which does not, to ``high``."""
    while high - low > 1:
        middle = (low + high) // 2
        found = _planned(job, sizes[middle], hardware)
        good = found is not None and _timely(found, goal)
        low, high = (low, middle) if good else (middle, high)
    return sizes[high]


def _fewest_of(job: JobConfig, sizes: list[int], hardware: Hardware, goal: Goal) -> int:
    """As `_fewest`, where all devices together are interrupted too often: fewer may be faster.

    Sizes that grow by a quarter are looked at, then those below the first of them that is good.
    """
    plans, before = [], -1
    for size in _coarse(sizes):
        at = sizes.index(size)
        if found := _planned(job, size, hardware):
            if _timely(found, goal):
                return _first_timely(job, sizes, hardware, goal, before, at)
            plans.append(found)
        before = at
    raise ConfigError(_too_late(min(plans, key=lambda found: run_seconds(found, goal)), goal))


def _coarse(sizes: list[int]) -> list[int]:
    """The sizes that are a quarter larger than the one before them, and the largest.

    >>> _coarse([1, 2, 3, 4, 5, 6, 7, 8, 16])
    [1, 2, 3, 4, 5, 7, 16]
    """
    found, last = [], 0.0
    for size in sizes:
        if size >= 1.25 * last or size == sizes[-1]:
            found.append(size)
            last = size
    return found


def _cheapest(job: JobConfig, gpus: int, hardware: Hardware, goal: Goal) -> int:
    """The size whose run costs least within the deadline; sizes grow by a quarter from one to the next."""
    plans = [found for size in _coarse(_sizes(gpus, hardware)) if (found := _planned(job, size, hardware))]
    if not plans:
        plan(job, gpus, hardware, keep=1, buys=False)  # says why
    timely = [found for found in plans if _timely(found, goal)]
    if not timely:
        raise ConfigError(_too_late(min(plans, key=lambda found: run_seconds(found, goal)), goal))
    return min(timely, key=lambda found: found.gpus * run_seconds(found, goal)).gpus


def _planned(job: JobConfig, gpus: int, hardware: Hardware) -> PlanReport | None:
    try:
        return plan(job, gpus, hardware, keep=1, buys=False)
    except ConfigError:
        return None


def _reordered(found: PlanReport, goal: Goal) -> PlanReport:
    """The table in the order of the goal; equals stay in the order of their seconds."""
    if goal.name == "robust":
        after = after_loss_s(found, goal.losing)
        steps = sorted(found.table, key=lambda step: after[step.layout])
        reasons = [said_after(after[step.layout], goal.losing) for step in steps]
        if math.isinf(after[steps[0].layout]):
            raise ConfigError(
                f"--losing: saw {goal.losing} of the nodes, expected one of these layouts to fit on the"
                f" {devices_left(found, goal.losing)} devices that are left; lose fewer, or raise --gpus"
            )
    else:
        score = _scores(found.table)
        steps = sorted(found.table, key=lambda step: score[step.layout])
        reasons = [f"score {score[step.layout]:.3f}" for step in steps]
        reasons[0] += ", lower is better"
    return _with_table(found, steps, reasons)


def _leanest(found: PlanReport) -> PlanReport:
    """The layouts that take least memory, each with as little as it can do with."""
    needs = {
        layout: memory_estimate(found.job, layout).total_bytes
        for layout in lean_layouts(found.job, found.gpus)
    }
    needs = {layout: size for layout, size in needs.items() if size <= found.budget_bytes}
    sizes = distinct(found.hardware.node_sizes(found.gpus))
    steps = without_zero_twins(
        PlannedStep(layout, step_cost(found.job, layout, found.hardware.profile, sizes), needs[layout])
        for layout in without_idle_twins(sorted(needs, key=lambda one: (needs[one], one)))[: 2 * TABLE]
    )
    return _with_table(found, steps, [f"{said_bytes(step.memory_bytes)} a rank" for step in steps])


def _with_table(found: PlanReport, steps: Sequence[PlannedStep], reasons: list[str]) -> PlanReport:
    """The plan with another table, and why its later rows lost."""
    large = found.rejected[len(found.table) - 1 :]
    lost = [(step.layout, why) for step, why in zip(steps, reasons, strict=True)][1:TABLE]
    best = steps[0].layout
    return replace(
        found,
        table=tuple(steps[:TABLE]),
        reason=reasons[0],
        rejected=(*lost, *large),
        by_rank=tuple(memory_by_cause(found.job, best, rank) for rank in range(best.pp)),
    )


def communication_s(cost: StepCost) -> float:
    """Seconds of a step in which nothing but communication goes on."""
    return cost.tensor_s + cost.context_s + cost.expert_s + cost.pipeline_s + cost.data_s + cost.sync_s


def _scores(table: tuple[PlannedStep, ...]) -> dict[Layout, float]:
    parts = {
        step.layout: {
            "compute": step.cost.total_s - communication_s(step.cost),
            "communication": communication_s(step.cost),
            "memory": step.memory_bytes,
        }
        for step in table
    }
    most = {name: max(part[name] for part in parts.values()) or 1.0 for name in WEIGHTS}
    return {
        layout: sum(weight * part[name] / most[name] for name, weight in WEIGHTS.items())
        for layout, part in parts.items()
    }
