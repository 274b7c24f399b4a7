"""Two nodes: one goes with everything on it, the other goes on; one comes, and the run grows again.

Then the new one goes together with the coordinator: the next term finds neither it nor its rendezvous store,
while Ray still holds it to be alive.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.schema.job import JobConfig
from tests.support.runs.ray_runs import check_ledger, kill, losses, start, tiny_job

pytestmark = [
    pytest.mark.timeout(400),
    # Ray's test Cluster leaves sockets to the garbage collector while it looks for free ports
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
# fewer workers than on the other node, which therefore hosts rank 0 and the rendezvous store
HEAD = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    from picotron_ray.runtime.ray_cluster.connect import connect_to

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20)
    cluster.wait_for_nodes()
    connect_to(cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def unplug(cluster: Any, job: JobConfig) -> None:
    """The worker node goes, and what it held in memory with it."""
    from picotron_ray.runtime.ray_cluster.names import node_folder

    (gone,) = cluster.worker_nodes
    cluster.remove_node(gone, allow_graceful=False)
    shutil.rmtree(node_folder(job.snapshot.folder, job.name, gone.node_id), ignore_errors=True)


def test_a_node_goes_another_joins_and_goes_with_the_coordinator(two_nodes: Any, tmp_path: Path) -> None:
    import ray

    job = tiny_job(
        "nodes",
        tmp_path,
        steps=100_000,
        checkpoint={"interval_steps": 100_000},
        cluster={"max_workers": 3},
        elastic={"node_timeout_s": 3.0},
    )
    watched = start(job)
    # the nodes' heartbeats come by themselves: the first ten steps may be done before the second one's first
    full = watched.until(lambda s: s["step"] >= 10 and len(s["members"]) == 3 and len(s["pages"]) == 3)
    assert len({page["node"] for page in full["pages"].values()}) == 2
    unplug(two_nodes, job)
    watched.until(lambda s: len(s["members"]) == 1 and s["step"] > full["step"] + 10)
    half = watched.until(lambda s: s["failures"][-1]["kind"] == "node-lost")
    assert half["failures"][-1]["lost_steps"] <= 1  # the other node's replicas hold everything
    assert any("steps lost" in event["text"] for event in watched.events)

    two_nodes.add_node(num_cpus=2, object_store_memory=100 * 2**20)
    grown = watched.until(lambda s: len(s["members"]) == 3 and s["step"] > half["step"] + 10)
    # the coordinator was on the head, so losing the other node never took it along
    assert grown["term"] == 1

    pid = ray.get(watched.coordinator.pid.remote())
    unplug(two_nodes, job)
    kill(pid)
    watched.events.clear()
    watched.until(lambda s: s["term"] == 2 and len(s["members"]) == 1 and s["step"] > grown["step"] + 10)
    watched.coordinator.request.remote("stop")
    summary = watched.finish()
    assert summary["status"] == "stopped"
    assert len(losses(job)) == summary["steps"]
    check_ledger(job)


def drain(cluster: Any, seconds: int) -> str:
    """Ray gives notice to the worker node; returns its id."""
    (going,) = cluster.worker_nodes
    ray_command = [str(Path(sys.executable).parent / "ray"), "drain-node", "--address", cluster.address]
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    when = ["--node-id", going.node_id, "--deadline-remaining-seconds", str(seconds)]
    subprocess.run([*ray_command, *why, *when], check=True, capture_output=True, env=os.environ, timeout=60)
    return str(going.node_id)


def pre_stop(cluster: Any, seconds: int) -> str:
    """The worker node's pod is about to end; returns the node's id. Waits until the node was left."""
    from picotron_ray.runtime.ray_cluster import pre_stop

    (going,) = cluster.worker_nodes
    assert pre_stop.drain(cluster.address, going.node_id, seconds), "not left in time"
    return str(going.node_id)


@pytest.mark.deep
@pytest.mark.parametrize("notice", [drain, pre_stop])
def test_a_drained_node_is_left_and_can_go_before_its_deadline(
    two_nodes: Any, tmp_path: Path, notice: Callable[[Any, int], str]
) -> None:
    """Nobody has to kill it: workers, agent, slots and Ray's resources there are given back."""
    import ray

    from picotron_ray.runtime.ray_cluster.names import node_folder

    job = tiny_job("drained", tmp_path, steps=100_000, cluster={"max_workers": 3})
    watched = start(job)
    full = watched.until(lambda s: s["step"] >= 10 and len(s["members"]) == 3 and len(s["pages"]) == 3)
    asked = time.monotonic()
    node = notice(two_nodes, 60)
    watched.until(lambda s: len(s["members"]) == 1 and s["step"] > full["step"] + 10)
    watched.until(lambda s: any(event["kind"] == "drained" for event in watched.events))

    def held() -> bool:  # Ray takes a draining node away as soon as nothing is left on it
        alive = any(entry["Alive"] for entry in ray.nodes() if entry["NodeID"] == node)
        return alive or node_folder(job.snapshot.folder, job.name, node).exists()

    while held():
        assert time.monotonic() - asked < 50, "the node is still held when its time is nearly over"
        time.sleep(0.2)
    assert watched.look()["failures"] == [], "nothing failed"
    watched.coordinator.request.remote("stop")
    summary = watched.finish()
    assert (summary["status"], summary["failures"]) == ("stopped", [])
    assert [len(g["members"]) for g in summary["generations"]][-2:] == [3, 1]
    assert len(losses(job)) == summary["steps"]
    check_ledger(job)
