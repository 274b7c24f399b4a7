"""The heartbeat page: what a worker writes is what its agent reads, and a phase knows its own limit."""

import dataclasses
import mmap
import os
import struct
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from picotron_ray.config.schema.service import PHASES, ElasticConfig
from picotron_ray.runtime import heartbeat
from picotron_ray.runtime.heartbeat import (
    Page,
    cpu_seconds,
    process_alive,
    process_start_ticks,
    read_page,
)
from picotron_ray.runtime.node_agent.metrics import _worker
from picotron_ray.runtime.phase_limits import ENOUGH
from tests.support.checkpoint.open_files import no_open_files
from tests.support.faults.full_folder import run_on_small_disk


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


def test_a_fresh_page_says_that_there_is_nothing_yet(tmp_path, elastic, monkeypatch):
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: 12.5))
    page = Page(tmp_path / "w1.page", elastic)
    raw = (tmp_path / "w1.page").read_bytes()
    assert (len(raw), raw[:8][::-1]) == (mmap.PAGESIZE, b"picotro1")
    assert [path.name for path in tmp_path.iterdir()] == ["w1.page"]
    seen = dataclasses.asdict(read_page(tmp_path / "w1.page"))
    absent = dict.fromkeys(("clean", "sealed", "pinned", "complete", "eval_step", "skipped_step"), -1)
    absent |= {"cuda_allocated_bytes": -1, "cuda_reserved_bytes": -1, "memory_peak_bytes": -1}
    absent |= {"memory_bytes": (-1,) * 5, "communication_s": ((0.0, 0.0),) * 4}
    absent |= {"spent_s": (0.0,) * len(PHASES), "eval_set_losses": ()}
    known = {"worker": "w1", "pid": os.getpid(), "start_ticks": process_start_ticks(os.getpid())}
    known |= {"phase": "idle", "phase_since_s": 12.5, "phase_limit_s": 1e9, "step_counts": (0,) * 14}
    assert seen == {**dict.fromkeys(seen, 0), **absent, **known}
    assert page.computing_step == 0


def test_costs_of_communication_are_told_where_there_are_any(tmp_path, elastic):
    Page(tmp_path / "w1.page", elastic)
    seen = read_page(tmp_path / "w1.page")
    costs = ((0.25, 0.5), (-1.0, -1.0), (-1.0, -1.0), (0.125, 0.0))
    told = [
        (sample.name.split("_")[3], sample.labels["thing"], sample.value)
        for sample in _worker(dataclasses.replace(seen, communication_s=costs))
        if sample.name.startswith("picotron_worker_communication_")
    ]
    assert told == [
        ("predicted", "gradients", 0.25),
        ("measured", "gradients", 0.5),
        ("predicted", "experts", 0.125),
        ("measured", "experts", 0.0),
    ]


def test_bad_steps_are_counted_for_each_generation(tmp_path, elastic):
    page = Page(tmp_path / "w1.page", elastic)
    page.begin(1, 1, 0, 0)
    for step in (4, 5):
        page.count_bad(step)
    seen = read_page(tmp_path / "w1.page")
    assert (seen.skipped_step, seen.bad_steps, "bad_steps" in seen.figures()) == (5, 2, True)
    page.begin(1, 2, 0, 5)
    seen = read_page(tmp_path / "w1.page")
    assert (seen.skipped_step, seen.bad_steps) == (-1, 0)


def test_a_generation_begins_with_figures_of_its_own(tmp_path, elastic):
    page = Page(tmp_path / "w1.page", elastic)
    page.put(built_at_s=1.0, restored_at_s=2.0, first_step_at_s=3.0, step=9, loss=1.5)
    page.begin(term=2, n=5, rank=3, step=41)
    seen = read_page(tmp_path / "w1.page")
    assert (seen.built_at_s, seen.restored_at_s, seen.first_step_at_s) == (0.0, 0.0, 0.0)
    assert (seen.step, seen.loss, page.computing_step) == (41, 1.5, 42)


