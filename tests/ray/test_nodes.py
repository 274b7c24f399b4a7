"""Two nodes: one goes with everything on it, the other goes on; one comes, and the run grows again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import check_ledger, losses, start, tiny_job

pytestmark = [
    pytest.mark.timeout(400),
    # Ray's test Cluster leaves sockets to the garbage collector while it looks for free ports
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
HEAD = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    from picotron_ray.runtime.connect import connect_to

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20)
    cluster.wait_for_nodes()
    connect_to(cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_node_is_removed_and_another_joins(two_nodes: Any, tmp_path: Path) -> None:
    from picotron_ray.runtime.names import node_folder

    job = tiny_job(
        "nodes",
        tmp_path,
        steps=100_000,
        checkpoint={"interval_steps": 100_000},
        elastic={"node_timeout_s": 3.0},
    )
    watched = start(job)
    full = watched.until(lambda s: s["step"] >= 10 and len(s["members"]) == 4)
    nodes = {page["node"] for page in full["pages"].values()}
    assert len(nodes) == 2
    gone = next(iter(two_nodes.worker_nodes))
    two_nodes.remove_node(gone, allow_graceful=False)
    shutil.rmtree(node_folder(job.snapshot.folder, job.name, gone.node_id), ignore_errors=True)
    watched.until(lambda s: len(s["members"]) == 2 and s["step"] > full["step"] + 10)
    half = watched.until(lambda s: s["failures"][-1]["kind"] == "node-lost")
    assert half["failures"][-1]["lost_steps"] <= 1  # the other node's replicas hold everything
    assert any("steps lost" in event["text"] for event in watched.events)

    two_nodes.add_node(num_cpus=2, object_store_memory=100 * 2**20)
    watched.until(lambda s: len(s["members"]) == 4 and s["step"] > half["step"] + 10)
    watched.coordinator.request.remote("stop")
    summary = watched.finish()
    assert summary["status"] == "stopped"
    # the coordinator was on the head, so losing the other node never took it along
    assert {generation["term"] for generation in summary["generations"]} == {1}
    assert len(losses(job)) == summary["steps"]
    check_ledger(job)
