"""A verdict on a hang as lines for people, from its JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

Question = Literal["deadlock", "comm"]
FIRST = {"comm": ("mismatch", "link", "stuck")}
"""Kinds of findings that a question is about, and that come first."""
MOST_ROWS = 16


def verdict_lines(found: Mapping[str, Any], question: Question) -> list[str]:
    """Say a verdict (`HangVerdict.plain`): findings, what they rest on, and what to do next."""
    return [*_about(found), *_findings(found, question), *_basis(found, question), *_next(found)]


def _about(found: Mapping[str, Any]) -> Iterator[str]:
    failure = found.get("failure")
    if failure:
        yield (
            f"failure {failure['kind']} of {failure['target']} in step {failure['step']}, as its ranks told"
            f" then ({failure['evidence']}; {failure['why']}):"
        )


def _findings(found: Mapping[str, Any], question: Question) -> Iterator[str]:
    verdict = sorted(found["verdict"], key=lambda each: each["kind"] not in FIRST.get(question, ()))
    for each in verdict:
        yield f"{each['kind']}: {each['text']}"
    if not verdict:
        ranks = found["ranks"]
        counted = sum(group["operations"] for group in found["groups"])
        yield (
            f"nothing wrong: {len(ranks)} ranks in step {max((one['step'] for one in ranks), default=0)},"
            f" {counted} operations of {len(found['groups'])} groups match, and none has waited for"
            f" {found['least_s']:.1f} s"
        )


def _basis(found: Mapping[str, Any], question: Question) -> Iterator[str]:
    if question == "deadlock":
        for each in _first(found["waits"]):
            what = f"{each['operation']} of {each['group']}"
            yield f"  rank {each['rank']} waits for rank {each['for']}: {what}"
        for rank in _first(found["ranks"]):
            at = rank["place"] or rank["problem"] or "no stack"
            yield f"  rank {rank['rank']} ({rank['phase']} for {rank['for_s']:.1f} s): {at}"
        return
    for group in _first(found["groups"]):
        numbers = group["newest"].values()
        spread = f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"
        pending = (
            f", pending on ranks {', '.join(map(str, group['pending'][:8]))}" if group["pending"] else ""
        )
        yield f"  {group['group']}: newest operation {spread}{pending}"


def _first(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The first rows; ranks that stand still at the same place are many."""
    yield from rows[:MOST_ROWS]


def _next(found: Mapping[str, Any]) -> Iterator[str]:
    yield "next:"
    for number, text in enumerate(found["suggestions"], 1):
        yield f"  {number}. {text}"
