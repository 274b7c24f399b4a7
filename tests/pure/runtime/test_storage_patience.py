"""A restarted coordinator that storage does not answer: it waits while workers train, and then ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from picotron_ray.coordinator.messages import Alert
from picotron_ray.errors import CorruptError, StorageError
from picotron_ray.runtime.coordinator import storage_patience
from picotron_ray.runtime.coordinator.storage_outage import StorageOutage
from picotron_ray.runtime.coordinator.storage_patience import StoragePatience
from tests.support.runs.coordinator_world import job


class Bench:
    """Storage that fails so many times, on a clock that goes on with every sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.trains_until, self.failures = 1000.0, 0.0, 0
        self.told: list[str] = []
        self.agents = True
        monkeypatch.setattr(storage_patience, "time", self)
        monkeypatch.setattr(storage_patience.asyncio, "sleep", self._sleep)

    def monotonic(self) -> float:
        return self.now

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds

    async def _activity(self) -> Any:
        if not self.agents:
            return "none"
        return "training" if self.now < self.trains_until else "idle"

    def _work(self) -> str:
        self.failures -= 1
        if self.failures >= 0:
            raise StorageError("down")
        return "term"

    def call(self, work: Any = None) -> str:
        config = job(storage__final_wait_s=100.0)
        patience = StoragePatience(config, self._activity, lambda *words: self.told.append(words[2]))
        return asyncio.run(patience.call(work or self._work))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_an_outage_is_waited_out_and_told_once_a_minute(bench: Bench) -> None:
    bench.failures = 6
    assert bench.call() == "term"
    assert bench.told == [
        "the coordinator cannot begin (down); trying for another 100 s, or for as long as training goes on"
    ]


def test_while_workers_train_nothing_is_ended(bench: Bench) -> None:
    bench.failures, bench.trains_until = 100, 1e9
    assert bench.call() == "term"
    assert bench.now > 1000 + 10 * 100
    assert len(bench.told) > 10


def test_once_nobody_trains_the_patience_ends(bench: Bench) -> None:
    bench.failures, bench.trains_until = 10_000, 1500.0
    with pytest.raises(StorageError, match="down"):
        bench.call()
    assert 1550 <= bench.now <= 1600


def test_a_first_launch_fails_at_once(bench: Bench) -> None:
    bench.failures, bench.agents = 1, False
    with pytest.raises(StorageError, match="down"):
        bench.call()
    with pytest.raises(CorruptError):
        bench.call(work=lambda: torn())
    assert bench.now == 1000


def torn() -> str:
    raise CorruptError("bad")


def test_an_object_that_reads_torn_is_waited_for_as_an_outage_is(bench: Bench) -> None:
    bench.trains_until = 1500.0

    def mended_at_last() -> str:
        return "term" if bench.now >= 1400 else torn()

    assert bench.call(work=mended_at_last) == "term"
    with pytest.raises(CorruptError, match="bad"):
        bench.call(work=torn)
    assert 1550 <= bench.now <= 1600, "once nobody trains the patience ends"


def test_the_wait_at_the_end_is_all_that_is_told_of_an_outage() -> None:
    """Whichever of the two comes first in its minute."""
    told: list[str] = []
    outage = StorageOutage(lambda level, kind, text, data: told.append(text))
    outage.failed(Alert("warning", "full", "storage", {}), 0.0)
    for second in range(200):
        if second % 60 == 5:
            outage.waited(second + 0.25)
        outage.failed(Alert("warning", "full", "storage", {}), float(second))
    assert len(told) == 1, "the first failure"
    outage.failed(Alert("warning", "full", "storage", {}), 185.25 + 120)
    assert len(told) == 2, "nobody waits any more"


def test_an_outage_is_told_once_a_minute_and_so_is_its_end() -> None:
    told: list[str] = []
    outage = StorageOutage(lambda level, kind, text, data: told.append(f"{level}: {text}"))
    outage.over(0.0)
    for second in range(0, 150, 2):
        outage.failed(Alert("warning", f"upload failed: {second}", "storage", {}), float(second))
    outage.over(150.0)
    outage.over(151.0)
    again = "; tried again while the run trains, then for storage.final_wait_s"
    assert told == [
        f"warning: upload failed: 0{again}",
        f"warning: upload failed: 60; storage has failed 31 times in 60 s{again}",
        f"warning: upload failed: 120; storage has failed 61 times in 120 s{again}",
        "info: storage works again: it failed 75 times in 150 s",
    ]
