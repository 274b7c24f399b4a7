"""``picotron-ray probe`` as a user runs it: on a Ray of its own that is gone afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.errors import ConfigError
from picotron_ray.planner.hardware_profile import load_profile


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "picotron_ray.cli", *words]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=env, check=False)


def test_a_probe_measures_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    done = run("probe", "--workers", "2", "--budget-s", "4", "--out", str(path))
    assert done.returncode == 0, done.stderr
    found = load_profile(path)
    workers = sum(node.workers for node in found.nodes)
    assert workers == min(2, len(os.sched_getaffinity(0)))
    assert {"fp32"} <= set(found.dtypes())
    assert found.device == "cpu"
    assert found.block_s > 0
    assert bool(found.collectives) == bool(found.messages) == (workers > 1)
    assert found.host_bytes_s > 1e8
    assert all(link == "loopback" and fit.bytes_s > 1e7 for link, fit in found.links().items())
    assert all(node.ram_bytes > 0 and node.disk_bytes_s > 0 for node in found.nodes)
    assert workers == 1 or "a message over loopback: " in done.stdout
    assert "fp32 " in done.stdout
    assert (
        f"written to {path}; next: picotron-ray plan CONFIG --gpus {workers} --hardware {path}" in done.stdout
    )
    assert not list(Path("/dev/shm").glob("picotron_ray-*/probe-*"))
    out = tmp_path / "plan.json"
    planned = run("plan", "tiny", "--gpus", "2", "--hardware", str(path), "--json", str(out))
    assert planned.returncode == 0, planned.stderr
    assert json.loads(out.read_text())["step_s"] > 0


def test_a_folder_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = run("probe", "--out", str(tmp_path / "none" / "here.json"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: --out: saw ")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_node_that_tells_nothing_of_its_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from picotron_ray.runtime.hardware_probe import probe
    from picotron_ray.runtime.ray_cluster.placement import NodeView

    def nodes(*hosts: str) -> list[tuple[Any, int]]:
        return [(NodeView(host, host, 8, 8, 8, 8), 8) for host in hosts]

    monkeypatch.setattr(probe, "ask_nodes", lambda nodes, work, *_: {"a": object()})
    with pytest.raises(ConfigError, match="probe: saw no answer of b, c about its GPUs"):
        probe._idle_gpus(nodes("c", "a", "b"), None)


@pytest.mark.parametrize(
    ("free", "gpus", "needs", "line"),
    [
        (
            8,
            0,
            (1, 1),
            "saw no GPU on 2 nodes, expected one for --device cuda; say --device cpu, or add a node",
        ),
        (
            0.5,
            0,
            (1, 0),
            "saw no node with room for a worker of 1 CPU now, expected one; wait until other work",
        ),
        (8, 1, (4, 1), "saw no node with room for a worker of 4 CPUs and 1 GPU now"),
        (
            8,
            0,
            (16, 0),
            "saw no node as large as a worker of 16 CPUs, the largest has 8 CPUs, expected one; lo",
        ),
    ],
)
def test_a_machine_without_gpus_is_told_from_a_busy_one(
    free: float, gpus: int, needs: tuple[int, int], line: str
) -> None:
    from picotron_ray.runtime.hardware_probe import probe
    from picotron_ray.runtime.ray_cluster.placement import NodeView, WorkerNeeds

    nodes = [NodeView(host, host, 8, gpus, free, 0) for host in ("a", "b")]
    assert not probe._slots(nodes, WorkerNeeds(*needs), 8)
    assert f"probe: {line}" in probe._why_no_slots(nodes, WorkerNeeds(*needs))
