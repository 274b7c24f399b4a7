"""Archive of a run that is relaunched again and again: the bytes of a day are bounded over all its terms."""

from __future__ import annotations

import numpy as np
import pytest

from picotron_ray.observability import archive
from picotron_ray.observability.archive import ArchiveSegment
from picotron_ray.observability.rank_table import COLUMNS, RankTable
from picotron_ray.observability.windows import TelemetryWindow
from picotron_ray.runtime.run_storage.telemetry_archive import ArchiveWriter
from tests.support.runs.archive_world import BEGAN_S, DAY_S, MemoryStorage

MOST_BYTES = 10 << 20


def large(at_s: float, draw: np.random.Generator) -> ArchiveSegment:
    """A segment of some 40 kB."""
    names = [f"figure_{at}" for at in range(60)]
    windows = [
        TelemetryWindow(at_s + at / 1000, "1.1", dict(zip(names, draw.random(60).tolist(), strict=True)))
        for at in range(150)
    ]
    return ArchiveSegment(tuple(windows))


@pytest.mark.parametrize("with_ranks", [False, True])
def test_a_day_with_a_relaunch_every_five_minutes_brings_at_most_10_mib(with_ranks: bool) -> None:
    storage, draw = MemoryStorage(), np.random.default_rng(3)
    table = RankTable.of(draw.random((4096, len(COLUMNS))).astype(np.float32))
    stored = 0
    for term in range(1, int(DAY_S / 300) + 1):
        storage.now_s = BEGAN_S + 300.0 * term
        writer = ArchiveWriter(storage, term, lambda: True)
        segment = large(storage.now_s, draw)
        stored += writer.put(segment, storage.now_s, last=True)
        if with_ranks:
            writer.put_ranks(table, f"{term}.1", storage.now_s, last=True)
    assert stored > 3, "the end of a run is kept where the budget allows it"
    assert storage.most_in(DAY_S) <= MOST_BYTES
    assert sum(len(data) for data, _ in storage.objects.values()) <= MOST_BYTES


@pytest.mark.parametrize("torn", [False, True])
def test_a_term_begins_with_the_debt_of_the_one_before(torn: bool) -> None:
    storage, draw = MemoryStorage(), np.random.default_rng(3)
    first = ArchiveWriter(storage, 1, lambda: True)
    while first.put(large(storage.now_s, draw), storage.now_s, last=True):
        pass
    if torn:  # so that nobody knows the debt: what lies there counts
        key = max(storage.objects)
        storage.objects[key] = storage.objects[key][0][:-1], storage.now_s
    second = ArchiveWriter(storage, 2, lambda: True)
    assert not second.put(large(storage.now_s, draw), storage.now_s, last=True)
    storage.now_s += archive.END_BYTES * DAY_S / archive.DAY_BYTES
    assert ArchiveWriter(storage, 3, lambda: True).put(large(storage.now_s, draw), storage.now_s, last=True)
