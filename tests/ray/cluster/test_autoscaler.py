"""Ray's own autoscaler, whose machines are processes here: what a run misses makes it add nodes."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.ray_runs import check_ledger, start, tiny_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


HEAD_ID = "head"
# what Ray's own test cluster writes; its template is not in every wheel, and it ends every Ray of the machine
CONFIG: dict[str, Any] = {
    "cluster_name": "scaled",
    "max_workers": 2,
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 1,
    "provider": {
        "type": "external",  # whose defaults are not read from a file
        "launch_multiple": True,
        "head_node_id": HEAD_ID,
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
    },
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "small": {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 2},
    },
    "head_node_type": "ray.head.default",
    "auth": {},
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "initialization_commands": [],
    "rsync_exclude": [],
    "rsync_filter": [],
    "docker": {},
}


@pytest.fixture
def autoscaled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A head without CPU slots, and up to two nodes of two slots each, none of which is there yet."""
    import ray

    from picotron_ray.runtime.ray_cluster import processes
    from picotron_ray.runtime.ray_cluster.connect import connect_to
    from tests.support.runs.ray_jobs import free_port

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    mark, port, folder = secrets.token_hex(16), free_port(), Path(tempfile.mkdtemp(prefix="pr-"))
    config = tmp_path / "autoscaler.json"
    address = f"{ray.util.get_node_ip_address()}:{port}"
    provider = {**CONFIG["provider"], "gcs_address": address}
    config.write_text(json.dumps({**CONFIG, "provider": provider}))
    environment = {
        **os.environ,
        processes.MARK: mark,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=0"]
    command += [f"--port={port}", f"--autoscaling-config={config}", f"--temp-dir={folder}"]
    command += ["--include-dashboard=false", "--disable-usage-stats", f"--object-store-memory={100 * 2**20}"]
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    deadline = time.monotonic() + 60
    while "Ray runtime started" not in (text := (folder / "head.log").read_text()):
        assert head.poll() is None, text
        assert time.monotonic() < deadline, text
        time.sleep(0.2)
    connect_to(address)
    yield
    ray.shutdown()
    processes.end_all(mark, head.pid, grace_s=0.0)
    head.wait()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_run_begins_on_nodes_that_come_for_it(autoscaled: None, tmp_path: Path) -> None:
    import ray

    assert ray.cluster_resources().get("CPU", 0) == 0
    job = tiny_job("scaled", tmp_path, cluster={"max_workers": 3, "autoscale": True})
    watched = start(job)
    summary = watched.finish()
    assert summary["status"] == "finished", watched.log()
    assert [len(generation["members"]) for generation in summary["generations"]] == [3]
    check_ledger(job)
