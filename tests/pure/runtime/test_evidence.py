"""Evidence of a hang at the coordinator: taken once, before anybody leaves, kept, and never in the way."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.config.schema.service import ElasticConfig
from picotron_ray.coordinator.messages import GenerationId
from picotron_ray.errors import StorageUnavailableError
from picotron_ray.runtime.coordinator import evidence
from picotron_ray.runtime.coordinator.evidence import Evidence
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.heartbeat import Page, read_page
from picotron_ray.runtime.node_agent import evidence as agent_evidence
from tests.support.runs.coordinator_world import job

ONE, TWO = GenerationId(1, 1), GenerationId(1, 2)


class Cluster:
    """Answers of agents, and what was kept of them."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[tuple[GenerationId, int, int]] = []
        self.kept: list[tuple[str, str, bool]] = []
        self.storage: Storage = LocalStorage(str(folder / "runs"), "r")
        self.folder = folder
        self.evidence = Evidence(self.ask, lambda: self.storage, lambda *found: self.kept.append(found))
        self.evidence.begin(3, folder)

    async def ask(self, generation: GenerationId, most: int, term: int) -> list[dict[str, Any]]:
        self.asked.append((generation, most, term))
        await asyncio.sleep(0.01)
        return [{"node": "a", "worker": "w0", "stacks": "in forward"}, {"node": "b", "problem": "no answer"}]

    def run(self, *calls: Any) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(call() for call in calls))
            await asyncio.to_thread(self.evidence.close)

        asyncio.run(all_of_them())


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_stacks_are_kept_here_and_in_storage_under_one_name(cluster: Cluster) -> None:
    stalls = [lambda: cluster.evidence.before(ONE, 2048, "w0 in forward")] * 3
    cluster.run(*stalls)
    assert cluster.asked == [(ONE, (16 << 20) // 2048, 3)], "once, however many stalls are reported"
    name = "evidence/1-1-3.1.json"
    assert cluster.kept == [(name, "1.1", True)]
    found = json.loads((cluster.folder / name).read_text())
    assert found == json.loads(cluster.storage.get(name))
    assert (found["generation"], found["why"], len(found["ranks"])) == ("1.1", "w0 in forward", 2)
    again = Cluster(cluster.folder)
    assert again.kept == [(name, "1.1", False)], "a restarted coordinator knows of it"
    (cluster.folder / "evidence" / "1-1-3.2.json").write_text("{}")  # of the members that were killed then
    record = RunRecord(job())
    Evidence(cluster.ask, lambda: cluster.storage, record.evidence).begin(4, cluster.folder)
    assert record.status(0)["events"] == [], "and tells none of it as news"


def test_one_worker_may_say_at_most_64_kib(cluster: Cluster) -> None:
    cluster.run(lambda: cluster.evidence.before(TWO, 2, "x"))
    assert cluster.asked[0][1] == 64 << 10


def test_an_outage_of_storage_or_a_full_disk_keeps_no_hang_from_being_ended(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    def down(*words: Any) -> None:
        raise StorageUnavailableError("down")

    cluster.storage.put = down  # type: ignore[method-assign]
    (cluster.folder / "evidence").write_text("in the way")
    cluster.run(lambda: cluster.evidence.before(ONE, 2, "x"))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert len(cluster.kept) == 1


def test_evidence_is_bounded(cluster: Cluster) -> None:
    async def add() -> None:
        cluster.evidence.add(ONE, [], "nothing")
        for _ in range(evidence.MOST_KEPT + 5):
            cluster.evidence.add(ONE, [{"worker": "w0"}], "killed")

    cluster.run(add)
    assert len(cluster.kept) == len(list((cluster.folder / "evidence").iterdir())) == evidence.MOST_KEPT


def test_a_hold_counts_from_the_steps_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its phase is entered again with each exchange, which renews its limit: it was said to last 0.0 s."""
    page = Page(tmp_path / "w0.page", ElasticConfig())
    page.begin(term=1, n=1, rank=0, step=4)
    page.count_step(0.5)
    page.phase("hold", 60.0)
    later_s, now_s = time.time() + 12.0, time.monotonic()
    seen = read_page(tmp_path / "w0.page")
    assert seen is not None
    monkeypatch.setattr(time, "time", lambda: later_s)
    assert agent_evidence._stands_s(seen, now_s) == pytest.approx(12.0, abs=1.0)
    page.phase("sync")
    seen = read_page(tmp_path / "w0.page")
    assert seen is not None
    assert agent_evidence._stands_s(seen, now_s + 2.0) == pytest.approx(2.0, abs=1.0)
