"""The end of a run whose slots have filled their file system, with a state that is nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults.full_folder import run_on_small_disk

HEAD = """
import logging, os
logging.disable()
os.environ["XDG_STATE_HOME"] = {state!r}
from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.errors import UnmarkedError
from picotron_ray.runtime.ray_cluster import kept_slots, names
from tests.support.faults.full_marker import lone_agent

def left():
    # after the next launch has cleared what the dead run left
    others.unlink()
    kept_slots.remove_rest(names.run_folder(str(folder), "r"))
    told = agent._kept.told("R")
    return [header.step for _, header in list_slots(agent._folder)], [info.step for info in told["kept"]]
"""


def said(tmp_path: Path, code: str) -> list[str]:
    disk, state = tmp_path / "disk", tmp_path / "state"
    disk.mkdir()
    return run_on_small_disk(disk, HEAD.format(state=str(state)) + code).splitlines()


@pytest.mark.parametrize("reserved", [True, False])
def test_a_state_on_a_full_file_system_outlives_its_run(tmp_path: Path, reserved: bool) -> None:
    """By the room that the agent has reserved, or by that of the slots that nothing needs."""
    code = f"agent = lone_agent(folder, {reserved})\nothers = fill(folder)"
    code += """
agent.close(1, (1, 1, 12))
print(left())
"""
    assert said(tmp_path, code) == ["([12], [12])"]


def test_a_state_is_marked_again_and_again_on_a_full_file_system(tmp_path: Path) -> None:
    """While storage is waited for, and for another state at the end; the marker is never torn or lost."""
    code = """
agent = lone_agent(folder)
others = fill(folder)
for step in (10, 10, 11):
    agent.keep(1, (1, 1, step))
    print(os.statvfs(folder).f_bavail, sorted(kept_slots.read_marker(agent._folder)["slots"]))
agent.close(1, ())
print(left())
"""
    assert said(tmp_path, code) == [
        "0 ['w1.0.slot']",
        "0 ['w1.0.slot']",
        "0 ['w1.0.slot', 'w1.1.slot']",
        "([10, 11, 12], [10, 11, 12])",
    ]


def test_a_marker_that_has_no_room_beside_the_slots_is_on_disk(tmp_path: Path) -> None:
    code = """
agent = lone_agent(folder, False)
others = fill(folder)
agent.keep(1, (1, 1, 12))
print((agent._folder / kept_slots.MARKER).is_symlink())
agent.close(1, (1, 1, 12))
print(kept_slots.entered("r") == [names.run_folder(str(folder), "r")], left())
kept_slots.let_go(agent._folder, {"w1.2.slot"}, ["w1.2.slot"])
print(sorted(path.name for path in agent._folder.iterdir()))
"""
    assert said(tmp_path, code) == ["True", "True ([12], [12])", "[]"]


def test_an_agent_that_cannot_mark_its_slots_goes_on_and_keeps_them(tmp_path: Path) -> None:
    """Neither beside the slots nor on disk: as it says so, it and they stay until there is room."""
    (tmp_path / "state").write_text("no folder")
    code = """
agent = lone_agent(folder, False)
for name in ("w1.0.slot", "w1.1.slot", "w1.page"):
    (agent._folder / name).unlink()
others = fill(folder)
for attempt in (lambda: agent.keep(1, (1, 1, 12)), lambda: agent.close(1, (1, 1, 12))):
    try:
        attempt()
    except UnmarkedError as error:
        print(error)
print(agent._closing.is_set(), agent._watcher.is_alive(), len(list_slots(agent._folder)))
os.truncate(others, 0)
agent.close(1, (1, 1, 12))
print(left())
"""
    first, second, *rest = said(tmp_path, code)
    assert first == second
    assert first.startswith(f"step 12 in {tmp_path / 'disk'}")
    assert "cannot be marked as kept: " in first
    assert rest == ["False True 1", "([12], [12])"]


def test_an_agent_that_dies_on_a_full_file_system_has_a_successor(tmp_path: Path) -> None:
    """Its constructor raised; Ray gave up, and eight healthy workers were forgotten with their node."""
    code = """
from types import SimpleNamespace
import ray
ray.get_runtime_context = lambda: SimpleNamespace(get_actor_id=lambda: "a")
from picotron_ray.runtime.node_agent.agent import Agent
from tests.support.runs.ray_runs import tiny_job
job = tiny_job("r", folder.parent / "storage", snapshot={"folder": str(folder)}).model_dump(mode="json")
first = Agent(job, "n1", "127.0.0.1")
first.hello(3, "R")
others = fill(folder)
second = Agent(job, "n1", "127.0.0.1")
print(second.hello(4, "R")["pid"] == int((second._folder / "agent").read_text().split()[0]), flush=True)
second._rendezvous.stop()
os._exit(0)
"""
    assert said(tmp_path, code) == ["True"]
