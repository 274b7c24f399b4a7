"""A bit that turns over in a worker's memory is found, its node is left, and nothing shows in the losses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.ray_runs import Watched, check_ledger, in_one_process, kill, losses, start, tiny_job

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.deep,
    # Ray's test Cluster leaves sockets to the garbage collector while it looks for free ports
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    from picotron_ray.runtime.ray_cluster.connect import connect_to

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    connect_to(cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def of_kind(watched: Watched, kind: str) -> list[dict[str, Any]]:
    return [event for event in watched.events if event["kind"] == kind]


def test_a_flipped_bit_is_found_its_rank_named_and_its_node_left(two_nodes: Any, tmp_path: Path) -> None:
    """The coordinator restarts afterwards, and stays off that node."""
    import ray

    flip = {"fault": "flip", "target": "worker:1", "step": 13, "phase": "forward"}
    job = tiny_job(
        "flipped",
        tmp_path,
        steps=4000,
        chaos=(flip,),
        debug={"replica_check_steps": 5},
        layout={"dp": "auto", "zero": 0, "micro_batch": 6},
        cluster={"max_workers": 2},
        checkpoint={"interval_steps": 10, "keep_last": 1000},
        evaluate={"interval_steps": 1000},
    )
    watched = start(job)
    watched.until(lambda status: of_kind(watched, "drain") and len(status["members"]) == 1)
    found = of_kind(watched, "replicas")
    first, settled = found[0], found[1]
    assert "replicas differ after step 15" in first["text"]
    assert "embed.weight in 1 element, the first of them 0 (rank 0: " in first["text"]
    assert first["text"].endswith("they agreed after step 10")
    assert "rank 1 held wrong values; computed again" in settled["text"]
    (node,) = settled["data"]["nodes"]
    kill(ray.get(watched.coordinator.pid.remote()))
    at = watched.until(lambda status: status["term"] == 2 and status["pages"])["step"]
    watched.until(lambda status: status["step"] > at + 100)
    assert {page["node"] for page in watched.status["pages"].values()}.isdisjoint({node})
    assert len(watched.status["members"]) == 1
    watched.coordinator.request.remote("stop")
    summary = watched.finish()
    told = [(failure["kind"], failure["target"]) for failure in summary["failures"]]
    assert (summary["status"], told) == ("stopped", [("diverged", "step 15")])
    assert [len(g["members"]) for g in summary["generations"]][:3] == [2, 2, 1]
    short = job.model_copy(update={"steps": 60})
    assert losses(job)[:60] == pytest.approx(in_one_process(short), rel=1e-9)
    check_ledger(job)
