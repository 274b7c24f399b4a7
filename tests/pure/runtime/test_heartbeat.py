"""The heartbeat page: what a worker writes is what its agent reads, and a phase knows its own limit."""

import os
import subprocess
import sys
import time

import pytest

from picotron_ray.config.schema.service import ElasticConfig
from picotron_ray.runtime.heartbeat import ENOUGH, Page, process_alive, process_start_ticks, read_page


@pytest.fixture
def elastic():
    return ElasticConfig(hang_factor=3.0, hang_floor_s=0.05, first_step_timeout_s=7.0)


def test_reader_sees_what_the_writer_put(tmp_path, elastic):
    page = Page(tmp_path / "w1.page", elastic)
    page.begin(term=2, n=5, rank=3, step=41)
    page.put(clean=41, loss=1.25, step=42)
    page.phase("forward")
    seen = read_page(tmp_path / "w1.page")
    assert seen is not None
    assert (seen.worker, seen.pid, seen.term, seen.n, seen.rank) == ("w1", os.getpid(), 2, 5, 3)
    assert (seen.step, seen.clean, seen.loss, seen.phase) == (42, 41, 1.25, "forward")
    assert page.value("loss") == 1.25


def test_a_new_generation_voids_what_the_last_one_sealed(tmp_path, elastic):
    page = Page(tmp_path / "w.page", elastic)
    page.put(sealed=9, pinned=9, clean=9)
    page.begin(term=1, n=2, rank=0, step=9)
    seen = read_page(tmp_path / "w.page")
    assert seen is not None
    assert (seen.sealed, seen.pinned, seen.clean) == (-1, -1, -1)


def test_phase_limit_follows_what_the_phase_took(tmp_path, elastic):
    page = Page(tmp_path / "w.page", elastic)
    path = tmp_path / "w.page"
    page.phase("forward")
    assert read_page(path).phase_limit_s == 7.0  # not known yet
    for _ in range(ENOUGH + 1):
        page.phase("forward")
        time.sleep(0.03)
        page.phase("reduce")
    page.phase("forward")
    limit = read_page(path).phase_limit_s
    assert 3 * 0.03 <= limit < 2.0
    now = time.monotonic()
    assert not read_page(path).stalled(now)
    assert read_page(path).stalled(now + limit + 0.01)


def test_idle_never_stalls(tmp_path, elastic):
    page = Page(tmp_path / "w.page", elastic)
    page.phase("idle")
    assert not read_page(tmp_path / "w.page").stalled(time.monotonic() + 1e6)


def test_absent_short_or_foreign_files_are_no_pages(tmp_path):
    assert read_page(tmp_path / "none.page") is None
    (tmp_path / "short.page").write_bytes(b"x" * 10)
    (tmp_path / "foreign.page").write_bytes(b"x" * 4096)
    assert read_page(tmp_path / "short.page") is None
    assert read_page(tmp_path / "foreign.page") is None


def test_a_zombie_and_a_reused_pid_are_not_alive():
    ticks = process_start_ticks(os.getpid())
    assert process_alive(os.getpid(), ticks)
    assert not process_alive(os.getpid(), ticks + 1)
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    started = process_start_ticks(child.pid)
    deadline = time.monotonic() + 20
    while process_alive(child.pid, started):  # ends as a zombie: nobody has waited for it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.wait()
    assert not process_alive(child.pid, started)
