"""Figures in words: a number with its noun, bytes in the unit that shows them."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """A number and its noun, in the plural where it is not one.

    >>> counted(1, "node"), counted(2, "node"), counted(2, "micro-batch")
    ('1 node', '2 nodes', '2 micro-batches')
    """
    plural = f"{noun}{'es' if noun.endswith(('ch', 's', 'sh', 'x')) else 's'}"
    return f"{count:,} {noun if count == 1 else plural}"
