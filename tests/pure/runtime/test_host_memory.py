"""Host memory as the kernel tells it, in control groups of both versions and without any."""

from __future__ import annotations

from pathlib import Path

import pytest

from picotron_ray.runtime.ray_cluster.host_memory import PROCESS_BYTES, host_bytes, oom_kills, share_of

GIB = 2**30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal:       {64 * 2**20} kB\nMemFree: 5 kB\n")
    (tmp_path / "proc" / "vmstat").write_text("nr_free 1\noom_kill 7\n")
    return tmp_path / "proc"


def group(proc: Path, line: str, folder: str, **files: str) -> Path:
    """A control group of this process, with its files."""
    (proc / "self" / "cgroup").write_text(f"12:cpu:/elsewhere\n{line}\n")
    cgroups = proc.parent / "cgroup"
    (cgroups / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (cgroups / folder / f"memory.{name}").write_text(text)
    return cgroups


def test_without_control_groups_the_machine_counts(proc: Path) -> None:
    assert host_bytes(proc, proc.parent / "none") == 64 * GIB
    assert oom_kills(proc, proc.parent / "none") == 7
    assert host_bytes(proc / "none", proc / "none") == oom_kills(proc / "none", proc / "none") == 0


def test_the_least_limit_on_the_way_up_counts(proc: Path) -> None:
    cgroups = group(proc, "0::/pod/worker", "pod/worker", max="max\n", events="low 0\noom_kill 0\n")
    group(proc, "0::/pod/worker", "pod", max=f"{16 * GIB}\n", events="oom 4\noom_kill 2\n")
    assert host_bytes(proc, cgroups) == 16 * GIB
    assert oom_kills(proc, cgroups) == 2


def test_version_1_and_a_path_of_the_host_that_is_not_mounted(proc: Path) -> None:
    files = {"limit_in_bytes": f"{8 * GIB}\n", "oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"}
    cgroups = group(proc, "4:memory:/docker/abc", "memory", **files)
    assert host_bytes(proc, cgroups) == 8 * GIB
    assert oom_kills(proc, cgroups) == 3


def test_a_share_is_rounded_down_so_that_equal_nodes_are_equal() -> None:
    assert share_of(64 * GIB, 4) == share_of(64 * GIB + 12345678, 4) == 16 * GIB - PROCESS_BYTES
    assert share_of(3 * PROCESS_BYTES + 1000, 2) == PROCESS_BYTES // 2 + 500
    assert share_of(24 * GIB, 500) == 1, "the processes alone are more than there is, which is known"
    assert share_of(0, 4) == 0
