"""The cluster of a plan, by hand, and the overlay that is written from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from picotron_ray.cli import app
from picotron_ray.config.load import load_job
from picotron_ray.planner import cluster_size as sizes
from picotron_ray.planner.cluster_size import cluster_size, size_patches, spares
from picotron_ray.planner.hardware import hardware
from picotron_ray.planner.plan import PlanReport, plan
from picotron_ray.planner.snapshot_room import slot_estimate

OVERLAY = Path(__file__).parents[3] / "deploy/overlays/gpu/cluster/size.yaml"


@pytest.fixture(scope="module")
def found() -> PlanReport:
    job = load_job("llama-3-8b", ["data.path=unread", "checkpoint.interval_steps=100"])
    return plan(job, 32, hardware("h100-80g"), buys=False)


def test_a_cluster_by_hand(found: PlanReport) -> None:
    size, job = cluster_size(found), found.job
    layout = found.best.layout
    assert (size.nodes, size.workers_per_node, size.cpus_per_worker) == (4, 8, 4)
    assert size.cpus == 8 * 4 + 2
    commit = 12 * 8_030_261_248
    assert size.commit_bytes == pytest.approx(commit, rel=0.001)
    commits = 86400 / (100 * found.best.cost.total_s)
    assert size.storage_bytes_day == pytest.approx(commits * size.commit_bytes)
    assert size.storage_held_bytes == (job.checkpoint.keep_last + 1) * size.commit_bytes
    least = 8 * job.snapshot.slots * slot_estimate(job, layout, (8, 8, 8, 8))
    assert size.shm_bytes >= sizes.OBJECT_STORE_BYTES + least
    assert size.host_bytes == sizes.NODE_BYTES + size.shm_bytes + 8 * sizes.PROCESS_BYTES
    cost = found.best.cost
    assert size.network_s == pytest.approx(cost.tensor_s + cost.pipeline_s + cost.data_s + cost.sync_s)
    assert size.network_share == pytest.approx(size.network_s / cost.total_s)


def test_slots_have_room_after_a_node_is_lost(found: PlanReport) -> None:
    """Three nodes of eight hold what four held: each worker writes more."""
    size = cluster_size(found)
    alone = 8 * found.job.snapshot.slots * slot_estimate(found.job, found.best.layout, (8, 8, 8, 8))
    assert size.shm_bytes - sizes.OBJECT_STORE_BYTES > 1.2 * alone


def test_spares_by_the_rate_of_failures() -> None:
    """419 in 54 days of 16,384 GPUs; 48 hours away each."""
    assert spares(1, 8) == 0
    assert spares(2, 8) == spares(100, 8) == 1
    assert spares(2048, 8) == 16


def test_the_overlay_is_patched_at_the_same_places(found: PlanReport) -> None:
    size = cluster_size(found)
    mine = {patch["path"]: patch["value"] for patch in yaml.safe_load(size_patches(size))}
    theirs = {patch["path"]: patch["value"] for patch in yaml.safe_load(OVERLAY.read_text())}
    assert mine.keys() == theirs.keys()
    for path, value in theirs.items():
        assert type(mine[path]) is type(value)
    box = mine["/spec/workerGroupSpecs/0/template/spec/containers/0/resources"]["limits"]
    assert box["nvidia.com/gpu"] == "8"
    assert int(box["memory"].removesuffix("Gi")) * 2**30 >= size.host_bytes
    room = mine["/spec/workerGroupSpecs/0/template/spec/volumes/0/emptyDir/sizeLimit"]
    assert int(room.removesuffix("Gi")) * 2**30 >= size.shm_bytes
    assert mine["/spec/workerGroupSpecs/0/maxReplicas"] == size.nodes + size.spares


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", "llama-3-8b", "--gpus", "16", *words], catch_exceptions=False)


def test_the_door_prints_and_writes_it(tmp_path: Path) -> None:
    path, value = tmp_path / "size.yaml", tmp_path / "plan.json"
    done = run("--for", "cluster", "--write-size", str(path), "--json", str(value))
    assert done.exit_code == 0
    found = json.loads(value.read_text())["cluster"]
    assert f"cluster    {found['nodes']} nodes of 8 GPUs and 1 spare" in done.stdout
    assert yaml.safe_load(path.read_text())[1]["value"] == found["nodes"] == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--for", "fun"), "--for: saw fun, expected run or cluster"),
        (("--write-size", "x.yaml"), "--write-size: saw x.yaml without --for cluster"),
        (
            ("--for", "cluster", "--write-size", "/nowhere/x.yaml"),
            "--write-size: cannot write /nowhere/x.yaml",
        ),
    ],
    ids=str,
)
def test_bad_input_is_one_line(words: tuple[str, ...], line: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert line in done.stderr
    assert not done.stdout
