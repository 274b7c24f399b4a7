"""Bytes that this process puts on the wire, counted where they are handed to the transport.

A send counts what it sends. Collectives of the backend are counted by what their algorithm sends from one
rank: a ring's all-reduce of ``n`` bytes over ``R`` ranks 2 (R - 1) / R x n, and each half of it half of
that (Thakur et al. 2005, section 4). What gloo sends was compared with the kernel's own counts
(tests/gloo/comm). Collectives that torch.compile has put into a graph of its own pass by here, and count
nothing.
"""

from __future__ import annotations

import threading
from collections import Counter

from torch import Tensor

GRADIENTS = "gradients"
"""Sums over replicas, ZeRO's reduce-scatters, error feedback."""
PARAMETERS = "parameters"
"""ZeRO's all-gathers of weights."""
ACTIVATIONS = "tp"
"""Tensor and sequence parallelism, the loss over a cut vocabulary, partial gradients."""
CONTEXT = "cp"
"""Keys and values, and their gradients."""
EXPERTS = "ep"
"""Rows on their way to experts and back, and how many they are."""
PIPELINE = "pp"
"""Hidden states between stages and their gradients; tied weights of two stages."""
OPTIMIZER = "optimizer"
"""Matrices that an optimizer needs whole."""
STEP = "sync"
"""The exchange that ends a step."""
PURPOSES = (GRADIENTS, PARAMETERS, ACTIVATIONS, CONTEXT, EXPERTS, PIPELINE, OPTIMIZER, STEP)
"""All of them, in one order."""


class WireBytes:
    """Counter of sent bytes by purpose; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: Counter[str] = Counter(dict.fromkeys(PURPOSES, 0))

    def add(self, purpose: str, nbytes: int) -> None:
        """Count ``nbytes`` sent."""
        with self._lock:
            self._sent[purpose] += nbytes

    def sent(self, purpose: str | None = None) -> int:
        """Bytes sent until now, for one purpose or for all."""
        with self._lock:
            return self._sent.total() if purpose is None else self._sent[purpose]

    def by_purpose(self) -> dict[str, int]:
        """Bytes sent until now for each of `PURPOSES`, in their order; only ever growing."""
        with self._lock:
            return dict(self._sent)


SENT = WireBytes()
"""Of this process, over all its generations."""


def ring_share(nbytes: int, ranks: int) -> int:
    """Bytes that one rank sends to gather or to reduce-scatter ``nbytes`` over ``ranks``.

    >>> ring_share(1000, 4)
    750
    """
    return nbytes * (ranks - 1) // ranks


def size_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
