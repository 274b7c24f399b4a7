"""The devices at hand, and a pool of processes for tests of several ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from tests.conftest import REHEARSAL
from tests.support.gloo.pool import Pool

REHEARSED_RANKS = 4


@dataclass(frozen=True)
class Devices:
    """Devices of one kind, ``cuda`` or ``cpu``, and how many ranks they are enough for."""

    kind: str
    count: int

    def need(self, ranks: int) -> None:
        """Skip a test of more ranks than there are devices."""
        if ranks > self.count:
            pytest.skip(f"needs {ranks} devices, saw {self.count}")

    def first(self) -> torch.device:
        """The one of this process."""
        return torch.device(self.kind, 0) if self.kind == "cuda" else torch.device("cpu")


@pytest.fixture(scope="session")
def devices() -> Devices:
    """All GPUs of this machine; in a rehearsal, CPUs."""
    if os.environ.get(REHEARSAL) == "cpu":
        return Devices("cpu", REHEARSED_RANKS)
    return Devices("cuda", torch.cuda.device_count())


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    living = Pool()
    living.reply_s = 300.0  # a first communicator, a first kernel
    yield living
    living.close()
