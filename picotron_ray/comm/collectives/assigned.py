"""Collectives that functions of a bare group go by: those of its axis, once the engine has assigned them.

Modules and autograd functions know their group alone. What torch.compile traces knows no assignment: such
collectives are the backend's, and not counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from picotron_ray.comm.collectives.collectives import Collectives
from picotron_ray.comm.collectives.pending import PENDING
from picotron_ray.comm.wire_bytes import SENT, ring_share, size_bytes

_ASSIGNED: dict[Any, Collectives] = {}


def assign(group: Any, collectives: Collectives) -> None:
    """Let functions of ``group`` go by ``collectives``, until `withdraw`."""
    _ASSIGNED[group] = collectives


def withdraw(group: Any) -> None:
    """Forget a group, before it is destroyed."""
    _ASSIGNED.pop(group, None)


def assigned(group: Any) -> Collectives | None:
    """The collectives of ``group``; None: the backend's."""
    return None if torch.compiler.is_compiling() else _ASSIGNED.get(group)


class Issued:
    """Operation under way, whose bytes count for the axis of ``group``."""

    def __init__(self, group: Any, sent_bytes: int) -> None:
        found = assigned(group)
        self._noted = found is not None
        if found is not None:
            SENT.add(found.purpose, sent_bytes)
            PENDING.issue()

    def end(self) -> None:
        """Hear that it was waited for."""
        if self._noted:
            self._noted = False
            PENDING.end()


def count_all_reduce(group: Any, x: Tensor) -> None:
    """Count a sum of ``x`` by the backend for the axis of ``group``."""
    found = assigned(group)
    if found is not None:
        SENT.add(found.purpose, 2 * ring_share(size_bytes(x), group.size()))
