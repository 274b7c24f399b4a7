"""Dotted ``key=value`` overrides, as the command line takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from picotron_ray.errors import ConfigError


def apply_overrides(
    raw: dict[str, Any], overrides: Sequence[str], value_of: Callable[[str, str], Any]
) -> list[str]:
    """Write ``a.b=value`` overrides into ``raw`` (in place).

    A number in the dotted key is a place in a list (``chaos.0.step=5``); the place after the last appends.

    Args:
        value_of: reads a value from its text and the words to name it by in an error.

    Returns one line per mistake.
    """
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            problems.append(f"{override}: expected an override of the form key=value, such as steps=200")
            continue
        try:
            _put(raw, parts, value_of(text, f"{key.strip()}={text}"))
        except ConfigError as error:
            problems.extend(error.problems)
    return problems


def _put(node: Any, parts: list[str], value: Any) -> None:
    done: list[str] = []
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        leaf = following is None
        fresh: Any = value if leaf else ([] if (following or "").isdigit() else {})
        if isinstance(node, dict):
            if leaf or node.get(part) is None:
                node[part] = fresh
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) <= len(node):
            if int(part) == len(node):
                node.append(fresh)
            elif leaf:
                node[int(part)] = fresh
            node = node[int(part)]
        else:
            kind = f"a list of {len(node)}" if isinstance(node, list) else "a single value"
            raise ConfigError(f"{'.'.join(parts)}: {'.'.join(done)} is {kind}, it has no {part} to set")
        done.append(part)
