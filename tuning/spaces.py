"""The space that a study varies, as values: no Ray, no randomness.

A point is plain data: ``layout`` names one of the planner's feasible layouts, ``accumulation`` the
micro-batches per step, and every other key is a dotted key of the config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.search import choose_layout, layouts
from tuning import plan

LAYOUT, ACCUMULATION = "layout", "accumulation"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the values of a list; the first is tried first."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """A number from ``low`` to ``high``, both included; ``log``: evenly in its logarithm."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def grid(self, count: int) -> tuple[float, ...]:
        """``count`` values from low to high, at even distances."""
        shares = [at / (count - 1) for at in range(count)] if count > 1 else [0.0]
        if self.log:
            values = [self.low * (self.high / self.low) ** share for share in shares]
        else:
            values = [self.low + (self.high - self.low) * share for share in shares]
        return tuple(dict.fromkeys(round(value) if self.whole else value for value in values))


Space = dict[str, Choice | Range]

HPARAMS: Space = {
    "optimizer.learning_rate": Range(1e-6, 1e-2, log=True),
    "data.global_batch": Choice((16, 32, 64, 128, 256)),  # most accumulations divide these
    ACCUMULATION: Choice((1, 2, 4, 8, 16, 32)),
    "optimizer.schedule.warmup_steps": Range(0, 10_000, whole=True),
    "optimizer.weight_decay": Range(0.0, 0.1),
}
"""The hyperparameters' space, where ``--space`` narrows nothing."""


def feasible_layouts(
    job: JobConfig, profile: DeviceProfile, seeded: bool = True, micro_batches: Sequence[int] = ()
) -> dict[str, Layout]:
    """Layouts that fit on the most workers, by name, each in its micro-batches.

    Args:
        seeded: in the planner's order; else by name, which says nothing of their speed.
        micro_batches: to try in each; empty: the planner's, its half and its double.

    Raises:
        LayoutError: none fits.
    """
    sizes = tuple(micro_batches)
    limits = plan.SweepOptions(name="all", trials=2**31, layout_trials=2**30, micro_batches=sizes)
    found = {str(layout): layout for layout in plan.candidates(job, limits, profile)}
    return found if seeded else dict(sorted(found.items()))


def parse_space(words: Sequence[str]) -> Space:
    """The axes of ``KEY=VALUE,VALUE`` and ``KEY=LOW..HIGH`` (``KEY=log:LOW..HIGH``), as a user gives them.

    Raises:
        ConfigError: one line per word that is neither.

    >>> parse_space(["data.global_batch=16,32", "optimizer.learning_rate=log:1e-4..1e-2"])[
    ...     "data.global_batch"
    ... ]
    Choice(values=(16, 32))
    """
    space: Space = {}
    wrong = []
    for word in words:
        key, _, text = word.partition("=")
        try:
            space[key] = _axis(text)
        except (ValueError, yaml.YAMLError):
            wrong.append(f"--space: saw {word!r}, expected key=1,2,4 or key=1..4 or key=log:1e-4..1e-2")
    if wrong:
        raise ConfigError(*wrong)
    return space


def _axis(text: str) -> Choice | Range:
    if ".." not in text:
        values = tuple(yaml.safe_load(part) for part in text.split(","))
        if not text or len(set(map(str, values))) < len(values):
            raise ValueError(text)
        return Choice(values)
    log = text.startswith("log:")
    low, high = text.removeprefix("log:").split("..")
    whole = not log and low.lstrip("-").isdigit() and high.isdigit()
    if not float(low) < float(high) or (log and float(low) <= 0):
        raise ValueError(text)
    return Range(float(low), float(high), log, whole)


def only_categories(space: Mapping[str, Choice | Range]) -> bool:
    """Whether no axis has an order that a numerical searcher could follow."""
    return not any(isinstance(axis, Range) for axis in space.values())


def with_point(job: JobConfig, point: Mapping[str, Any], known: Mapping[str, Layout]) -> JobConfig:
    """The job with a point's values.

    Args:
        known: layouts by the name that a point gives.

    Raises:
        ConfigError, LayoutError: the point is infeasible; says why.
    """
    raw = job.model_dump(mode="json")
    for key, value in point.items():
        if key not in (LAYOUT, ACCUMULATION):
            _put(raw, key, value)
    if LAYOUT in point:
        layout = known[point[LAYOUT]]
        pinned = plan.pinned(layout)
        raw["layout"] |= {key: pinned[key] for key in pinned if f"layout.{key}" not in point}
        raw["cluster"] |= {"min_workers": layout.world_size, "max_workers": layout.world_size}
    found = parse_job(raw)
    return _accumulated(found, point[ACCUMULATION]) if ACCUMULATION in point else found


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    *folders, last = key.split(".")
    at: Any = raw
    for folder in folders:
        at = at.get(folder) if isinstance(at, dict) else None
    if not isinstance(at, dict) or last not in at:
        raise ConfigError(f"{key}: saw it in the space, expected a key of the config")
    at[last] = value


def _accumulated(job: JobConfig, count: int) -> JobConfig:
    """The job with so many micro-batches per step and replica, in the planner's degrees for it."""
    layout = choose_layout(job, job.cluster.max_workers).layout
    rows, rest = divmod(job.data.global_batch, layout.dp * count)
    if not rows or rest:
        raise ConfigError(
            f"accumulation: saw {count}, which does not divide global_batch {job.data.global_batch}"
            f" over {layout.dp} replicas; take another batch or count"
        )
    wanted = replace(layout, micro_batch=rows)
    if problems := layout_problems(job, wanted):
        raise ConfigError(*problems)
    raw = job.model_dump(mode="json")
    raw["layout"] |= plan.pinned(wanted)
    return parse_job(raw)


def check(
    job: JobConfig, space: Space, known: Mapping[str, Layout], seeds: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse a space of which no point tried is feasible, or whose keys the config does not have.

    Tried are the seeds, and the ends of each axis with the job's own values elsewhere.

    Raises:
        ConfigError: names the last reason.
    """
    if not space:
        raise ConfigError("--space: saw nothing to vary, expected at least one key=values")
    ends = {key: axis.values if isinstance(axis, Choice) else axis.grid(2) for key, axis in space.items()}
    points = [*seeds, *({key: value} for key, values in ends.items() for value in values)]
    reason = ""
    for key, values in ends.items():
        reasons = [_why_not(job, {key: value}, known) for value in values]
        if isinstance(space[key], Choice) and all(reasons):
            raise ConfigError(f"--space: every point is infeasible: {reasons[-1].splitlines()[0]}")
    for point in points:
        reason = _why_not(job, point, known)
        if not reason:
            return
    raise ConfigError(f"--space: every point is infeasible: {reason.splitlines()[0]}")


def _why_not(job: JobConfig, point: Mapping[str, Any], known: Mapping[str, Layout]) -> str:
    try:
        with_point(job, point, known)
    except PicotronError as error:
        return str(error)
    return ""


def layout_order(job: JobConfig, profile: DeviceProfile) -> list[str]:
    """Names of the planner's layouts for the most workers, cheapest first."""
    return [str(layout) for layout in layouts(job, job.cluster.max_workers, profile)]
