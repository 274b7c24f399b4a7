"""A verdict on a hang as lines for people, from its JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

Question = Literal["deadlock", "comm"]
FIRST = {"comm": ("mismatch", "link", "stuck")}
"""Kinds of findings that a question is about, and that come first."""
MOST_ROWS = 16


def verdict_lines(found: Mapping[str, Any], question: Question) -> list[str]:
    """Say a verdict (`HangVerdict.plain`): findings, what they rest on, and what to do next."""
    return [
        *_about(found),
        *_held(found),
        *_findings(found, question),
        *_basis(found, question),
        *_next(found),
    ]


def _about(found: Mapping[str, Any]) -> Iterator[str]:
    failure = found.get("failure")
    if failure:
        yield (
            f"failure {failure['kind']} of {failure['target']} in step {failure['step']}, as its ranks told"
            f" then ({failure['evidence']}; {failure['why']}):"
        )


def _held(found: Mapping[str, Any]) -> Iterator[str]:
    held = found.get("held")
    if held:
        numbers = ", ".join(map(str, held.get("breakpoints", ())))
        by = f"breakpoint {numbers}" if numbers else "a breakpoint, or a recording that is saved,"
        yield f"held by {by} after step {held['step']}, for {held['for_s']:.0f} s"


def _findings(found: Mapping[str, Any], question: Question) -> Iterator[str]:
    verdict = sorted(found["verdict"], key=lambda each: each["kind"] not in FIRST.get(question, ()))
    for each in verdict:
        yield f"{each['kind']}: {each['text']}"
    if not verdict:
        ranks = found["ranks"]
        groups = "group" if len(found["groups"]) == 1 else "groups"
        counted = sum(group["operations"] for group in found["groups"])
        yield (
            f"nothing wrong: {len(ranks)} ranks in step {max((one['step'] for one in ranks), default=0)},"
            f" {counted} collectives of {len(found['groups'])} {groups} match, and none has waited for"
            f" {found['least_s']:.1f} s"
        )


def _basis(found: Mapping[str, Any], question: Question) -> Iterator[str]:
    if question == "deadlock":
        yield from _first(map(_wait_line, found["waits"]))
        yield from _first(map(_rank_line, found["ranks"]))
    else:
        yield from _first(map(_group_line, found["groups"]))


def _wait_line(wait: Mapping[str, Any]) -> str:
    return f"  rank {wait['rank']} waits for rank {wait['for']}: {wait['operation']} of {wait['group']}"


def _rank_line(rank: Mapping[str, Any]) -> str:
    at = rank["place"] or rank["problem"] or "no stack"
    return f"  rank {rank['rank']} ({rank['phase']} for {rank['for_s']:.1f} s): {at}"


def _group_line(group: Mapping[str, Any]) -> str:
    numbers = group["newest"].values()
    least, most = min(numbers), max(numbers)
    spread = f"{least}" if least == most else f"{least} to {most}"
    pending = f", pending on ranks {', '.join(map(str, group['pending'][:8]))}" if group["pending"] else ""
    return f"  {group['group']}: newest operation {spread}{pending}"


def _first(lines: Iterable[str]) -> Iterator[str]:
    """The first lines, and how many more there are."""
    lines = list(lines)
    yield from lines[:MOST_ROWS]
    if len(lines) > MOST_ROWS:
        yield f"  {len(lines) - MOST_ROWS} more of these"


def _next(found: Mapping[str, Any]) -> Iterator[str]:
    yield "next:"
    for number, text in enumerate(found["suggestions"], 1):
        yield f"  {number}. {text}"
