"""A process group of which only rank and size are asked."""

from __future__ import annotations


class Group:
    """Stands in for torch's: a rank among others."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size
