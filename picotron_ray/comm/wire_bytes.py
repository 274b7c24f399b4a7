"""Bytes that this process puts on the wire, counted where they are handed to the transport.

A send counts what it sends. Collectives of the backend are counted by what their algorithm sends from one
rank: a ring's all-reduce of ``n`` bytes over ``R`` ranks 2 (R - 1) / R x n, and each half of it half of
that (Thakur et al. 2005, section 4). What gloo sends was compared with the kernel's own counts
(tests/gloo/comm/reducers).
"""

from __future__ import annotations

import threading
from collections import Counter


class WireBytes:
    """Counter of sent bytes by purpose; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: Counter[str] = Counter()

    def add(self, purpose: str, nbytes: int) -> None:
        """Count ``nbytes`` sent."""
        with self._lock:
            self._sent[purpose] += nbytes

    def sent(self, purpose: str | None = None) -> int:
        """Bytes sent until now, for one purpose or for all."""
        with self._lock:
            return self._sent.total() if purpose is None else self._sent[purpose]

    def by_purpose(self) -> dict[str, int]:
        """Bytes sent until now, for each purpose."""
        with self._lock:
            return dict(self._sent)


SENT = WireBytes()
"""Of this process, over all its generations."""
GRADIENTS = "gradients"
"""Purpose: sums of gradients over replicas."""
STAGES = "pp"
"""Purpose: what pipeline stages send each other in a training step."""


def ring_share(nbytes: int, ranks: int) -> int:
    """Bytes that one rank sends to gather or to reduce-scatter ``nbytes`` over ``ranks``.

    >>> ring_share(1000, 4)
    750
    """
    return nbytes * (ranks - 1) // ranks
