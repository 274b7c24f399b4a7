"""Ray's own autoscaler, whose machines are processes here: what a run misses makes it add nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import check_ledger, start, tiny_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # Ray's test cluster leaves its head's pipes to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture
def autoscaled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A head without CPU slots, and up to two nodes of two slots each, none of which is there yet."""
    import ray
    from ray.cluster_utils import AutoscalingCluster

    from picotron_ray.runtime.connect import connect_to

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    nodes = {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 2}
    cluster = AutoscalingCluster(
        head_resources={"CPU": 0}, worker_node_types={"small": nodes}, autoscaler_v2=True
    )
    cluster.start(override_env={"RAY_AUTH_MODE": "disabled"})
    connect_to("auto")
    yield
    ray.shutdown()
    cluster.shutdown()


def test_a_run_begins_on_nodes_that_come_for_it(autoscaled: None, tmp_path: Path) -> None:
    import ray

    assert ray.cluster_resources().get("CPU", 0) == 0
    job = tiny_job("scaled", tmp_path, cluster={"max_workers": 3, "autoscale": True})
    watched = start(job)
    summary = watched.finish()
    assert summary["status"] == "finished", watched.log()
    assert [len(generation["members"]) for generation in summary["generations"]] == [3]
    check_ledger(job)
