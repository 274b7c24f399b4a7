"""An outage of storage while a commit is restored: it is sat out, it is no hang, and a member may leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.schema.service import ElasticConfig, StorageConfig
from picotron_ray.errors import CorruptError, PeerLostError, StorageError, StorageUnavailableError
from picotron_ray.runtime import heartbeat
from picotron_ray.runtime.heartbeat import Page, PageView, read_page
from picotron_ray.runtime.worker import storage_wait
from picotron_ray.runtime.worker.storage_wait import StorageWait


class Bench:
    """A worker's page on a clock that only sleeping moves; storage is out until some time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.up_at, self.leave_at = 1000.0, 0.0, 1e9
        self.stalled: list[float] = []
        monkeypatch.setattr(storage_wait, "time", self)
        monkeypatch.setattr(heartbeat, "time", self)
        self.file = folder / "w1.page"
        self.page = Page(self.file, ElasticConfig())
        config = StorageConfig(retry_deadline_s=1, call_timeout_s=20)
        self.wait = StorageWait(self.page, config, self._leave_if_asked)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.view().stalled(self.now):
            self.stalled.append(self.now)

    def view(self) -> PageView:
        view = read_page(self.file)
        assert view is not None
        return view

    def _leave_if_asked(self) -> None:
        if self.now >= self.leave_at:
            raise PeerLostError("asked to leave")

    def work(self) -> str:
        if self.now < self.up_at:
            self.sleep(15.0)  # the call runs into its deadline
            raise StorageUnavailableError("down")
        return "state"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_an_outage_of_an_hour_is_sat_out_in_a_phase_of_its_own(bench: Bench) -> None:
    bench.page.phase("restore")
    bench.up_at = bench.now + 3600
    assert bench.wait.read(bench.work) == "state"
    assert bench.now >= bench.up_at
    assert bench.stalled == [], "nothing that its agent would call a hang"
    assert bench.view().phase == "storage"


def test_a_worker_that_makes_no_call_is_a_hang(bench: Bench) -> None:
    bench.wait.go_on()
    bench.sleep(39.0)
    assert bench.stalled == []
    bench.sleep(2.0)
    assert bench.stalled == [1041.0], "twice storage.call_timeout_s"


def test_every_answer_of_storage_starts_the_limit_anew(bench: Bench) -> None:
    bench.wait.go_on()
    for _ in range(5):
        bench.sleep(30.0)
        bench.page.storage_answered()
    assert bench.stalled == []
    bench.page.phase("forward")
    before = bench.view().phase_since_s
    bench.now += 1.0
    bench.page.storage_answered()
    assert bench.view().phase_since_s == before, "another phase is judged by its own length"


@pytest.mark.parametrize("error", [CorruptError("bad bytes"), StorageError("tensor w has another shape")])
def test_what_trying_again_does_not_mend_is_not_waited_out(bench: Bench, error: StorageError) -> None:
    def damaged() -> Any:
        raise error

    with pytest.raises(type(error), match=str(error)):
        bench.wait.read(damaged)
    assert bench.now == 1000


def test_a_member_that_is_asked_to_leave_does(bench: Bench) -> None:
    bench.up_at, bench.leave_at = 1e9, 1100.0
    with pytest.raises(PeerLostError):
        bench.wait.read(bench.work)
    assert bench.now < 1100 + 20 + 1
