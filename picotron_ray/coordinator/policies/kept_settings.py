"""Settings of an earlier launch: which of them hold for the job as it is launched now."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from picotron_ray.config.schema.adapt import KINDS, AdaptKind
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.settings import replaced_by
from picotron_ray.coordinator.messages import Adapted, Settings
from picotron_ray.coordinator.policies.adaptation import BY_KEY, FOR_MEMORY
from picotron_ray.coordinator.policies.suggestions import RELEASED, problem_of


def kinds_of(key: str) -> list[AdaptKind]:
    """Kinds of change that set a key.

    >>> kinds_of("comm.gradients"), kinds_of("layout.recompute"), kinds_of("layout.dp")
    (['compression'], ['recompute'], ['layout'])
    """
    return [kind for kind in KINDS if key in RELEASED.get(kind, ()) or key in BY_KEY.get(kind, ())]


def held_settings(
    job: JobConfig, settings: Settings, replaced: Settings, adapted: Iterable[Adapted]
) -> tuple[Settings, list[str]]:
    """Settings that hold on, and a line for each of the others.

    One holds on if its kind of change is permitted, the job says of its key what it said when it was set, and
    the rules between keys allow it. What a change for want of memory released holds on without permission:
    the limit that came with it does so too, and what the job names need not fit below it.

    Args:
        replaced: what the job said for these keys, as far as it is known.
        adapted: changes of the run.
    """
    said, says = dict(replaced), dict(replaced_by(job, settings))
    for_memory = {
        one.kind for one in adapted if one.target.startswith(FOR_MEMORY) and one.verdict in ("trial", "kept")
    }
    held, dropped = [], []
    for key, text in settings:
        kinds = kinds_of(key)
        if said.get(key, says[key]) != says[key]:
            dropped.append(f"{key}={text}: the job says {says[key]} now, and said {said[key]}")
        elif not {*job.adapt.apply, *for_memory}.intersection(kinds):
            dropped.append(f"{key}={text}: adapt.apply has none of {', '.join(kinds) or 'its kinds'}")
        else:
            held.append((key, text))
    if not problem_of(job, tuple(held)):
        return tuple(held), dropped
    allowed: Settings = ()
    for _, group in groupby(held, key=_set_together):
        more = tuple(group)
        if problem := problem_of(job, (*allowed, *more)):
            dropped += [f"{key}={text}: {problem}" for key, text in more]
        else:
            allowed = (*allowed, *more)
    return allowed, dropped


def _set_together(setting: tuple[str, str]) -> str:
    """Name of a group of keys that hold together or not at all: those of a layout."""
    key = setting[0]
    return "layout" if key.startswith("layout.") else key
