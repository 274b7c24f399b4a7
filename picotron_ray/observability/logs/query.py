"""Query of log lines: which of them are wanted. It travels to the nodes, which send no others.

A pattern is one of RE2 (by pyarrow, which Ray's own libraries need): its time is linear in the text. Python's
``re`` can take for ever over a line, with the interpreter held all the while, and the nodes' agents, which
search, are those that send heartbeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from typing import Any

from picotron_ray.config.time_span import seconds_of
from picotron_ray.errors import ConfigError
from picotron_ray.observability.logs.lines import LEVELS, STREAMS, time_text


@dataclass(frozen=True, slots=True)
class Query:
    """Filters, all of which a line passes.

    Fields:
        since: time as `lines.time_text` has it, which sorts as text.
        level: the least grave one, or one of `STREAMS` alone.
        node: first characters of a node's id, or "coordinator".
        pattern: of RE2, found anywhere in the text.
    """

    rank: int | None = None
    node: str = ""
    since: str = ""
    level: str = ""
    pattern: str = ""

    def passes(self, entry: dict[str, Any]) -> bool:
        """Whether a line passes all filters but the pattern."""
        if self.rank is not None and entry.get("rank") != self.rank:
            return False
        if self.since and entry["time"] < self.since:
            return False
        if self.level in STREAMS:
            return bool(entry["level"] == self.level)
        return not self.level or LEVELS.get(entry["level"], 0) >= LEVELS[self.level]

    def matching(self, entries: Sequence[dict[str, Any]]) -> list[bool]:
        """Whether the text of each line matches the pattern."""
        if not self.pattern or not entries:
            return [True] * len(entries)
        import pyarrow
        import pyarrow.compute

        texts = pyarrow.array([_clean(entry["text"]) for entry in entries], pyarrow.string())
        return list(pyarrow.compute.match_substring_regex(texts, self.pattern).to_pylist())


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # a lone surrogate is no string of Arrow's


def query_of(
    rank: int | None,
    node: str | None,
    since: str | None,
    level: str | None,
    pattern: str | None,
    now_s: float,
) -> Query:
    """Make a query of a user's words; ConfigError names the first that is no such thing."""
    if rank is not None and rank < 0:
        raise ConfigError(f"--rank: saw {rank}, expected the number of a worker in a generation, from 0")
    if level is not None and level not in LEVELS:
        near = get_close_matches(level, LEVELS, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--level: saw {level!r}, expected one of {', '.join(LEVELS)}{meant}")
    _check_pattern(pattern)
    return Query(rank, node or "", _since(since, now_s), level or "", pattern or "")


def _since(word: str | None, now_s: float) -> str:
    if word is None:
        return ""
    if (ago_s := seconds_of(word)) is not None:
        return time_text(max(0.0, now_s - ago_s))
    try:
        at = datetime.fromisoformat(word)
        at_s = (at if at.tzinfo else at.astimezone()).timestamp()
        told = time_text(at_s)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"--since: saw {word!r}, expected a time ago such as 90s, 10m, 2h or 1d, or a date such as"
            " 2026-11-26T10:00"
        ) from error
    if at_s > now_s:
        raise ConfigError(
            f"--since: saw {word!r}, expected a time that has passed; it is {time_text(now_s)} (a date"
            " without a zone is one of this machine's)"
        )
    return told


def _check_pattern(pattern: str | None) -> None:
    """Refuse what RE2 does not take; its own words say why."""
    if pattern is None:
        return
    try:
        Query(pattern=pattern).matching([{"text": ""}])
    except ValueError as error:  # pyarrow.ArrowInvalid is one
        why = str(error).strip().splitlines()[0]
        raise ConfigError(f"--grep: saw {pattern!r}, expected a pattern of RE2: {why}") from error
