"""Ray's control service (GCS) goes and comes back while a run trains: with its state on disk nothing is lost.

What deploy/components/gcs-rocksdb asks of KubeRay: RAY_gcs_storage=rocksdb and a folder that stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.ray_runs import check_ledger, losses, start, tiny_job

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(400),
    # Ray's test Cluster leaves sockets to the garbage collector while it looks for free ports
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
HEAD = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    from picotron_ray.runtime.ray_cluster.connect import connect_to

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_gcs_storage", "rocksdb")
    monkeypatch.setenv("RAY_gcs_storage_path", str(tmp_path / "gcs"))
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    connect_to(cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_run_trains_while_the_control_service_is_away(on_disk: Any, tmp_path: Path) -> None:
    job = tiny_job("gcs", tmp_path / "runs", steps=100_000, cluster={"max_workers": 2})
    watched = start(job)
    before = watched.until(lambda s: s["step"] >= 10 and len(s["members"]) == 2)
    assert any((tmp_path / "gcs").iterdir()), "Ray keeps its state elsewhere"
    on_disk.head_node.kill_gcs_server()
    time.sleep(2)
    away = watched.look()
    assert away["step"] > before["step"], "no step while it was away"
    on_disk.head_node.start_gcs_server()
    after = watched.until(lambda s: s["step"] > away["step"] + 50)
    assert (after["term"], after["failures"]) == (1, [])
    watched.coordinator.request.remote("stop")
    summary = watched.finish()
    assert (summary["status"], len(summary["generations"])) == ("stopped", 1)
    assert len(losses(job)) == summary["steps"]
    check_ledger(job)
