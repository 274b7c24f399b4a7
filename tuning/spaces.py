"""The space that a study varies, as values: no Ray, no randomness.

A point is plain data: ``layout`` names one of the planner's feasible layouts, ``accumulation`` the
micro-batches per step, and every other key is a dotted key of the config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import yaml

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedules import SCHEDULES
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.search import choose_layout
from tuning import plan

LAYOUT, ACCUMULATION = "layout", "accumulation"
UNKNOWN = "expected a key of the config"
SEQUENCE, SCHEDULE = "data.sequence_length", "layout.schedule"


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
    job: JobConfig, profile: DeviceProfile, trials: int, seeded: bool = True
) -> dict[str, Layout]:
    """The planner's best layouts on the most workers, by name, each in its micro-batches.

    Args:
        trials: that there are to be layouts for.
        seeded: in the planner's order; else by name, which says nothing of their speed.

    Raises:
        LayoutError: none fits.
    """
    best = plan.ranked(job, profile, trials)
    found = {str(layout): layout for layout in plan.in_micro_batches(job, profile, best, ())}
    return found if seeded else dict(sorted(found.items()))


def named_axes(job: JobConfig, device: str = "") -> dict[str, Space]:
    """Axes that a user may ask for by one word, for this job.

    Args:
        device: ``cuda`` leaves out the own algorithms of sums, which are gloo's; empty: the config's.
    """
    length, batch = job.data.sequence_length, job.data.global_batch
    lengths = [size for size in (length, length // 2, 2 * length) if size]
    lengths = [size for size in lengths if not why_not(job, {SEQUENCE: size}, {})]
    sizes = [2**power for power in range(batch.bit_length())]
    schedules = [name for name in SCHEDULES if name != "custom"]
    ways = ("auto", "flat", "bucketed", "reduce-scatter", "hierarchical")
    communication: Space = {"comm.gradients": Choice(ways)}
    if (device or job.cluster.device) != "cuda":
        communication["comm.topology"] = Choice(("auto", "ring", "tree", "mesh"))
    return {
        "micro-batch": {"layout.micro_batch": Choice(tuple(sizes))},
        "recompute": {"layout.recompute": Choice(("none", "selective", "full"))},
        "schedule": {SCHEDULE: Choice(tuple(schedules))},
        "communication": communication,
        "kernels": {
            "kernels.projections": Choice(("separate", "fused")),
            "kernels.loss": Choice(("logits", "linear")),
            "kernels.norm": Choice(("auto", "eager")),
            "kernels.optimizer": Choice(("fused", "foreach")),
        },
        "sequence-length": {SEQUENCE: Choice(tuple(lengths))},
    }


def parse_space(words: Sequence[str], named: Mapping[str, Space] = MappingProxyType({})) -> Space:
    """The axes of ``KEY=VALUE,VALUE`` and ``KEY=LOW..HIGH`` (``KEY=log:LOW..HIGH``), as a user gives them.

    Args:
        named: axes that a word alone stands for.

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
        if word in named:
            space |= named[word]
            continue
        try:
            space[key] = _axis(text)
        except (ValueError, yaml.YAMLError):
            wrong.append(
                f"--space: saw {word!r}, expected key=1,2,4 or key=1..4 or key=log:1e-4..1e-2"
                + (f", or {', '.join(named)}" if named else "")
            )
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
        _refuse_without_effect(job, point, layout)
        pinned = plan.pinned(layout)
        if SCHEDULE in point:
            pinned["virtual_stages"] = "auto"  # those of another schedule
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
        raise ConfigError(f"{key}: saw it in the space, {UNKNOWN}")
    at[last] = value


def _refuse_without_effect(job: JobConfig, point: Mapping[str, Any], layout: Layout) -> None:
    """Refuse a value that is one with the job's own in this layout: its trial would be another's again."""
    one_replica = layout.dp * layout.cp == 1
    alone = {SCHEDULE: layout.pp == 1, "comm.gradients": one_replica, "comm.topology": one_replica}
    comm = job.comm
    own = {SCHEDULE: job.layout.schedule, "comm.gradients": comm.gradients, "comm.topology": comm.topology}
    for key, without in alone.items():
        if without and point.get(key, own[key]) != own[key]:
            raise ConfigError(f"{key}: saw {point[key]}, which changes nothing in {layout}")


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


def check(job: JobConfig, space: Space, known: Mapping[str, Layout]) -> None:
    """Refuse an empty space, and an axis none of whose values the job takes, before any trial.

    Raises:
        ConfigError: names the last reason.
    """
    if not space:
        raise ConfigError("--space: saw nothing to vary, expected at least one key=values")
    for key, axis in space.items():
        reason = ""
        for value in axis.values if isinstance(axis, Choice) else axis.grid(2):
            reason = why_not(job, {key: value}, known)
            if UNKNOWN in reason:
                raise ConfigError(f"--space: {reason}")
            if not reason:
                break
        if isinstance(axis, Choice) and reason:
            raise ConfigError(f"--space: every point is infeasible: {reason.splitlines()[0]}")


def why_not(job: JobConfig, point: Mapping[str, Any], known: Mapping[str, Layout]) -> str:
    """Why a point is infeasible; empty where it is not."""
    try:
        with_point(job, point, known)
    except PicotronError as error:
        return str(error)
    return ""
