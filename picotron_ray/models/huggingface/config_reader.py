"""Reading a checkpoint's config.json: typed values, and what transformers takes where a key is absent.

A wrong value is refused in one line that names its key. Nothing is converted: what is not of its type is
wrong. Torch-free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from picotron_ray.errors import ConfigError

_MISSING = object()


def show(value: Any) -> str:
    """A JSON value in a message, cut to 60 characters; a plain text without quotes."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def refuse(key: str, saw: Any, expected: str) -> ConfigError:
    """The error for a value of config.json."""
    return ConfigError(f"config.json: {key}: saw {show(saw)}, expected {expected}")


class Keys:
    """Values of one object in config.json, by key; every method raises ConfigError."""

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        aliases: Mapping[str, str] | None = None,
        inside: str = "",
    ) -> None:
        """
        Args:
            defaults: what transformers takes for a key that is absent.
            aliases: other names of keys, as transformers' ``attribute_map`` has them.
            inside: path of the object, with a dot at its end, for messages.
        """
        self._values, self._defaults, self._inside = {**values}, defaults, inside
        for other, key in (aliases or {}).items():
            if other in values and values.get(key, values[other]) != values[other]:
                raise refuse(other, values[other], f"{show(values[key])}, as {key} says; keep one of them")
            if other in values:
                self._values[key] = values[other]

    def get(self, key: str) -> Any:
        """A value as it is, or its default."""
        found = self._values.get(key, self._defaults.get(key, _MISSING))
        if found is _MISSING:
            raise ConfigError(f"config.json: {self._inside}{key} is missing")
        return found

    def has(self, key: str) -> bool:
        """Whether a value is said, and not null."""
        return self._values.get(key) is not None

    def whole(self, key: str) -> int:
        """A whole number of at least 1."""
        found = self.get(key)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise refuse(self._inside + key, found, "a whole number of at least 1")
        return found

    def whole_or_null(self, key: str) -> int | None:
        """A whole number of at least 1, or None for null."""
        return None if self.get(key) is None else self.whole(key)

    def number(self, key: str, least: float | None = None) -> float:
        """A finite number: above 0, or at least ``least``."""
        found = self.get(key)
        valid = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
        if not valid or (found <= 0 if least is None else found < least):
            expected = "a number above 0" if least is None else f"a number of at least {least:g}"
            raise refuse(self._inside + key, found, expected)
        return float(found)

    def flag(self, key: str) -> bool:
        """True or false."""
        found = self.get(key)
        if not isinstance(found, bool):
            raise refuse(self._inside + key, found, "true or false")
        return found

    def fixed(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse keys that are there and have a value that is not allowed."""
        for key, values in allowed.items():
            if key in self._values and self._values[key] not in values:
                raise refuse(key, repr(self._values[key]), repr(values[0]))
