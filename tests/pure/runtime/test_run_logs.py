"""Reading what a run's processes wrote."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import follow_run, run_logs
from picotron_ray.runtime.ray_cluster import local_ray


def test_logs_are_read_line_by_line_as_they_grow(tmp_path: Path) -> None:
    log = tmp_path / "worker-abc-12.err"
    log.write_bytes(b":job_id:01000000\n:actor_name:Agent\n:task_name:f\nfirst\nsecond \xff\nhal")
    offsets: dict[Path, int] = {}
    assert list(run_logs._new_lines(log, offsets)) == [("12", "first"), ("12", "second \ufffd")]
    assert list(run_logs._new_lines(log, offsets)) == []
    with log.open("ab") as file:
        file.write(b"f\n:job_id:\nx\n")
    assert list(run_logs._new_lines(log, offsets)) == [("12", "half"), ("12", "x")]


def test_logs_of_both_streams_are_read_and_once_without_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ray, "log_folder", lambda run: tmp_path / run)
    with pytest.raises(ConfigError, match=r"no Ray of its own on this machine; .*`ray logs`"):
        list(run_logs.log_lines("night"))
    (tmp_path / "night").mkdir()
    for name, text in (("worker-a-1.out", "out"), ("worker-a-1.err", "err"), ("raylet.err", "no")):
        (tmp_path / "night" / name).write_text(f"{text}\n")
    assert list(run_logs.log_lines("night")) == [("1", "err"), ("1", "out")]
    monkeypatch.setattr(follow_run, "POLL_S", 0.0)
    naps: list[float] = []
    lives = iter((True, True, False))
    monkeypatch.setattr(local_ray, "find", lambda run: SimpleNamespace(running=next(lives)))
    monkeypatch.setattr(run_logs, "time", SimpleNamespace(sleep=naps.append))
    lines = run_logs.log_lines("night", follow=True)
    assert [next(lines), next(lines)] == [("1", "err"), ("1", "out")]
    with (tmp_path / "night" / "worker-a-1.err").open("a") as file:
        file.write("more\n")
    assert next(lines) == ("1", "more")
    assert naps == [0.0]
    with (tmp_path / "night" / "worker-a-1.out").open("a") as file:
        file.write("last\n")
    assert list(lines) == [("1", "last")], "it ends with the run's Ray"
    monkeypatch.setattr(local_ray, "find", lambda run: None)
    assert len(list(run_logs.log_lines("night", follow=True))) == 4, "the run had ended before"
