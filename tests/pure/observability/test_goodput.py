"""Audited goodput: every second has one cause, and the causes are those of a world that knows better."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from picotron_ray.observability.goodput import CAUSES, FAILURE_CAUSES, GoodputAccount


@dataclass
class World:
    """A run whose true causes are known; the account hears of it once a second, as a coordinator does."""

    account: GoodputAccount = field(default_factory=lambda: GoodputAccount(1000.0))
    now_s: float = 1000.0
    step: int = 0
    step_at_s: float = 0.0
    step_s: float = 0.4
    n: int = 0
    spent: dict[str, float] = field(default_factory=dict)
    truth: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    next_beat_s: float = 1001.0
    phase: str = "idle"

    def spend(self, seconds: float, cause: str, phase: str = "") -> None:
        """Let time pass in a phase of rank 0, or with no generation; heartbeats come each second."""
        self.truth[cause] += seconds
        self.phase = phase or self.phase
        while seconds > 0:
            piece = min(seconds, self.next_beat_s - self.now_s)
            self.now_s += piece
            seconds -= piece
            if phase:
                self.spent[phase] = self.spent.get(phase, 0.0) + piece
            if self.now_s >= self.next_beat_s - 1e-9:
                self.next_beat_s += 1.0
                if phase:
                    self.account.page(self.now_s, self.page())
                self.account.passed(self.now_s, waiting=cause == "idle")

    def page(self) -> dict[str, Any]:
        known = {"term": 1, "n": self.n, "step": self.step, "step_time_s": self.step_s}
        return {**known, "phase": self.phase, "step_at_s": self.step_at_s, "phases_s": dict(self.spent)}

    def generation(self, resume: int, cause: str = "", build_s: float = 1.5, restore_s: float = 0.5) -> None:
        self.account.generation((1, self.n + 1), self.now_s, resume, self.step)
        self.n, self.step, self.spent = self.n + 1, resume, {}
        self.spend(build_s, cause or "rebuild", "build")
        self.spend(restore_s, cause or "restore", "restore")

    def steps(self, count: int, cause: str = "steps", data_s: float = 0.0) -> None:
        for _ in range(count):
            self.spend(data_s, "data", "data") if data_s else None
            self.spend(self.step_s, cause, "forward")
            self.step += 1
            self.step_at_s = self.now_s

    def fail(self, unfinished_s: float, noticed_s: float, decided_s: float) -> None:
        self.spend(unfinished_s, "detect", "forward")
        self.spend(noticed_s, "detect")
        self.account.failed(self.now_s)
        self.spend(decided_s, "decide")

    def check(self, most_s: float = 0.05) -> None:
        told = self.account.told(self.now_s)
        assert sum(told["seconds"].values()) == pytest.approx(told["wall_s"])
        assert told["wall_s"] == pytest.approx(self.now_s - 1000.0)
        assert told["seconds"] == pytest.approx(self.truth, abs=most_s)


def test_a_failure_is_told_by_its_parts() -> None:
    world = World()
    world.spend(3.0, "start")
    world.generation(0, "start")
    world.steps(20)
    world.fail(unfinished_s=0.3, noticed_s=0.2, decided_s=1.1)
    world.generation(16)
    world.steps(4, "recompute")
    world.steps(10)
    world.check()
    assert world.account.of_failure(0) == pytest.approx(
        {"detect_s": 0.5, "decide_s": 1.1, "rebuild_s": 1.5, "restore_s": 0.5, "recompute_s": 1.6}, abs=0.05
    )
    told = world.account.told(world.now_s)
    assert told["goodput"] == pytest.approx(told["seconds"]["steps"] / told["wall_s"])


def test_a_hang_is_detected_from_the_last_finished_step_on() -> None:
    world = World()
    world.generation(0, "start")
    world.steps(7)
    world.fail(unfinished_s=9.0, noticed_s=0.0, decided_s=0.4)
    world.check()
    assert world.account.of_failure(0)["detect_s"] == pytest.approx(9.0, abs=0.01)


def test_steps_that_no_heartbeat_showed_are_none_of_the_detection() -> None:
    world = World(step_s=0.05)
    world.generation(0, "start")
    world.steps(29)  # the last heartbeat showed step 20
    world.fail(unfinished_s=0.01, noticed_s=0.02, decided_s=0.4)
    world.generation(29)
    world.steps(30)
    world.check(0.06)


def test_evaluations_copies_and_waits_for_data_have_causes_of_their_own() -> None:
    world = World()
    world.generation(0, "start")
    world.steps(10, data_s=0.1)
    world.spend(2.5, "eval", "evaluate")
    world.steps(3)
    world.spend(0.7, "checkpoint", "snapshot")
    world.steps(5)
    world.check()


def test_a_stop_at_a_breakpoint_is_a_pause() -> None:
    world = World()
    world.generation(0, cause="start")
    world.steps(10)
    world.spend(120.0, "paused", "hold")
    world.steps(10)
    told = world.account.told(world.now_s)
    assert told["seconds"]["paused"] == pytest.approx(120.0)
    assert told["goodput"] > 0.7
    world.spend(300.0, "paused", "hold")
    world.account.failed(world.now_s)
    (failure,) = world.account.failures
    assert failure["detect_s" if "detect_s" in failure else "detect"] < 5.0, "the stop was no part of it"


def test_a_failure_while_another_is_recovered_from_takes_over() -> None:
    world = World()
    world.generation(0, "start")
    world.steps(10)
    world.fail(0.2, 0.0, 1.0)
    world.generation(10)
    world.account.failed(world.now_s)
    world.spend(0.8, "decide")
    world.generation(10)
    world.steps(5)
    first, second = (world.account.of_failure(at) for at in (0, 1))
    assert first["decide_s"] == pytest.approx(1.0)
    assert second["decide_s"] == pytest.approx(0.8)
    assert first["rebuild_s"] + second["rebuild_s"] == pytest.approx(3.0, abs=0.05)
    world.check(1.0)  # what the last page before the second failure did not tell is its detection


def test_growth_waiting_and_the_end_are_told_apart() -> None:
    world = World()
    world.generation(0, "start")
    world.steps(5)
    world.account.left((1, 1), world.now_s, finished=False)
    world.spend(0.5, "remesh")
    world.generation(5, "remesh")
    world.steps(5)
    world.fail(0.1, 0.0, 0.2)
    world.spend(30.0, "idle")
    world.generation(10)
    world.steps(5)
    world.account.left((1, 3), world.now_s, finished=True)
    world.spend(1.7, "finish")
    world.account.ended(world.now_s)
    world.spend(0.3, "finish")
    world.check(1.05)  # that nobody is there to train is known up to a second late


def test_pauses_between_launches_are_no_part_of_goodput() -> None:
    world = World()
    world.account.launched("one", world.now_s)
    world.generation(0, "start")
    world.steps(10)
    world.account.left((1, 1), world.now_s, finished=False)
    world.account.ended(world.now_s)
    told = world.account.told(world.now_s)
    world.account.launched("two", world.now_s + 500.0)
    world.now_s, world.next_beat_s = world.now_s + 500.0, world.now_s + 501.0
    world.truth["paused"] += 500.0
    world.spend(2.0, "start")
    world.generation(10, "start")
    world.steps(10)
    world.check()
    assert world.account.told(world.now_s)["goodput"] == pytest.approx(told["goodput"], abs=0.3)


def test_a_restarted_coordinator_goes_on_with_the_account() -> None:
    world = World()
    world.account.launched("one", world.now_s)
    world.generation(0, "start")
    world.steps(10)
    world.fail(0.2, 0.1, 0.5)
    world.generation(8)
    world.account = GoodputAccount.read(json.loads(json.dumps(world.account.plain())))
    assert json.loads(json.dumps(world.account.plain())) == world.account.plain()
    world.account.launched("one", world.now_s)
    world.account.generation((1, 2), world.now_s, 8, 8)  # adopted
    world.steps(2, "recompute")
    world.steps(6)
    world.check()


def test_a_launch_that_was_killed_whole_is_unknown_from_its_last_page_on() -> None:
    account = GoodputAccount(0.0)
    account.launched("one", 0.0)
    account.generation((1, 1), 1.0, 0, 0)
    account.page(5.0, {"term": 1, "n": 1, "step": 3, "phase": "forward", "step_time_s": 1.0})
    account.passed(8.0)
    account.launched("two", 100.0)
    seconds = account.told(100.0)["seconds"]
    assert (seconds["unknown"], seconds["paused"]) == (3.0, 92.0)


def test_what_an_older_record_does_not_tell_is_unknown() -> None:
    account = GoodputAccount.unseen(0.0, 50.0, failures=2)
    assert account.told(50.0)["seconds"]["unknown"] == 50.0
    assert account.of_failure(1) == account.of_failure(7) == {f"{c}_s": 0.0 for c in FAILURE_CAUSES}


@pytest.mark.parametrize("seed", range(40))
def test_causes_add_up_whatever_happens(seed: int) -> None:
    """Events in any order, with clocks that disagree, never make or lose a second."""
    draw = random.Random(seed)
    account, now_s, step, n = GoodputAccount(0.0), 0.0, 0, 0
    for _ in range(300):
        now_s += draw.choice((0.0, 0.1, 1.0, 30.0))
        step += draw.choice((0, 0, 1, 7))
        if draw.random() < 0.1:
            n += 1
            step = draw.randint(0, step)
            account.generation((1, n), now_s, step, step + draw.randint(0, 9))
        spent = {phase: draw.random() * now_s for phase in ("build", "forward", "evaluate", "data")}
        page = {"term": 1, "n": n, "step": step, "phase": draw.choice(("build", "forward", "idle"))}
        page |= {"step_time_s": 0.3, "step_at_s": now_s + draw.uniform(-9, 9), "phases_s": spent}
        account.page(now_s + draw.uniform(-3, 0), page)
        event = draw.random()
        if event < 0.1:
            account.failed(now_s)
        elif event < 0.15:
            account.left((1, n), now_s, draw.random() < 0.5)
        elif event < 0.18:
            account.launched(f"launch {draw.randint(0, 3)}", now_s)
        elif event < 0.2:
            account.ended(now_s)
        account.passed(now_s, draw.random() < 0.5)
        told = account.told(now_s)
        assert sum(told["seconds"].values()) == pytest.approx(told["wall_s"], abs=1e-6)
    assert told["wall_s"] == pytest.approx(now_s)
    for cause in FAILURE_CAUSES:
        mine = sum(one[cause] for one in account.failures)
        assert mine <= told["seconds"][cause] + 1e-6
