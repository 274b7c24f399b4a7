"""Ledger of a new commit: the steps since its parent, of lines that slots carried and of what was spilled.

Spilled lines may be lost, with the disk of the only node that had them. The state that they lead to is as
good as ever, since the order of samples does not depend on them, and it may be the only one there is. So a
commit that is asked for without them has a line for each such step that says so (``unproven``). Nothing is
claimed that is not known: `ledger verify` counts those samples as lost, and names the steps. The machine asks
for that once every node that holds the state has been asked (`coordinator.checkpoint_tracker`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from blake3 import blake3

from picotron_ray.checkpoint.storage.base import Storage, get_bounded
from picotron_ray.checkpoint.store.manifest import Segment
from picotron_ray.checkpoint.store.upload_part import UploadPart
from picotron_ray.errors import CorruptError, LedgerGoneError, NotFoundError

Read = Callable[[Segment], Sequence[str]]


class NewLedger(NamedTuple):
    """Segments in order, without a key where they are not stored yet; ``lines`` of those, by first step.

    ``unproven``: steps, first and last, whose lines are lost.
    """

    segments: tuple[Segment, ...]
    lines: dict[int, list[str]]
    unproven: tuple[tuple[int, int], ...] = ()


def joined(lines: Sequence[str]) -> bytes:
    """Lines as a segment stores them."""
    return "".join(line + "\n" for line in lines).encode()


class _Carried:
    """Lines by step: those that slots carried, and those of segments of which a part is needed."""

    def __init__(self, parts: Sequence[UploadPart], read: Read) -> None:
        self._read = read
        self._known: dict[int, str] = {}
        self._take([line for part in parts for line in part.ledger])
        self._unread = list(dict.fromkeys(segment for part in parts for segment in part.segments))
        self.problem: LedgerGoneError | None = None  # of the newest segment that could not be read

    def _take(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._known.setdefault(int(json.loads(line)["step"]), line)

    def at(self, step: int) -> str | None:
        """Return the line of a step; None where nobody has it."""
        while step not in self._known:
            segment = next((each for each in self._unread if each.first <= step <= each.last), None)
            if segment is None:
                return None
            self._unread.remove(segment)
            try:
                self._take(self._read(segment))
            except LedgerGoneError as error:
                self.problem = error
        return self._known[step]


def new_ledger(
    parts: Sequence[UploadPart], begin: int, read: Read = lambda _: (), unproven: bool = False
) -> NewLedger:
    """Cover the steps from ``begin`` to the parts' own.

    Segments that are stored already are taken whole, but those that began before, or overlap others.

    Args:
        read: reads the lines of a stored segment.
        unproven: steps without a line get one that says so.

    Raises:
        LedgerGoneError: a line is missing.
    """
    end = parts[0].step
    lines = _Carried(parts, read)
    whole: dict[int, Segment] = {}
    for segment in (segment for part in parts for segment in part.segments if segment.last <= end):
        whole.setdefault(segment.first, segment)
    found: list[Segment] = []
    runs: dict[int, list[str]] = {}
    gaps: list[tuple[int, int]] = []

    def run_of(at: int, line: Callable[[int], str | None]) -> list[str]:
        run: list[str] = []
        while at <= end and at not in whole and (text := line(at)) is not None:
            run.append(text)
            at += 1
        return run

    at = begin
    while at <= end:
        if at in whole:
            found.append(whole[at])
            at = whole[at].last + 1
            continue
        run = run_of(at, lines.at)
        if not run:
            if not unproven:
                raise lines.problem or LedgerGoneError(
                    f"checkpoint of step {end}: the slots carry no ledger line of step {at}, expected"
                    f" {begin}..{end}; every node that holds the state is asked for it"
                )
            run = run_of(at, lambda step: None if lines.at(step) else _unproven_line(parts[0], step))
            gaps.append((at, at + len(run) - 1))
        runs[at] = run
        found.append(Segment("", at, at + len(run) - 1, blake3(joined(run)).hexdigest()))
        at += len(run)
    return NewLedger(tuple(found), runs, tuple(gaps))


def _unproven_line(part: UploadPart, step: int) -> str:
    """Line of a step whose own is lost: the samples that the order of samples gives it, and no proof."""
    batch = part.cursor // part.step
    nothing = dict.fromkeys(("loss", "grad_norm", "learning_rate", "at_s"))
    line = {"step": step, "term": part.term, "n": part.n, "samples": [(step - 1) * batch, step * batch]}
    rest: dict[str, object] = {"rows": [], "tokens": 0, **nothing, "unproven": True}
    return json.dumps({**line, **rest}, separators=(",", ":"))


def reader(storage: Storage) -> Read:
    """Return what reads the lines of stored segments, or raises LedgerGoneError."""
    return partial(_lines, storage)


def _lines(storage: Storage, segment: Segment) -> list[str]:
    try:
        data = get_bounded(storage, segment.key, segment.most_bytes)
    except (NotFoundError, CorruptError) as error:
        raise LedgerGoneError(f"spilled ledger {segment.key} is gone: {error}; upload it again") from error
    if blake3(data).hexdigest() != segment.digest:
        raise LedgerGoneError(f"spilled ledger {segment.key} does not match its digest; upload it again")
    return data.decode().splitlines()
