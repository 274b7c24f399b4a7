"""Folders of a run in the memory file system: whose they are, and when they may go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from picotron_ray.checkpoint.snapshot.ledger_spill import SUFFIX
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import ElasticConfig
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.heartbeat import Page, process_start_ticks
from picotron_ray.runtime.ray_cluster import cleanup
from picotron_ray.runtime.ray_cluster.names import event_folder, ledger_folder, node_folder, run_folder

LONG_AGO = (0.0, 0.0)
FILE = f"1-256-aa{SUFFIX}"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # a home that the nodes share
    return JobConfig.model_validate({"name": "night", "snapshot": {"folder": str(tmp_path)}})


def folder_of(job: JobConfig, node: str) -> Path:
    folder = node_folder(job.snapshot.folder, job.name, node)
    folder.mkdir(parents=True)
    (folder / "slot-0").write_bytes(b"state")
    return folder


def spilled(folder: Path) -> bool:
    """Whether what was spilled of a node's ledgers is there."""
    return (ledger_folder(folder) / FILE).exists()


def spill(folder: Path) -> None:
    ledger_folder(folder).mkdir(parents=True)
    (ledger_folder(folder) / FILE).write_text("lines")


def test_clear_removes_the_folder_of_a_dead_run(job: JobConfig) -> None:
    folder_of(job, "a")
    cleanup.clear(job, None)
    assert not run_folder(job.snapshot.folder, job.name).exists()


def test_clear_refuses_a_run_of_that_name_that_lives_elsewhere(job: JobConfig) -> None:
    folder = folder_of(job, "a")
    Page(folder / "w1-0.page", ElasticConfig())  # a page of this very process
    with pytest.raises(ConfigError, match=rf"'night' is in use .* w1-0 \(pid {os.getpid()}\)"):
        cleanup.clear(job, None)
    assert (folder / "slot-0").exists()


def test_an_agent_removes_what_dead_nodes_left_beside_it(job: JobConfig) -> None:
    dead, reused, living, working, unsigned, young = (folder_of(job, node) for node in "abcdef")
    ticks = process_start_ticks(os.getpid())
    (dead / cleanup.SIGNATURE).write_text("4194305 77")  # above any pid
    (reused / cleanup.SIGNATURE).write_text(f"{os.getpid()} {ticks + 1}")
    (living / cleanup.SIGNATURE).write_text(f"{os.getpid()} {ticks}")
    Page(working / "w1-0.page", ElasticConfig())
    for folder in (working, unsigned):
        os.utime(folder, LONG_AGO)
    mine = node_folder(job.snapshot.folder, job.name, "mine")
    cleanup.claim(mine)
    there = set(mine.parent.iterdir())
    assert there == {mine, living, working, young}
    cleanup.claim(mine)  # an agent's constructor may run again
    cleanup.release(mine)
    assert not mine.exists()
    assert mine.parent.exists(), "others are still there"


def test_the_last_node_takes_the_runs_folder_along(job: JobConfig) -> None:
    mine = node_folder(job.snapshot.folder, job.name, "mine")
    cleanup.claim(mine)
    cleanup.release(mine)
    assert not mine.parent.exists()


def test_a_node_that_is_given_back_takes_no_other_nodes_ledger_along(job: JobConfig) -> None:
    """Their homes may be one: the lines that the run's slots name would be gone for all."""
    freed, other = folder_of(job, "a"), folder_of(job, "b")
    for folder in (freed, other):
        spill(folder)
    cleanup.release(freed)
    assert (spilled(freed), spilled(other)) == (False, True)
    cleanup.release(other)
    assert not event_folder(job.name).with_name("ledger").exists()


def test_a_dead_nodes_ledger_goes_with_its_slots(job: JobConfig) -> None:
    dead, living = folder_of(job, "a"), folder_of(job, "b")
    for folder in (dead, living):
        spill(folder)
    (dead / cleanup.SIGNATURE).write_text("4194305 77")
    ticks = process_start_ticks(os.getpid())
    (living / cleanup.SIGNATURE).write_text(f"{os.getpid()} {ticks}")
    cleanup.claim(node_folder(job.snapshot.folder, job.name, "c"))
    assert (spilled(dead), spilled(living)) == (False, True)
    cleanup.clear(job, None)
    assert not spilled(living)
