"""Storage in memory that counts what is put, and telemetry of a run of many ranks in simulated time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from picotron_ray.checkpoint.storage.base import StoredObject
from picotron_ray.errors import NotFoundError, StorageError
from picotron_ray.observability.archive import WINDOWS, Segment
from picotron_ray.observability.rank_table import RankTable
from picotron_ray.observability.windows import TelemetryWindow, thinned
from picotron_ray.runtime.run_storage.telemetry_archive import ArchiveWriter

DAY_S = 86_400.0
BEGAN_S = 1_700_000_000.0


@dataclass
class MemoryStorage:
    """Objects in memory; ``now_s`` is its clock, and ``puts`` what was put when."""

    now_s: float = BEGAN_S
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    puts: list[tuple[float, int]] = field(default_factory=list)
    failing: StorageError | None = None
    fails_to_delete: StorageError | None = None
    most: int = 0
    where: str = "memory"

    def put(self, key: str, data: bytes) -> None:
        if self.failing:
            raise self.failing
        self.puts.append((self.now_s, len(data)))
        self.objects[key] = data, self.now_s
        self.most = max(self.most, len(self.objects))

    def put_if_absent(self, key: str, data: bytes) -> None:
        raise NotImplementedError

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise NotFoundError(key)
        return self.objects[key][0]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]

    def size(self, key: str) -> int | None:
        return len(self.objects[key][0]) if key in self.objects else None

    def list(self, prefix: str) -> Iterator[StoredObject]:
        if self.failing:
            raise self.failing
        found = sorted((k, v) for k, v in self.objects.items() if k.startswith(prefix))
        return iter([StoredObject(key, len(data), at) for key, (data, at) in found])

    def delete(self, key: str) -> None:
        if self.fails_to_delete:
            raise self.fails_to_delete
        self.objects.pop(key, None)

    def delete_many(self, keys: Sequence[str], until_s: float) -> Sequence[str]:
        raise NotImplementedError

    def most_in(self, span_s: float) -> int:
        """Most bytes that any span of that length saw."""
        most, first, held = 0, 0, 0
        for at_s, nbytes in self.puts:
            held += nbytes
            while self.puts[first][0] <= at_s - span_s:
                held -= self.puts[first][1]
                first += 1
            most = max(most, held)
        return most


class Telemetry:
    """Figures of a run of many ranks, drawn by seed: 60 figures a window, 8 slow ranks."""

    def __init__(self, ranks: int) -> None:
        self._draw = np.random.default_rng(7)
        self._names = ["loss", "step_s", "failures_total", *(f"figure_{at}" for at in range(57))]
        self.table = RankTable.of(self._draw.random((ranks, 14)).astype(np.float32))
        self._slowest = tuple(self.table.slowest(8))

    def window(self, at_s: float) -> TelemetryWindow:
        values = self._draw.random(len(self._names)).tolist()
        figures = {**dict(zip(self._names, values, strict=True)), "step": int(at_s - BEGAN_S)}
        return TelemetryWindow(at_s, "1.1", figures, self._slowest)


def event(at_s: float, seq: int, level: str = "info") -> dict[str, Any]:
    data = {"node": f"{seq:056x}", "step": seq}
    return {"seq": seq, "t": at_s, "level": level, "kind": "test", "text": f"event {seq}", "data": data}


def live(
    storage: MemoryStorage, days: float, window_s: float, commit_s: float, ranks: int, events: int = 1
) -> int:
    """Archive a run of so many days; returns the windows that there were.

    Args:
        events: per commit.
    """
    telemetry, writer = Telemetry(ranks), ArchiveWriter(storage, 1, lambda: True)
    waiting: list[TelemetryWindow] = []
    made = seq = 0
    told: tuple[dict[str, Any], ...] = ()
    next_commit_s = BEGAN_S + commit_s
    end_s = BEGAN_S + days * DAY_S
    while storage.now_s < end_s:
        storage.now_s += window_s
        waiting.append(telemetry.window(storage.now_s))
        made += 1
        if storage.now_s >= next_commit_s:
            next_commit_s += commit_s
            told = (*told, *(event(storage.now_s, seq + at) for at in range(events)))[-512:]
            seq += events
            if writer.put(Segment(tuple(waiting), told), storage.now_s):
                waiting, told = [], ()
            waiting = thinned(waiting, WINDOWS) if len(waiting) > 2 * WINDOWS else waiting
            writer.put_ranks(telemetry.table, "1.1", storage.now_s)
    writer.put(Segment(tuple(waiting), told), storage.now_s, last=True)
    return made
