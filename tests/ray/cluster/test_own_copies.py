"""Three nodes with a replica each: whoever has a copy on its own node takes the state from there."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.ray_runs import check_ledger, losses, start, tiny_job

pytestmark = [
    pytest.mark.timeout(300),
    # Ray's test Cluster leaves sockets to the garbage collector while it looks for free ports
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
SERVED = re.compile(r"^picotron_node_served_snapshot_bytes_total\{.*\} (\S+)$", re.MULTILINE)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    from picotron_ray.runtime.ray_cluster.connect import connect_to

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    for _ in range(2):
        found.add_node(**NODE)
    found.wait_for_nodes()
    connect_to(found.address)
    yield found
    ray.shutdown()
    found.shutdown()


def served(status: dict[str, Any]) -> list[float]:
    """Bytes that each agent's shard service has handed out, as its metrics endpoint says."""
    found = []
    for who, address in status["metrics"]["endpoints"].items():
        if who == "coordinator":
            continue
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as page:
            found += [float(value) for value in SERVED.findall(page.read().decode())]
    return found


@pytest.mark.deep
@pytest.mark.deep  # half a minute; tests/pure/runtime/test_slot_restore.py has the rule
def test_replicas_restore_from_their_own_nodes(cluster: Any, tmp_path: Path) -> None:
    """One of the three workers is killed; its replacement's node has slept through the newest state."""
    job = tiny_job(
        "own-copies",
        tmp_path,
        steps=100_000,
        checkpoint={"interval_steps": 100_000},
        cluster={"max_workers": 3, "start_timeout_s": 240.0},
    )
    watched = start(job)
    full = watched.until(lambda s: s["step"] >= 10 and len(s["members"]) == 3 and len(s["pages"]) == 3)
    assert len({page["node"] for page in full["pages"].values()}) == 3
    name, pid = next(iter(watched.pids().items()))
    os.kill(pid, signal.SIGKILL)
    fewer = watched.until(lambda s: name not in s["members"] and s["step"] > full["step"] + 10)
    assert served(fewer) == [0.0, 0.0, 0.0], watched.log()
    assert {failure["restored_from"] for failure in fewer["failures"]} == {"slots"}
    again = watched.until(lambda s: len(s["members"]) == 3)
    status = watched.until(lambda s: s["step"] > again["step"] + 10)
    once, *others = sorted(served(status), reverse=True)
    assert once > 0, "the newcomer's node held no copy"
    assert others == [0.0, 0.0], watched.log()
    watched.coordinator.request.remote("stop")
    summary = watched.finish()
    assert summary["status"] == "stopped"
    assert len(losses(job)) == summary["steps"]
    check_ledger(job)