def test_steps_are_counted_by_their_length(tmp_path, elastic):
    page = Page(tmp_path / "w1.page", elastic)
    for seconds in (0.5, 0.75, 1.0, 200.0):
        page.count_step(seconds)
    seen = read_page(tmp_path / "w1.page")
    assert (seen.step_sum_s, seen.step_time_s) == (202.25, 200.0)
    assert seen.step_counts == (0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 1)


class Clock:
    """Time that passes when told so; ``take`` lets a phase last."""

    def __init__(self, monkeypatch, path, elastic):
        self.now = 100.0
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.path, self.entered = path, []
        self.page = Page(path, elastic, lambda step, phase: self.entered.append((step, phase)))

    def take(self, phase, seconds=0.0):
        """Enter a phase and stay; returns the limit that it had."""
        self.page.phase(phase)
        self.now += seconds
        return read_page(self.path).phase_limit_s


@pytest.fixture
def clock(monkeypatch, tmp_path, elastic):
    return Clock(monkeypatch, tmp_path / "w.page", elastic)


def test_every_entry_of_a_phase_is_told_and_published(clock):
    clock.page.begin(term=1, n=1, rank=0, step=4)
    clock.take("data", 2.0)
    clock.take("forward", 1.0)
    clock.take("forward", 1.0)
    clock.take("idle", 1.0)
    assert clock.entered == [(5, "data"), (5, "forward"), (5, "forward"), (5, "idle")]
    seen = read_page(clock.path)
    assert (seen.phase, seen.phase_count, seen.phase_since_s, seen.phase_limit_s) == ("idle", 4, 104.0, 1e9)


def test_a_phase_is_as_long_as_all_its_entries_in_a_row(clock):
    for _ in range(ENOUGH):
        clock.take("forward", 1.0)
        clock.take("forward", 3.0)
        clock.take("reduce", 0.5)
    assert clock.take("forward") == 3 * 4.0
    assert clock.take("reduce") == 3 * 0.5


def test_a_phase_is_judged_by_its_own_past_once_there_is_enough(clock):
    limits = []
    for seconds in (1.0, 2.0, 3.0, 4.0, 4.0, 9.0, 5.0, 1.0):
        limits.append(clock.take("forward", seconds))
        clock.take("reduce", 0.001)
    assert limits == [7.0] * ENOUGH + [12.0, 27.0, 27.0]
    assert clock.take("reduce") == 0.05, "the floor"


def test_limits_follow_every_phase_of_a_step_at_once(clock):
    for _ in range(40):
        clock.take("forward", 1.0)
        clock.take("reduce", 0.5)
    for _ in range(2):
        clock.take("forward", 2.0)
        clock.take("reduce", 4.0)
    assert (clock.take("forward"), clock.take("reduce")) == (3 * 2.0, 3 * 4.0)


def test_one_duration_of_two_hundred_is_no_measure(clock):
    for count in range(1, 257):
        seconds = {60: 40.0, 210: 50.0, 211: 45.0}.get(count, 1.0)
        found = clock.take("forward", seconds)
        clock.take("reduce", 0.5)
        if count == 209:
            assert found == 3 * 1.0, "the longest of 200 is left out"
    assert clock.take("forward") == 3 * 45.0, "of the two longest the second counts"


def test_a_limit_is_exceeded_after_it_not_at_it(clock):
    clock.page.phase("forward")
    seen = read_page(clock.path)
    assert [seen.stalled(100.0 + seconds) for seconds in (6.9, 7.0, 7.1)] == [False, False, True]


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
    assert read_page(tmp_path / "short.page") is None
    for magic in (0, heartbeat.MAGIC + 1, heartbeat.MAGIC - 1):
        (tmp_path / "foreign.page").write_bytes(struct.pack("=q", magic).ljust(mmap.PAGESIZE, b"\0"))
        assert read_page(tmp_path / "foreign.page") is None


def test_a_process_is_known_by_its_start_and_its_cpu_time(monkeypatch):
    assert (process_start_ticks(1 << 30), cpu_seconds(1 << 30), process_alive(1 << 30, 0)) == (0, 0.0, False)
    booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    started = subprocess.check_output(["ps", "-o", "etimes=", "-p", str(os.getpid())], text=True)
    ticks_s = booted_s + process_start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
    assert abs(time.time() - ticks_s - float(started)) < 2.0


