"""Comparison of two launches of a run: changed keys are harmless, deserve a warning, or are refused.

A run's meaning is its model, its seed, its samples and their order. Those are pinned; what only says how,
where or for how long to compute may change; what bends the loss curve may change with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from picotron_ray.config.export import flatten, public_dict
from picotron_ray.config.schema.chaos import ChaosFault
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.layout.schedules import canonical_name, schedule_names

Verdict = Literal["may", "warn", "refuse"]

# The longest matching prefix decides; keys of no prefix here may change.
_VERDICTS: dict[str, Verdict] = {
    "name": "refuse",
    "steps": "warn",  # the learning rate's schedule ends there
    "seed": "refuse",
    "precision": "refuse",
    "adaptive_precision": "warn",
    "fp8": "warn",
    "model": "refuse",
    "model.plan": "may",  # state is kept uncut: another cut restores from it
    "model.built": "may",
    "model.built.parameters": "refuse",
    "data": "refuse",
    "data.prefetch_steps": "may",
    "data.tokenizer": "may",  # its digest is part of the fingerprint
    "data.s3": "may",
    "data.curriculum.scores": "may",  # what it holds is part of the data's fingerprint
    "meta": "refuse",
    "meta.inner_rate": "warn",
    "meta.inner_steps": "warn",
    "optimizer": "warn",
    "optimizer.name": "refuse",
    "optimizer.offload": "may",
    "comm.gradients": "warn",
    "comm.ratio": "warn",
    "comm.bits": "warn",
    "comm.reduce_dtype": "warn",
    "init_from": "refuse",
    "evaluate.samples": "warn",
    "evaluate.sets": "may",
    "evaluate.source_samples": "may",
    "evaluate.weights": "warn",
}


FILLED_IN = {"metrics.host": None, "cluster.interface": None, "precision": "auto"}
"""Keys that launch fills in, and what leaves them to it: to leave them to it again changes nothing."""


def _schedule_now(name: Any) -> Any:
    return canonical_name(name) if name in schedule_names() else name


SLOT_FOLDERS = ("snapshot.folder", "snapshot.overflow_folder")
"""Two keys whose values launch exchanges where only the second folder has room: the same two, either way
round, are no change.
"""


def _faults_now(faults: Any) -> Any:
    """Scripted faults with the keys that an earlier version did not know, at their defaults."""
    return faults and [ChaosFault.model_validate(fault).model_dump(mode="json") for fault in faults]


RENAMED: dict[str, Callable[[Any], Any]] = {"layout.schedule": _schedule_now, "chaos": _faults_now}
"""Keys whose values an earlier version may have written otherwise: that value as it is written today."""

MEANINGS: dict[Verdict, str] = {
    "may": "may change",
    "warn": "may change; bends the loss curve, and the launch says so",
    "refuse": "may not change within a run",
}


def verdict(key: str) -> Verdict:
    """Judge whether a dotted key may change between two launches of one run."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        found = _VERDICTS.get(".".join(parts[:length]))
        if found:
            return found
    return "may"


def fingerprint(job: JobConfig) -> dict[str, Any]:
    """Dotted key → value of everything that may not change within a run.

    Model, seed, data (not the prefetch depth), precision and the optimizer's name: with these equal, the
    samples and the meaning of a checkpoint are equal too.
    """
    return {key: value for key, value in flatten(public_dict(job)).items() if verdict(key) == "refuse"}


def compare(old: Mapping[str, Any], new: JobConfig) -> list[tuple[str, Verdict]]:
    """(dotted key, verdict) of every key that differs between an earlier launch and this one.

    Args:
        old: ``public_dict`` of the earlier launch (as run.json holds it). A key that it lacks, because an
            older version wrote it, counts as having had its default.
        new: the config of this launch.
    """
    return [(key, verdict(key)) for key, _, _ in changes(old, new)]


def changes(old: Mapping[str, Any], new: JobConfig) -> list[tuple[str, Any, Any]]:
    """(dotted key, value before, value now) of every key that differs, in the config's order."""
    defaults = flatten(public_dict(JobConfig()))
    before = flatten(dict(old))
    now = flatten(public_dict(new))
    found = []
    same_folders = {before.get(key, defaults[key]) for key in SLOT_FOLDERS} == {
        now[key] for key in SLOT_FOLDERS
    }
    for key, value in now.items():
        if same_folders and key in SLOT_FOLDERS:
            continue
        was = before.get(key, defaults.get(key))
        was = RENAMED[key](was) if key in RENAMED else was
        if was != value and not (key in FILLED_IN and value == FILLED_IN[key]):
            found.append((key, was, value))
    dropped = [key for key in before if key.startswith("model.arguments.") and key not in now]
    return found + [(key, before[key], None) for key in dropped]


def check_resume(old: Mapping[str, Any], new: JobConfig) -> list[str]:
    """Accept or refuse a changed config of an existing run; returns one line per changed key.

    Raises:
        ConfigError: one line for every key that may not change.
    """
    refused, lines = [], []
    for key, was, value in changes(old, new):
        said = verdict(key)
        change = f"{key}: was {show(was)}, now {show(value)}"
        if said == "refuse":
            refused.append(
                f"{change}; it may not change within run {new.name}: restore it, or choose another name"
            )
        else:
            lines.append(f"{change}; {_accepted(key, said, new)}")
    if refused:
        raise ConfigError(*refused)
    return lines


def _accepted(key: str, said: Verdict, new: JobConfig) -> str:
    kind = new.optimizer.schedule.kind
    if key != "steps":
        return "it changes the loss curve" if said == "warn" else "accepted"
    if kind == "constant":
        return "accepted"
    return f"it changes the loss curve: the learning rate's {kind} schedule ends at the last step"


def table() -> list[tuple[str, Verdict]]:
    """(dotted key, verdict) of every key of a config, in its order; a list counts as one key."""
    return [(key, verdict(key)) for key in flatten(public_dict(JobConfig()))]


def markdown() -> str:
    """The table as docs show it: sections of one verdict as a row, other keys one by one."""
    rows = ["| key | between two launches of a run |", "|---|---|"]
    by_section: dict[str, list[tuple[str, Verdict]]] = {}
    for key, said in table():
        by_section.setdefault(key.split(".")[0], []).append((key, said))
    for section, keys in by_section.items():
        if len({said for _, said in keys}) == 1 and len(keys) > 1:
            rows.append(f"| `{section}.*` | {MEANINGS[keys[0][1]]} |")
        else:
            rows += [f"| `{key}` | {MEANINGS[said]} |" for key, said in keys]
    return "\n".join(rows) + "\n"


def show(value: Any) -> str:
    """A value in a message, cut to 60 characters."""
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
