"""Where slots lie: memory, or the named disk folder where memory has no room; said, and never both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver.inventory import InventoryNode, plan
from picotron_ray.runtime.driver.snapshot_folder import in_overflow, overflow_here, plan_with_folder
from picotron_ray.runtime.ray_cluster.kept_slots import MARKER
from picotron_ray.runtime.ray_cluster.names import node_folder
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts, look, small_files_bytes


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    folders = [f"snapshot.folder={tmp_path}/memory", f"snapshot.overflow_folder={tmp_path}/disk"]
    return load_job("tiny", [*folders, "cluster.min_workers=1", "cluster.max_workers=4"])


def alone(job: JobConfig) -> JobConfig:
    return job.model_copy(update={"snapshot": job.snapshot.model_copy(update={"overflow_folder": None})})


def keep(folder: str | None, job: JobConfig) -> None:
    node = node_folder(str(folder), job.name, "node")
    node.mkdir(parents=True)
    (node / MARKER).write_text("{}")
    (node / "w.0.slot").write_bytes(bytes(10))


def test_here_the_disk_is_used_where_memory_is_too_small(
    job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "picotron_ray.checkpoint.snapshot.slot_pool.free_bytes",
        lambda f: 600 + small_files_bytes(job, 1) + f.endswith("disk"),
    )
    assert overflow_here(job, 1, 200) == (False, None)
    tight = job.model_copy(update={"snapshot": job.snapshot.model_copy(update={"slots": 601})})
    moved, note = overflow_here(tight, 1, 1)
    assert moved
    swapped = in_overflow(tight.snapshot)
    assert swapped.folder == job.snapshot.overflow_folder
    assert swapped.overflow_folder == job.snapshot.folder, "found and cleaned there too"
    assert note is not None
    assert f"using {job.snapshot.overflow_folder} instead (slower)" in note
    with pytest.raises(ConfigError, match=r"snapshot.folder: .* set snapshot.overflow_folder$"):
        overflow_here(alone(tight), 1, 1)


def test_slots_that_an_earlier_launch_left_on_disk_are_gone_back_to(job: JobConfig) -> None:
    keep(job.snapshot.overflow_folder, job)
    moved, note = overflow_here(job, 1, 1)
    assert moved
    assert "where an earlier launch has left slots" in str(note)
    facts = look(job.snapshot.folder, job.name, job.snapshot.overflow_folder)
    assert facts.overflow_kept
    assert facts.overflow_bytes >= 0
    nodes = [InventoryNode("a", 4, replace(facts, snapshot_bytes=10**12, overflow_bytes=10**12))]
    assert plan_with_folder(job, "cpu", nodes)[1]


def node(host: str, memory: int, disk: int) -> InventoryNode:
    return InventoryNode(host, 2, NodeFacts([], memory, disk))


def test_a_clusters_nodes_use_the_folder_in_which_more_of_them_have_room(job: JobConfig) -> None:
    ample = 10**12
    slots = 3 * 2 * plan(job, "cpu", [node("a", ample, 0), node("b", ample, 0)]).slot_bytes
    need = slots + small_files_bytes(job, 2)
    both = [node("a", need, ample), node("b", need, ample)]
    assert plan_with_folder(job, "cpu", both)[1:] == (False, None)
    one = [node("a", need - 1, ample), node("b", need, ample)]
    found, moved, note = plan_with_folder(job, "cpu", one)
    assert (moved, found.left_out) == (True, ())
    assert note is not None
    assert note.startswith("node a: snapshot.folder: saw room for"), "it is not left out"
    assert note.count(";") == 1, "no advice to set what is used already"
    assert note.endswith(
        f" workers, and small files; using {job.snapshot.overflow_folder} instead on all nodes (slower)"
    )
    found, moved, _ = plan_with_folder(job, "cpu", [node("a", need - 1, 0), node("b", need, 0)])
    assert (moved, len(found.left_out)) == (False, 1), "the disk has no room either"
    _, moved, note = plan_with_folder(job, "cpu", [node("a", 0, ample), node("b", 0, ample)])
    assert moved
    assert "using" in str(note)
    with pytest.raises(ConfigError, match="node a is left out"):
        plan_with_folder(job, "cpu", [node("a", 0, 0)])
    with pytest.raises(ConfigError, match=r"name a disk folder in snapshot\.overflow_folder"):
        plan_with_folder(alone(job), "cpu", [node("a", 0, ample)])
    assert in_overflow(in_overflow(job.snapshot)) == job.snapshot
