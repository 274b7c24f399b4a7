"""Folder of a run's slots: ``snapshot.folder``, or ``snapshot.overflow_folder`` where that has no room.

One folder serves the whole run, on every node. The other one keeps its place in the config, so that what an
earlier launch left there is found, counted and cleaned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from picotron_ray.checkpoint.snapshot.slot_pool import choose_folder
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import SnapshotConfig
from picotron_ray.errors import ConfigError, SlotError
from picotron_ray.runtime.driver.inventory import LEFT_OUT, InventoryNode, Plan, plan
from picotron_ray.runtime.ray_cluster.connect import run_folders
from picotron_ray.runtime.ray_cluster.kept_slots import kept_bytes
from picotron_ray.runtime.ray_cluster.names import run_folder
from picotron_ray.runtime.ray_cluster.node_facts import small_files_bytes


def in_overflow(snapshot: SnapshotConfig) -> SnapshotConfig:
    """The section with its slots in ``overflow_folder``; the two folders change places."""
    assert snapshot.overflow_folder is not None
    swapped = {"folder": snapshot.overflow_folder, "overflow_folder": snapshot.folder}
    return snapshot.model_copy(update=swapped)


def overflow_here(job: JobConfig, workers: int, slot_bytes: int) -> tuple[bool, str | None]:
    """Whether one machine's slots go to the overflow folder, and a note, None without one.

    Raises:
        ConfigError: neither has room.
    """
    need = job.snapshot.slots * slot_bytes * workers + small_files_bytes(job, workers)
    need -= sum(map(kept_bytes, run_folders(job)))  # committed, and gone, before the first slot is made
    overflow = job.snapshot.overflow_folder
    if overflow and kept_bytes(run_folder(overflow, job.name)):
        return True, _kept_note(overflow)
    try:
        folder, note = choose_folder(job.snapshot.folder, overflow, need)
    except SlotError as error:
        raise ConfigError(str(error)) from error
    return (True, note) if folder == overflow else (False, None)


def plan_with_folder(
    job: JobConfig, device: str, nodes: Sequence[InventoryNode]
) -> tuple[Plan, bool, str | None]:
    """Plan for nodes of a cluster; whether more of them have room in the overflow folder, and a note.

    Raises:
        ConfigError: no layout fits, or too few nodes have room in either folder.
    """
    overflow = job.snapshot.overflow_folder
    if overflow is None:
        return plan(job, device, nodes), False, None
    there = [replace(n, facts=replace(n.facts, snapshot_bytes=n.facts.overflow_bytes)) for n in nodes]
    moved = job.model_copy(update={"snapshot": in_overflow(job.snapshot)})
    if any(node.facts.overflow_kept for node in nodes):
        return plan(moved, device, there), True, _kept_note(overflow)
    try:
        found = plan(job, device, nodes)
    except ConfigError as error:
        return plan(moved, device, there), True, _moved_note(error.problems[0], overflow)
    if found.left_out:
        second = plan(moved, device, there) if _some_room(there) else found
        if len(second.left_out) < len(found.left_out):
            return second, True, _moved_note(found.left_out[0], overflow)
    return found, False, None


def _some_room(nodes: Sequence[InventoryNode]) -> bool:
    return all(node.facts.snapshot_bytes for node in nodes)


def _moved_note(left_out: str, overflow: str) -> str:
    """Say why the slots lie in ``overflow``: the line of a node that would have been left out, without the
    mend, since it is not left out then.
    """
    seen = left_out.replace(LEFT_OUT, ": ", 1).partition("; ")[0]
    return f"{seen}; using {overflow} instead on all nodes (slower)"


def _kept_note(overflow: str) -> str:
    return f"snapshot.folder: using {overflow}, where an earlier launch has left slots"
