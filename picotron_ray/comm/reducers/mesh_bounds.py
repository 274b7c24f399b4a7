"""Bounds of the one-shot mesh, whose bytes and buffers grow with the number of ranks. Torch-free."""

from __future__ import annotations

RANKS = 8
"""Most ranks for which the selector tries it: each sends R - 1 times the buffer, less than 2 in a ring."""
ROOM_BYTES = 256 * 2**20
"""Buffers of one rank for what its peers send; larger sums take several rounds."""


def piece_elements(ranks: int, element_bytes: int) -> int:
    """Elements that are exchanged in one round, so that those of all ranks have room.

    >>> piece_elements(4, 4), piece_elements(1000, 4), piece_elements(10**9, 4)
    (16777216, 67108, 1)
    """
    return max(1, ROOM_BYTES // (ranks * element_bytes))


def room_bytes(size: int, ranks: int) -> int:
    """Bytes of buffers that one rank needs for a sum of ``size`` bytes.

    >>> room_bytes(1024, 4), room_bytes(2**30, 8)
    (4096, 268435456)
    """
    return min(size * ranks, ROOM_BYTES)
