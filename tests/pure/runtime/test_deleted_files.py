"""Files of a run's Ray that a cleaner of temporary files deleted: one line, before ``ray.init`` aborts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import run_logs
from picotron_ray.runtime.ray_cluster import connect, local_ray
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
    monkeypatch.setattr(local_ray, "log_folder", lambda run: tmp_path / "logs")
    monkeypatch.setattr(local_ray, "find", lambda run: SimpleNamespace(running=True))
    with pytest.raises(ConfigError, match=r"were deleted, though its Ray still runs$"):
        list(run_logs.log_lines("night"))
