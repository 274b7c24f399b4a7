"""Files of a run that somebody deleted while it goes on: Ray's own, its logs, and what launch remembers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from picotron_ray.errors import ConfigError
from picotron_ray.observability.logs.query import Query
from picotron_ray.runtime.driver import run_logs
from picotron_ray.runtime.ray_cluster import connect, local_ray, supervisor
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay


def test_a_ray_without_its_files_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(connect, "connect_to", asked.append)
    ray = LocalRay("night", "mark", 1, "127.0.0.1:1", str(tmp_path), "")
    with pytest.raises(connect.ClusterError, match=r"are gone .*end it with `picotron-ray stop night --now`"):
        connect.attach(ray)
    assert asked == []
    (tmp_path / "r" / "session_latest" / "sockets").mkdir(parents=True)
    connect.attach(ray)
    assert asked == ["127.0.0.1:1"]


def test_logs_that_were_deleted_are_not_another_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(local_ray, "find", lambda run: SimpleNamespace(running=True))
    with pytest.raises(ConfigError, match=r"were deleted, or not written yet, though its Ray runs$"):
        list(run_logs.log_lines("night", Query()))


def test_the_record_of_a_ray_that_runs_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By it alone `status`, `stop` and a second launch find the run."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    ray = LocalRay("night", "mark", 1, "127.0.0.1:1", str(tmp_path), "token", ("/dev/shm/x",))
    keeper = supervisor.StateKeeper("night", "mark")
    keeper.look(0.0)
    assert local_ray.find("night") is None, "it has not begun"
    local_ray.save(ray)
    keeper.look(supervisor.KEEP_S)
    shutil.rmtree(tmp_path / "home")
    keeper.look(supervisor.KEEP_S + 1.0)
    assert local_ray.find("night") is None, "it looks now and then"
    keeper.look(2 * supervisor.KEEP_S)
    assert local_ray.find("night") == ray
    newer = replace(ray, mark="newer")
    local_ray.save(newer)
    keeper.look(3 * supervisor.KEEP_S)
    assert local_ray.find("night") == newer
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "home").write_text("in its place")
    keeper.look(4 * supervisor.KEEP_S)
