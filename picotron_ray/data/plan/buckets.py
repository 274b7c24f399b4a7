"""Length buckets: rows of documents of about one length, each in a slot of its own, padded to the slot.

Rows have one length whatever the bucket: a bucket of half-length documents has two slots a row, and so on. So
a step has as many tokens as ever, its rows come from all buckets, and nothing of the layout changes with
them. Within a bucket documents are taken in an order shuffled by seed, never sorted.
"""

from __future__ import annotations

import numpy as np

from picotron_ray.data.plan.packing import Numbers, PackedRows
from picotron_ray.data.shuffle import sample_index


def bucket_widths(room: int) -> tuple[int, ...]:
    """Return the slots of rows of ``room`` tokens that are halved as long as one holds 16 tokens, ascending.

    >>> bucket_widths(129)
    (16, 32, 64, 129)
    """
    found = [room]
    while room // (parts := 1 << len(found)) >= 16:
        found.append(room // parts)
    return tuple(reversed(found))


def fill_buckets(
    lengths: Numbers, room: int, seed: int, widths: tuple[int, ...], most: int | None = None
) -> PackedRows:
    """Put pieces into slots of rows of ``room`` tokens.

    Args:
        lengths: tokens of each piece, at most the widest slot.
        widths: slots of each bucket, ascending; a piece goes into the narrowest that holds it.
        most: pieces of a row at most; None: as many as it has slots.

    >>> rows = fill_buckets(np.array([5, 3, 2, 4]), room=8, seed=0, widths=(4, 8))
    >>> sorted(sorted(rows.row(at).tolist()) for at in range(len(rows)))
    [[0], [1, 2], [3]]
    """
    if len(lengths) and int(lengths.max()) > widths[-1]:
        raise ValueError(f"saw a piece of {int(lengths.max())} tokens, expected at most {widths[-1]}")
    shuffled = sample_index(seed, 0, np.arange(len(lengths)), len(lengths)) if len(lengths) else lengths
    bucket = np.searchsorted(widths, lengths[shuffled])
    parts, counts, slots = [], [], []
    for number, width in enumerate(widths):
        mine = shuffled[bucket == number]
        full = max(1, min(room // width, most or room))
        rows = -(-len(mine) // full)
        parts.append(mine)
        counts.append(np.minimum(full, len(mine) - full * np.arange(rows)))
        slots.append(np.full(rows, width))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(counts))])
    return PackedRows(offsets.astype(np.int64), np.concatenate(parts), np.concatenate(slots).astype(np.int64))
