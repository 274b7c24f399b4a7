"""Rows of a table of mutations: which names of which modules, classes or tables get what in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from picotron_ray.coordinator import event_handlers

Spot = tuple[Any, Any]
"""Module, class or dict, and the name in it."""
Change = tuple[Any, Any, Callable[[Any], Any]]
"""Spot, and what makes its new value of the old one."""
Mutation = tuple[Change, ...]


def put(value: Any, *spots: Spot) -> Mutation:
    """Put a value in the place of others."""
    return tuple((owner, name, lambda real: value) for owner, name in spots)


def nothing(owner: Any, name: Any) -> Mutation:
    """Have a function do nothing."""
    return put(lambda *words, **named: None, (owner, name))


def wrap(around: Callable[..., Any], *spots: Spot) -> Mutation:
    """Have a function stand in for others, which it gets as its first argument."""

    def change(real: Any) -> Any:
        return lambda *words, **named: around(real, *words, **named)

    return tuple((owner, name, change) for owner, name in spots)


def handler(event: type[Any], around: Callable[..., Any]) -> Mutation:
    """Have a function stand in for the machine's handler of an event."""
    return wrap(around, (event_handlers.HANDLERS, event))


def plant(mutation: Mutation, patch: pytest.MonkeyPatch) -> None:
    """Make the changes of a mutation until ``patch`` is undone."""
    for owner, name, change in mutation:
        if isinstance(owner, dict):
            patch.setitem(owner, name, change(owner[name]))
        else:
            patch.setattr(owner, name, change(getattr(owner, name)))
