"""Parameter groups by pattern: which group a canonical name is in, and where a pattern is of no use.

A pattern is a glob over a whole canonical name (``layers.*.attention.*``); its ``*`` also matches dots. Of
several patterns that match, the first in the config counts, as in a routing table.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.schema.optimizer import OptimizerConfig, ParameterGroupConfig
from picotron_ray.models.families.registry import finetuned_table, named, nearest


class UselessPattern(NamedTuple):
    """A pattern without a parameter of its own.

    Fields:
        number: of its group, from 0, in the config.
        nearest: the parameter whose name is most like it; "none" where there is none.
        taken: the earlier pattern that takes all that it matches; "" where it matches nothing.
    """

    number: int
    nearest: str
    taken: str


def group_of(config: OptimizerConfig, name: str) -> ParameterGroupConfig | None:
    """Return the first group whose pattern matches a canonical name; None: no group does.

    >>> groups = (ParameterGroupConfig(pattern="embed.*"), ParameterGroupConfig(pattern="*.weight"))
    >>> group_of(OptimizerConfig(groups=groups), "embed.weight").pattern
    'embed.*'
    """
    return next((group for group in config.groups if fnmatchcase(name, group.pattern)), None)


def trained_names(model: ModelConfig) -> list[str] | None:
    """List the canonical names of what gradients move; None of a model of one's own not yet looked into."""
    if model.builder is None:
        return [spec.name for spec in finetuned_table(model) if spec.trained]
    if model.built is None:
        return None
    return [name for name, _ in model.built.parameters if not named(name, model.freeze)]


def useless_patterns(config: OptimizerConfig, names: Sequence[str]) -> list[UselessPattern]:
    """List the groups that no name falls to."""
    used = {id(group) for name in names if (group := group_of(config, name)) is not None}
    found = []
    for index, group in enumerate(config.groups):
        if id(group) in used:
            continue
        matched = next((name for name in names if fnmatchcase(name, group.pattern)), None)
        first = None if matched is None else group_of(config, matched)
        taken = "" if first is None else first.pattern
        found.append(UselessPattern(index, nearest(group.pattern, names), taken))
    return found
