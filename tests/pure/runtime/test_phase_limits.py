"""Hang limits: kept over generations, scaled for new layouts, and by progress where length says nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.config.schema.service import ElasticConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime import heartbeat
from picotron_ray.runtime.heartbeat import Page, read_page
from picotron_ray.runtime.phase_limits import ENOUGH, LAYOUTS, PhaseLimits, StepWork
from picotron_ray.runtime.worker.growth_phase import growth_phase, lock_slots

ELASTIC = ElasticConfig(
    hang_factor=3.0, hang_floor_s=0.05, first_step_timeout_s=60.0, compile_timeout_s=500.0
)


def work(dp: int, warm: bool = True, compiles: bool = False, **degrees: Any) -> StepWork:
    return StepWork.of(Layout(dp=dp, **degrees), 32, warm=warm, compiles=compiles)


def steps(limits: PhaseLimits, of: StepWork, seconds: float, count: int = ENOUGH + 1) -> None:
    """A generation of steps, the first of which takes five times as long."""
    limits.begin(of)
    for step in range(count):
        for phase in ("forward", "sync"):
            limits.learn(phase, seconds * (1 if step else 5))
        limits.stepped()


def test_a_hang_in_the_first_steps_of_a_later_generation_is_noticed_as_soon_as_any() -> None:
    limits = PhaseLimits(ELASTIC)
    limits.begin(work(4, warm=False))
    assert limits.limit("forward") == 60.0, "nothing is known yet"
    steps(limits, work(4, warm=False), 0.2)
    assert limits.limit("forward") == pytest.approx(0.6)
    limits.begin(work(4))
    assert limits.limit("forward") == 3 * 5 * 0.2, "as first steps were"
    limits.stepped()
    assert limits.limit("forward") == pytest.approx(0.6)
    limits.begin(work(4, warm=False))
    assert limits.limit("forward") == 60.0, "somebody is new"


def test_a_new_layout_is_judged_by_what_falls_on_a_rank() -> None:
    limits = PhaseLimits(ELASTIC)
    steps(limits, work(4), 0.2)
    limits.begin(work(2))
    assert limits.limit("forward") == pytest.approx(3 * 2 * 2 * 5 * 0.2), "twice the rows"
    limits.stepped()
    assert limits.limit("forward") == pytest.approx(3 * 2 * 2 * 0.2)
    limits.begin(work(4, tp=2))
    limits.stepped()
    assert limits.limit("forward") == pytest.approx(3 * 2 * 0.2), "less work is no reason to be impatient"
    limits.begin(work(4, zero=1))
    limits.stepped()
    assert limits.limit("forward") == pytest.approx(3 * 2 * 0.2)
    limits.begin(work(1, zero=0))
    limits.stepped()
    assert limits.limit("forward") == pytest.approx(3 * 2 * 4 * 0.2)
    assert limits.limit("evaluate") == 60.0, "never seen"


def test_what_a_layout_took_is_known_when_it_comes_back() -> None:
    limits = PhaseLimits(ELASTIC)
    steps(limits, work(4), 0.2)
    steps(limits, work(3), 9.0)
    limits.begin(work(4))
    limits.stepped()
    assert limits.limit("sync") == pytest.approx(0.6)
    for dp in range(5, 5 + LAYOUTS):
        limits.begin(work(dp))
    assert len(limits._layouts) == LAYOUTS
    assert str(Layout(dp=4)) not in limits._layouts


def test_members_may_compile_in_a_first_step() -> None:
    limits = PhaseLimits(ELASTIC)
    limits.begin(work(4, compiles=True))
    assert limits.limit("forward") == limits.limit("compile") == 500.0
    steps(limits, work(4, compiles=True), 0.2)
    limits.begin(work(2, compiles=True))
    assert limits.limit("forward") == 500.0, "other shapes: compiled anew"
    limits.begin(work(4, compiles=True))
    assert limits.limit("forward") == 3.0, "compiled before"


def test_joining_is_never_learned() -> None:
    limits = PhaseLimits(ELASTIC)
    for _ in range(20):
        limits.learn("rendezvous", 0.01)
    assert limits.limit("rendezvous") == 60.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found = [100.0]
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: found[0]))
    return found


def test_a_restore_may_take_long_but_not_stand_still(tmp_path: Path, now: list[float]) -> None:
    page = Page(tmp_path / "w.page", ELASTIC)
    page.phase("restore")
    for _ in range(1000):
        now[0] += 0.5
        page.moved()
    seen = read_page(tmp_path / "w.page")
    assert seen is not None
    assert seen.phase_limit_s == 1.5, "three times what lay between two pieces"
    assert not seen.stalled(now[0] + 1.4)
    assert seen.stalled(now[0] + 1.6)
    assert seen.progress == 1001
    page.phase("forward")
    now[0] += 30
    page.moved()
    seen = read_page(tmp_path / "w.page")
    assert seen is not None
    assert (seen.progress, seen.phase_since_s) == (1003, now[0] - 30), "a step's phases are judged by length"


def test_slots_that_grow_for_long_are_no_hang_of_the_optimizer(tmp_path: Path, now: list[float]) -> None:
    page = Page(tmp_path / "w.page", ELASTIC)
    for _ in range(10):
        for phase in ("data", "optimizer"):
            page.phase(phase)
            now[0] += 0.01
    with growth_phase(page) as moved:
        for _ in range(100):
            now[0] += 5.0
            seen = read_page(tmp_path / "w.page")
            assert seen is not None
            assert (seen.phase, seen.stalled(now[0])) == ("grow", False)
            moved()
    seen = read_page(tmp_path / "w.page")
    assert seen is not None
    assert (seen.phase, seen.phase_limit_s) == ("optimizer", ELASTIC.hang_floor_s)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_no_rank_steps_while_another_one_locks_its_slots(
    tmp_path: Path, now: list[float], device: str
) -> None:
    page, told = Page(tmp_path / "w.page", ELASTIC), list[str]()
    page.phase("restore")

    def wait_for_all(what: str, meanwhile: Any) -> None:
        for _ in range(100):
            now[0] += 5.0
            seen = read_page(tmp_path / "w.page")
            assert seen is not None
            assert (seen.phase, seen.stalled(now[0])) == ("grow", False)
            meanwhile()
        told.append(what)

    asked: list[str] = []
    lock_slots(page, device, lambda: told.append("lock"), wait_for_all, lambda: asked.append("to leave"))
    assert told == (["lock", "slots"] if device == "cuda" else ["lock"])
    assert len(asked) == (100 if device == "cuda" else 0)
    assert page.name == "restore"


def test_what_moves_often_is_published_seldom(tmp_path: Path, now: list[float]) -> None:
    page = Page(tmp_path / "w.page", ELASTIC)
    page.phase("build")
    for _ in range(100):
        now[0] += 0.002
        page.moved()
    assert page.value("progress") in (4, 5)
