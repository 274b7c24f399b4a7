"""Ledger of a new commit: the steps since its parent, of lines that slots carried and of what was spilled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from blake3 import blake3

from picotron_ray.checkpoint.storage.base import Storage, get_bounded
from picotron_ray.checkpoint.store.manifest import Segment
from picotron_ray.checkpoint.store.upload_part import UploadPart
from picotron_ray.errors import CorruptError, NotFoundError, PartsGoneError, StorageError


class NewLedger(NamedTuple):
    """Segments in order, without a key where they are not stored yet; ``lines`` of those, by first step."""

    segments: tuple[Segment, ...]
    lines: dict[int, list[str]]


def joined(lines: Sequence[str]) -> bytes:
    """Lines as a segment stores them."""
    return "".join(line + "\n" for line in lines).encode()


def new_ledger(parts: Sequence[UploadPart], begin: int) -> NewLedger:
    """Cover the steps from ``begin`` to the parts' own; StorageError where a line is missing.

    Segments that are stored already are taken whole.
    """
    end = parts[0].step
    lines: dict[int, str] = {}
    for line in (line for part in parts for line in part.ledger):
        lines.setdefault(int(json.loads(line)["step"]), line)
    whole: dict[int, Segment] = {}
    for segment in (segment for part in parts for segment in part.segments if segment.last <= end):
        whole.setdefault(segment.first, segment)
    found: list[Segment] = []
    runs: dict[int, list[str]] = {}
    at = begin
    while at <= end:
        if at in whole:
            found.append(whole[at])
            at = whole[at].last + 1
            continue
        run: list[str] = []
        while at + len(run) <= end and at + len(run) in lines and at + len(run) not in whole:
            run.append(lines[at + len(run)])
        if not run:
            raise StorageError(
                f"checkpoint of step {end}: the slots carry no ledger line of step {at}, expected"
                f" {begin}..{end}"
            )
        runs[at] = run
        found.append(Segment("", at, at + len(run) - 1, blake3(joined(run)).hexdigest()))
        at += len(run)
    return NewLedger(tuple(found), runs)


def with_cut_segments(storage: Storage, parts: Sequence[UploadPart], begin: int) -> list[UploadPart]:
    """Take the lines out of stored segments that began before ``begin`` and go on after it.

    Raises:
        PartsGoneError: such a segment is gone or damaged; it must be uploaded again.
    """
    changed = []
    for part in parts:
        cut = next((each for each in part.segments if each.first < begin <= each.last), None)
        lines = [] if cut is None else _lines(storage, cut)
        changed.append(replace(part, ledger=(*lines, *part.ledger)) if lines else part)
    return changed


def _lines(storage: Storage, segment: Segment) -> list[str]:
    try:
        data = get_bounded(storage, segment.key, segment.most_bytes)
    except (NotFoundError, CorruptError) as error:
        raise PartsGoneError(f"spilled ledger {segment.key} is gone: {error}; upload it again") from error
    if blake3(data).hexdigest() != segment.digest:
        raise PartsGoneError(f"spilled ledger {segment.key} does not match its digest; upload it again")
    return data.decode().splitlines()
