"""Ways to run a job that its config does not leave open: offloading, precision, compressed gradients.

A layout's search keeps to the job's keys. A search of ways sets further keys, one of each group that is asked
for, and looks for the fastest layout in each combination that is a valid job. The keys are part of the
answer: a run takes them only if its config says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError, LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.hardware import Hardware
from picotron_ray.planner.plan import PlanReport, for_devices, plan, searched
from picotron_ray.planner.words import short_name

Settings = tuple[tuple[str, str], ...]
"""Config keys and their values, as a command line gives them."""
PLAIN: Settings = ()
GROUPS: dict[str, tuple[Settings, ...]] = {
    "offload": (
        (("optimizer.offload", "true"),),
        (("layout.offload_activations", "true"),),
        (("optimizer.offload", "true"), ("layout.offload_activations", "true")),
    ),
    "precision": ((("precision", "bf16"),), (("precision", "fp8"),)),
    "communication": ((("comm.gradients", "bf16"),), (("comm.gradients", "int8"),)),
}
"""What a group may set, besides nothing."""
WITHOUT_FP8 = ("a100-80g",)
SHOWN = 6


@dataclass(frozen=True, slots=True)
class KeyChoice:
    """Keys to set, and the fastest layout with them."""

    settings: Settings
    step_s: float
    layout: Layout

    def __str__(self) -> str:
        keys = " ".join(f"{key}={value}" for key, value in self.settings)
        return f"{self.step_s:9.4g} s  {keys or 'as the config says'}: {short_name(self.layout)}"


@dataclass(frozen=True, slots=True)
class WaysFound:
    """The best plan of all ways, and how they compare.

    Fields:
        ways: those that fit, the fastest first.
        tried: valid combinations.
    """

    best: PlanReport
    ways: tuple[KeyChoice, ...]
    tried: int

    def to_dict(self) -> dict[str, object]:
        return {
            "settings": dict(self.ways[0].settings),
            "ways": [
                {"settings": dict(way.settings), "step_s": way.step_s, "layout": str(way.layout)}
                for way in self.ways
            ],
            "ways_tried": self.tried,
        }

    def headline(self) -> list[str]:
        """The keys that the plan needs and the config does not say; nothing where there are none."""
        keys = " ".join(f"{key}={value}" for key, value in self.ways[0].settings)
        return [f"needs      {keys}"] if keys else []

    def lines(self) -> list[str]:
        fits = f", of which {len(self.ways)} fit" if len(self.ways) < self.tried else ""
        return [
            f"of {self.tried} ways to run it{fits}, the fastest:",
            *(f"  {way}" for way in self.ways[:SHOWN]),
        ]


def groups_of(text: str) -> list[str]:
    """The groups of a list such as ``offload,precision``. Raises ConfigError for others, and for none."""
    names = [word.strip() for word in text.split(",")]
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        raise ConfigError(
            f"--search: saw {', '.join(unknown) or 'nothing'}, expected some of {', '.join(GROUPS)}"
        )
    return list(dict.fromkeys(names))


def plan_of_ways(
    job: JobConfig,
    gpus: int,
    hardware: Callable[[str], Hardware],
    groups: Sequence[str],
    clock: Callable[[], float] = lambda: 0.0,
) -> WaysFound:
    """The fastest plan of all ways.

    Args:
        hardware: by the job's precision.

    Raises:
        ConfigError: no way fits; the line is that of the job as it is.
    """
    found: list[KeyChoice] = []
    jobs: dict[Settings, JobConfig] = {}
    for parts in product(*((PLAIN, *GROUPS[name]) for name in groups)):
        settings = tuple(setting for part in parts for setting in part)
        changed = _changed(job, gpus, hardware, settings)
        if changed is None:
            continue
        jobs[settings] = changed[0]
        best = searched(*changed, gpus)
        if best is not None:
            found.append(KeyChoice(settings, *best))
    if not found:
        plan(job, gpus, hardware(job.precision), keep=1, buys=False)  # says why
    found.sort(key=lambda way: way.step_s)
    chosen = jobs[found[0].settings]
    return WaysFound(plan(chosen, gpus, hardware(chosen.precision), clock=clock), tuple(found), len(jobs))


def _changed(
    job: JobConfig, gpus: int, hardware: Callable[[str], Hardware], settings: Settings
) -> tuple[JobConfig, Hardware] | None:
    """The job with other keys and its hardware; None where they are no valid job, or no other one."""
    devices = hardware(job.precision)
    plain = for_devices(job, gpus, devices.device)
    if not settings:
        return plain, devices
    asked = dict(settings).get("precision")
    if asked == plain.precision or (asked == "fp8" and devices.name in WITHOUT_FP8):
        return None
    try:
        changed = parse_job(plain.model_dump(), [f"{key}={value}" for key, value in settings])
        return changed, hardware(changed.precision)
    except (ConfigError, LayoutError):
        return None
