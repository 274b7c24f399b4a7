"""A full folder for temporary files: what launch and doctor say, and what a worker's start failed of."""

from __future__ import annotations

from pathlib import Path

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.doctor.state_folder import judge_temporary_folder
from picotron_ray.runtime.driver import preflight
from picotron_ray.runtime.ray_cluster import temporary_room
from tests.support.faults.full_folder import run_on_small_disk

CODE = """
import os, tempfile
tempfile.tempdir = str(folder)
from types import SimpleNamespace
from picotron_ray.config.load import load_job
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.doctor.state_folder import judge_temporary_folder
from picotron_ray.runtime.driver import preflight
from picotron_ray.runtime.driver.preflight import check_services
from picotron_ray.runtime.ray_cluster import temporary_room
os.environ.pop("RAY_ADDRESS", None)
preflight.refuse_long_folder = lambda name: None
context = SimpleNamespace(get_node_id=lambda: "here")
temporary_room.ray = SimpleNamespace(get_runtime_context=lambda: context)
killed = RuntimeError("many lines\\nthe OOM killer, maybe")
print(judge_temporary_folder(True).status, [*folder.iterdir()])
print(temporary_room.start_problem("here", killed))
fill(folder)
print(temporary_room.start_problem("elsewhere", killed))
print(temporary_room.start_problem("here", killed))
print(judge_temporary_folder(True).status, judge_temporary_folder(False).status)
try:
    check_services(load_job("tiny", ["cluster.device=cpu"]))
except ConfigError as error:
    print(error)
"""


def test_it_is_told_by_name_before_ray_is_started_and_where_a_worker_does_not_start(tmp_path: Path) -> None:
    """Ray's own guess is the OOM killer, or a person; eleven workers died in turn, and doctor said well."""
    free, room, far, here, found, refused = run_on_small_disk(tmp_path, CODE, size="64m").splitlines()
    assert free == "ok []"
    assert (room, far) == ("the OOM killer, maybe", "the OOM killer, maybe")
    assert here.startswith(f"{tmp_path} does not take 1 MiB (No space left on device), where Ray keeps its")
    assert found == "failed warning"
    assert refused.startswith(f"TMPDIR: {tmp_path} does not take 16 MiB (No space left on device)")
    assert refused.endswith("make room there, or set TMPDIR to a folder on another disk")


def test_a_folder_that_is_not_there_is_a_problem_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert temporary_room.room_problem("/proc/nowhere").startswith("/proc/nowhere does not take 16 MiB (No")
    monkeypatch.setattr(temporary_room, "room_problem", lambda: "no room")
    assert judge_temporary_folder(True).plain()["seen"] == "no room"
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    job = load_job("tiny", ["cluster.device=cpu", "cluster.allow_unauthenticated=true"])
    preflight.check_services(job)
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(ConfigError, match="TMPDIR: no room, where Ray keeps"):
        preflight.check_services(job)
