"""Looks at values while all ranks stay at a boundary: what a hit saw, names of modules, the model."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from typing import Any

from picotron_ray.debug.tensor_figures import top_names
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.worker.tools.values import named_values, shown, state_figures, state_names
from picotron_ray.train.engine import Engine

MOST_LISTED = 200


def look(order: Mapping[str, Any], engine: Engine, hit: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return values that an order asks for.

    Args:
        hit: of the breakpoint that this rank stopped at; None: another rank did.

    Raises:
        ConfigError: there is nothing of that name.
    """
    scope, name = order["scope"], order.get("name") or ""
    if scope == "model":
        return _model(engine, name)
    if scope == "local":
        return _local(hit, name)
    return _global(hit, name)


def _model(engine: Engine, name: str) -> dict[str, Any]:
    state = engine.state()
    found = state_figures(state, name)
    names = [] if found else state_names(state)
    return {
        "tensors": found,
        "near": difflib.get_close_matches(name, names, 1, 0.0),
        "begin": top_names(names),
    }


def _local(hit: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    values = None if hit is None else hit["locals"]
    if not values:
        where = "another rank, or a phase, stopped the run" if not hit else "a phase has no local values"
        raise ConfigError(f"inspect local: {where}; give the rank that a line stopped by --ranks")
    if not name:
        return {"values": dict(values)}
    if name not in values:
        raise _unknown("local", name, list(values))
    return {"values": {name: values[name]}}


def _global(hit: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Values of a module's names: ``module`` or ``module.name``; none given: of the module of the hit."""
    module, left = name, ""
    if not name:
        module = "" if hit is None else hit.get("module", "")
        if not module:
            raise ConfigError("inspect global: expected MODULE or MODULE.NAME, as no line stopped this rank")
    elif name not in sys.modules:
        module, _, left = name.rpartition(".")
    if module not in sys.modules:
        raise ConfigError(f"inspect global: saw {name!r}, and no such module is loaded")
    names = {key: value for key, value in vars(sys.modules[module]).items() if not key.startswith("__")}
    if not left:
        return {"values": named_values(names, MOST_LISTED)}
    if left not in names:
        raise _unknown("global", left, list(names))
    return {"values": {name: shown(names[left])}}


def _unknown(scope: str, name: str, known: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name, known, 1, 0.0)
    return ConfigError(f"inspect {scope}: saw {name!r}; nearest: {near[0] if near else 'there is none'}")
