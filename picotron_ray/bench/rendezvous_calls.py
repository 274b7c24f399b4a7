"""Calls of a rank to the rendezvous store in one generation, at any number of ranks, which are fake.

What torch's backends ask of the store themselves is not in it: NCCL reads one identifier for each
communicator, gloo the address of every peer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from picotron_ray.comm.process_groups import ProcessGroups


class _CountedStore(Store):
    """A store that counts what it is asked; all other ranks have arrived already."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.calls, self._ranks = Counter[str](), ranks

    def add(self, key: str, amount: int) -> int:
        self.calls["add"] += amount
        return self._ranks

    def set(self, key: str, value: Any) -> None:
        self.calls["set"] += 1

    def get(self, key: str) -> bytes:
        self.calls["get"] += 1
        return b""

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self.calls["wait"] += len(keys)

    def check(self, keys: list[str]) -> bool:
        self.calls["check"] += len(keys)
        return True


class _FakeGroups(ProcessGroups):
    """Process groups whose peers are fake and say what this rank says."""

    counted: _CountedStore
    gathers = 0

    def _connect_store(self) -> None:
        self.counted = _CountedStore(self.world_size)
        self._store = self.counted  # type: ignore[assignment]

    def all_gather(self, values: Tensor) -> Tensor:
        self.gathers += 1
        return values.expand(self.world_size, *values.shape)


def rendezvous_calls(ranks: int, formed: int = 3) -> tuple[int, int]:
    """Count one rank's calls to the store, and its gathers of addresses, by a backend that needs none.

    Args:
        formed: times that further groups are made.
    """
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    assert fake_pg
    groups = _FakeGroups("", 0, "", 0, ranks, backend="fake", device=torch.device("cpu"))
    groups.connect()
    try:
        for _ in range(formed):
            with groups.forming():
                pass
    finally:
        groups.close()
    return sum(groups.counted.calls.values()), groups.gathers
