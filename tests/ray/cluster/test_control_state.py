"""Ray's control service (GCS) goes and comes back while a run trains: its state is kept, nothing is lost.

What deploy/components/gcs-rocksdb and gcs-redis ask of KubeRay: RAY_gcs_storage=rocksdb with a folder that
stays, or RAY_REDIS_ADDRESS with a password. The Redis is Debian's, of this test alone.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
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


PASSWORD = "only-for-this-test"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[int]:
    """Port of a Redis that asks for `PASSWORD`."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    options = ["--port", str(port), "--bind", "127.0.0.1", "--requirepass", PASSWORD, "--save", ""]
    with subprocess.Popen([program, *options, "--dir", str(tmp_path)], stdout=subprocess.DEVNULL) as server:
        yield port
        server.terminate()


def answer(port: int, *commands: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall("".join(f"{command}\r\n" for command in (f"AUTH {PASSWORD}", *commands, "QUIT")).encode())
        with one.makefile("rb") as file:
            return file.read()


@pytest.fixture(params=["rocksdb", "redis"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A cluster whose control state is kept, and what tells whether there is any."""
    import ray
    from ray.cluster_utils import Cluster

    from picotron_ray.runtime.ray_cluster.connect import connect_to

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    there: Callable[[], bool]
    more: dict[str, str] = {}
    if request.param == "rocksdb":
        monkeypatch.setenv("RAY_gcs_storage", "rocksdb")
        monkeypatch.setenv("RAY_gcs_storage_path", str(tmp_path / "gcs"))
        there = lambda: any((tmp_path / "gcs").iterdir())  # noqa: E731
    else:
        port = request.getfixturevalue("redis")
        monkeypatch.setenv("RAY_REDIS_ADDRESS", f"127.0.0.1:{port}")
        more = {"redis_password": PASSWORD}
        there = lambda: b":0\r\n" not in answer(port, "DBSIZE")  # noqa: E731
    cluster = Cluster(initialize_head=True, head_node_args={**HEAD, **more})
    connect_to(cluster.address)
    yield cluster, there
    ray.shutdown()
    cluster.shutdown()


def test_a_run_trains_while_the_control_service_is_away(kept: Any, tmp_path: Path) -> None:
    cluster, there = kept
    job = tiny_job("gcs", tmp_path / "runs", steps=100_000, cluster={"max_workers": 2})
    watched = start(job)
    before = watched.until(lambda s: s["step"] >= 10 and len(s["members"]) == 2)
    assert there(), "Ray keeps its state elsewhere"
    cluster.head_node.kill_gcs_server()
    time.sleep(2)
    away = watched.look()
    assert away["step"] > before["step"], "no step while it was away"
    cluster.head_node.start_gcs_server()
    after = watched.until(lambda s: s["step"] > away["step"] + 50)
    assert (after["term"], after["failures"]) == (1, [])
    watched.coordinator.request.remote("stop")
    summary = watched.finish()
    assert (summary["status"], len(summary["generations"])) == ("stopped", 1)
    assert len(losses(job)) == summary["steps"]
    check_ledger(job)
