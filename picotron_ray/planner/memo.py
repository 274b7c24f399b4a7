"""Results that are asked for again and again, of one config at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

Config = TypeVar("Config")
Result = TypeVar("Result")
Rest = ParamSpec("Rest")


def of_the_latest(
    function: Callable[Concatenate[Config, Rest], Result],
) -> Callable[Concatenate[Config, Rest], Result]:
    """Remember what a pure function gave for the config that it was last called with.

    By identity: configs are frozen, and hashing one means writing it out, which costs more than most of what
    is remembered. The other arguments must be hashable.
    """
    latest: tuple[object, dict[object, Result]] = (None, {})

    @wraps(function)
    def remembered(config: Config, *rest: Rest.args, **named: Rest.kwargs) -> Result:
        nonlocal latest
        known = latest  # threads may replace it meanwhile: config and results stay together
        if known[0] is not config:
            known = latest = (config, {})
        key = (rest, tuple(sorted(named.items())))
        if key not in known[1]:
            known[1][key] = function(config, *rest, **named)
        return known[1][key]

    return remembered