def test_a_process_is_read_whatever_its_name(monkeypatch, tmp_path):
    after = ["S", *(str(number) for number in range(4, 22)), "777", "23"]
    after[11], after[12] = "300", "50"
    files = {"/proc/7/stat": tmp_path / "7", "/proc/8/stat": tmp_path / "8", "/proc/9/stat": tmp_path / "9"}
    (tmp_path / "7").write_text("7 (a) Z (b) " + " ".join(after) + "\n")
    (tmp_path / "8").write_text("8 (gone) " + " ".join(["X", *after[1:]]) + "\n")
    monkeypatch.setattr(heartbeat, "Path", files.__getitem__)
    assert (process_start_ticks(7), cpu_seconds(7)) == (777, 350 / os.sysconf("SC_CLK_TCK"))
    assert [process_alive(*which) for which in ((7, 777), (7, 776), (8, 777), (9, 0))] == [
        True, False, False, False
    ]  # fmt: skip
    assert (process_start_ticks(9), cpu_seconds(9)) == (0, 0.0)


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


def test_a_page_that_has_no_room_is_an_error_and_no_sigbus(tmp_path):
    said = run_on_small_disk(
        tmp_path,
        """
from picotron_ray.config.schema.service import PHASES, ElasticConfig
from picotron_ray.errors import SlotRoomError
from picotron_ray.runtime.heartbeat import Page
others = fill(folder)
try:
    Page(folder / "w1.page", ElasticConfig())
except SlotRoomError as error:
    print(error, sorted(path.name for path in folder.iterdir()))
others.unlink()
page = Page(folder / "w1.page", ElasticConfig())
fill(folder)
page.begin(1, 1, 0, 0)
""",
    )
    assert said == (
        f"snapshot.folder: no room for a page of 4096 bytes in {tmp_path}: No space left on device; make room"
        " there, or name another folder ['others']\n"
    )


def test_whoever_is_out_of_open_files_takes_no_worker_for_dead(tmp_path, elastic):
    """An agent at its limit told that workers had exited, and removed their pages."""
    Page(tmp_path / "w.page", elastic)
    me = read_page(tmp_path / "w.page")
    with no_open_files():
        with pytest.raises(OSError, match="Too many open files"):
            process_alive(me.pid, me.start_ticks)
        with pytest.raises(OSError, match="Too many open files"):
            read_page(tmp_path / "w.page")
    assert read_page(tmp_path / "none.page") is None
    assert process_alive(me.pid, me.start_ticks)


def test_seconds_of_phases_add_up_to_the_generations(tmp_path, elastic, monkeypatch):
    now = SimpleNamespace(s=100.0)
    clock = SimpleNamespace(monotonic=lambda: now.s, time=lambda: 1e9 + now.s)
    monkeypatch.setattr(heartbeat, "time", clock)
    page = Page(tmp_path / "w1.page", elastic)
    now.s += 50.0  # idle, before the generation
    page.begin(term=1, n=1, rank=0, step=0)
    for phase, seconds in (("rendezvous", 1.0), ("build", 2.0), ("forward", 0.5), ("backward", 1.5)):
        page.phase(phase)
        if phase == "build":
            now.s += 1.0
            page.moved()
            now.s -= 1.0
        now.s += seconds
    page.phase("forward")
    page.count_step(2.0)
    now.s += 0.25
    told = read_page(tmp_path / "w1.page").figures()
    assert told["step_at_s"] == 1e9 + 155.0
    assert told["phases_s"] == pytest.approx(
        {"rendezvous": 1.0, "build": 2.0, "forward": 0.75, "backward": 1.5}
    )
    page.begin(term=1, n=2, rank=1, step=0)
    assert "phases_s" not in read_page(tmp_path / "w1.page").figures()
    assert set(read_page(tmp_path / "w1.page").spent_s) == {0.0}
