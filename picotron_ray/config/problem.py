"""One mistake in a config."""

from __future__ import annotations

from typing import NamedTuple


class Problem(NamedTuple):
    """One mistake: the key to change, what is wrong, and the other keys it depends on."""

    key: str
    text: str
    touches: tuple[str, ...] = ()
