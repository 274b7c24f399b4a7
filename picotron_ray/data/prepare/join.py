"""Join of parts into token files that training reads, in the order of the parts.

The result depends on the documents and their order alone, not on how they lie in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from picotron_ray.data.prepare.part import READ_BYTES, WrittenPart, file_digest, open_part
from picotron_ray.data.split_writer import END, SPLITS, CacheForm, fill_both
from picotron_ray.errors import DataError

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class JoinedSource:
    """Source as token files.

    Fields:
        tokens, documents: by part.
        duplicates: documents that were left out.
        digests: xxh3_128 by file.
        ended: whether files of ends tell documents apart, since their tokens hold the id of an end elsewhere.
    """

    tokens: dict[str, int]
    documents: dict[str, int]
    duplicates: int
    digests: dict[str, str]
    ended: bool


def first_ones(hashes: Sequence[npt.NDArray[np.uint64]]) -> Flags:
    """Whether each document is the first with its hash.

    Args:
        hashes: of the documents of each part, ``[documents, 2]``; together they take 16 bytes of memory each.

    >>> first_ones([np.array([[1, 1], [1, 2], [1, 1]], "u8"), np.array([[1, 2], [2, 2]], "u8")]).tolist()
    [True, True, False, False, True]
    """
    every = np.concatenate(hashes) if hashes else np.empty((0, 2), np.uint64)
    order = np.lexsort((every[:, 1], every[:, 0]))  # it is stable
    found = np.ones(len(every), np.bool_)
    found[order[1:]] = (every[order[1:]] != every[order[:-1]]).any(1)
    return found


def join_source(
    parts: Sequence[Path], kept: Sequence[Flags] | None, form: CacheForm, fraction: float, folder: Path
) -> JoinedSource:
    """Write a source's token files into an empty folder.

    Args:
        kept: of each part's documents; None: all are.
        form: of the parts.

    Raises DataError where no token is left.
    """
    opened = [open_part(place, form) for place in parts]
    counts = [0, 0]
    with ExitStack() as stack:
        sides: list[dict[str, BinaryIO]] = [
            {kind: stack.enter_context((folder / f"{name}.{kind}").open("wb")) for kind in form.kinds}
            for name in SPLITS
        ]
        for at, part in enumerate(opened):
            mine = np.ones(len(part.ends), np.bool_) if kept is None else kept[at]
            for side in (0, 1):
                chosen = mine & (part.held == side)
                counts[side] += _append(part, chosen, sides[side], counts[side])
    if not fill_both(form, fraction, folder):
        raise DataError("data.path: no document has a token; give other files")
    documents = sum(len(part.ends) for part in opened)
    duplicates = 0 if kept is None else documents - sum(int(mine.sum()) for mine in kept)
    return _named(form, folder, duplicates, sum(part.end_ids for part in opened) > documents)


def _append(part: WrittenPart, chosen: Flags, streams: dict[str, BinaryIO], before: int) -> int:
    """Append the chosen documents of a part.

    Args:
        before: tokens that are there already.

    Returns how many tokens these are.
    """
    starts = np.concatenate([np.zeros(1, np.int64), part.ends[:-1]])[: len(part.ends)]
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False])).astype(np.int8)))
    for first, last in edges.reshape(-1, 2).tolist():
        for kind, stream in part.streams.items():
            _copy(stream, int(starts[first]), int(part.ends[last - 1]), streams[kind])
    lengths = (part.ends - starts)[chosen]
    streams["ends"].write((np.cumsum(lengths) + before).astype(END).tobytes())
    return int(lengths.sum())


def _copy(stream: Any, first: int, last: int, target: BinaryIO) -> None:
    for at in range(first, last, READ_BYTES):
        target.write(np.ascontiguousarray(stream[at : min(last, at + READ_BYTES)]).data)


def _named(form: CacheForm, folder: Path, duplicates: int, ended: bool) -> JoinedSource:
    """Give the files the names that training looks for."""
    suffix, token = next(iter(form.kinds.items()))
    tokens, documents, digests = {}, {}, {}
    for name in SPLITS:
        made = (folder / f"{name}.{suffix}").rename(folder / f"{name}.bin")
        tokens[name] = made.stat().st_size // token.itemsize
        ends = folder / f"{name}.ends"
        documents[name] = ends.stat().st_size // END.itemsize
        if not ended:
            ends.unlink()
    for path in sorted(folder.iterdir()):
        digests[path.name] = file_digest(path)
    return JoinedSource(tokens, documents, duplicates, digests, ended)
