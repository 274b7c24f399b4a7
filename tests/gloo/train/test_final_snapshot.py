"""The last step of a generation is kept, also where a dead coordinator's checkpoint still pins a slot."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from picotron_ray.checkpoint.snapshot.ledger_tail import LedgerTail
from picotron_ray.checkpoint.snapshot.slot_pool import SlotPool, list_slots
from picotron_ray.checkpoint.torch_state import StateTensor
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, Shard
from picotron_ray.train import loop as loop_module
from picotron_ray.train import snapshot as snapshot_module
from picotron_ray.train.loop import Loop, Requests
from picotron_ray.train.snapshot import Snapshotter, SnapshotWriter
from picotron_ray.train.step_sync import STOP

STATE = [StateTensor(Shard("a", "float32", (4,), Box((0,), (4,))), torch.zeros(4), True)]


@pytest.fixture
def snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Snapshotter:
    """Of one rank with three slots: step 1 is pinned, 2 is complete, 3 is sealed here and nobody knows it."""
    monkeypatch.setattr(snapshot_module, "RELEASE_WAIT_S", 0.0)
    writer = SnapshotWriter.of((1, 1), 0, Layout(), ["n1"], 4)
    pool = SlotPool(tmp_path, "w1", 3, 1 << 16)
    taken = Snapshotter(pool, writer, STATE, (1, 1, -1), lambda *_: None, lambda *_: None)
    for step in (1, 2, 3):
        assert taken.begin(step, (), pinned=step == 1)
        taken.wait_copied()
        taken.observe(step - 1)
    return taken


def test_it_takes_the_place_of_what_all_ranks_have_newer(
    snapshots: Snapshotter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    def exchange(mine: Any, *_: Any) -> Any:
        told.append(mine.sealed)
        return SimpleNamespace(sealed=mine.sealed, flags=mine.flags)

    monkeypatch.setattr(loop_module, "exchange", exchange)
    loop = Loop.__new__(Loop)
    loop.page, loop.tail = SimpleNamespace(phase=lambda name: None), LedgerTail()  # type: ignore[assignment]
    loop.layout, loop.device = Layout(), torch.device("cpu")
    loop.snapshots, loop.requests = snapshots, Requests()
    loop.engine = SimpleNamespace(settle=lambda: told.append(-7))  # type: ignore[assignment]
    loop.check_peers = lambda: told.append(-8)
    loop.requests.add(STOP)
    loop._final_snapshot(4)
    assert told == [3, -8, -7], "all ranks take part in both"
    assert loop.requests.take() == STOP, "for whoever reads it"
    kept = {header.step for _, header in list_slots(tmp_path)}
    assert kept == {1, 3, 4}
    snapshots.close()


def test_without_word_of_the_others_there_is_no_place(snapshots: Snapshotter) -> None:
    assert not snapshots.flush(4, (), pinned=True)
    snapshots.observe(3)
    assert snapshots.flush(4, (), pinned=True)
    snapshots.close()
