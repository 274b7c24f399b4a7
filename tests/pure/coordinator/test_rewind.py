"""Rewinds: decided by the coordinator, bounded, remembered, and told as one failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.policies.precedence import Concern, concern_of, goes_before
from picotron_ray.coordinator.policies.restore_point import older_state
from picotron_ray.coordinator.policies.rewind import BadStep, asked_for, decide
from picotron_ray.coordinator.simulator.run import simulate
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from tests.support.runs.coordinator_world import World, flush, gid, job, of, outcomes, snapshot, spec

REWIND = {"elastic__on_nonfinite": "rewind", "elastic__rewind_steps": 20}
SEEDS = 120


def bad(world: World, step: int, reason: str = "non-finite") -> list[m.Command]:
    """All members find a step bad, and keep the state before it."""
    text = f"step {step} is bad"
    found = outcomes(world.spec, FailureKind.NUMERICS, step - 1)
    return world.send(*(replace(one, detail=text, bad_step=step, bad_reason=reason) for one in found))


def committed(world: World, step: int) -> None:
    """The run commits a step."""
    one = world.spec
    sealed = snapshot(one, step)
    world.send(m.SnapshotSealed("a", one.id, step, sealed), m.Uploaded("a", one.id, step))
    world.log_appends()


def running(**changes: Any) -> World:
    world = World(job(**{**REWIND, **changes}))
    world.up(("a", 4))
    world.log_appends()
    return world


def test_a_bad_step_takes_the_run_to_a_commit_that_slots_do_not_reach() -> None:
    world = running()
    one = world.spec
    committed(world, 25)
    committed(world, 40)
    commands = bad(world, 50)
    told = [c for c in of(commands, m.Alert) if c.kind == "failure"]
    assert [(c.data["cause"], c.data["target"]) for c in told] == [("numerics", "step 50")], (
        "once, not per rank"
    )
    commands = world.answer(commands, (*flush(one, 49, [0, 1, 2, 3]), *snapshot(one, 48)))
    after = world.run(commands)
    assert (after.source.kind, after.resume_step) == ("commit", 25), "40 is not 20 steps older"
    assert after.rewinds == (m.Rewind(25, 50, "non-finite"),)
    assert [step for step in range(101) if after.passes_over(step)] == list(range(26, 51))
    (report,) = [c for c in of(commands, m.Alert) if c.kind == "recovery"]
    assert "rewind 1 of at most 3 within 1000 steps; samples 800 to 1599 are passed over" in report.text
    assert of(commands, m.Finish) == []
    assert world.machine.view.committed == 25, "later commits are void"


def test_later_generations_and_terms_pass_over_the_same_steps() -> None:
    world = running()
    committed(world, 25)
    rewound = world.run(world.answer(bad(world, 50)))
    lost = world.send(*outcomes(rewound, FailureKind.FAILED, 60))
    again = world.run(world.answer(lost, flush(rewound, 60, [0, 1, 2, 3])))
    assert (again.resume_step, again.rewinds) == (60, rewound.rewinds)
    other = World(job(**REWIND))
    commits = (m.Commit(25, gid(1), "m25", 3),)
    started = other.begin(
        ("a", 4), term=2, commits=commits, generations=(spec(1, m.Source("init"), None), again)
    )
    later = other.run(other.answer(other.ready(started)))
    assert later.rewinds == rewound.rewinds


def test_a_rewind_too_many_ends_the_run_and_names_the_samples() -> None:
    world = running(elastic__max_rewinds=1)
    committed(world, 25)
    world.answer(bad(world, 50))
    commands = world.answer(bad(world, 70), flush(world.spec, 69, [0, 1, 2, 3]))
    assert world.state is MachineState.FINALISING
    world.send(m.Uploaded("a", world.spec.id, 69))
    (end,) = of(world.log_appends(), m.Finish)
    assert end.status == "failed"
    assert "step 70 is bad; rewinds within 1000 steps: 1, as many as elastic.max_rewinds allows" in end.detail
    assert "step 50 (samples 800 to 1599 passed over) non-finite" in end.detail
    assert of(commands, m.RunGeneration) == []


def test_what_ended_long_ago_is_no_reason_to_end() -> None:
    config = job(**REWIND, steps=5000, elastic__max_rewinds=1, elastic__skip_window_steps=100)
    before = (m.Rewind(25, 50, "spike"),)
    assert decide(config, BadStep(150, "spike", "x"), before)[0]
    assert not decide(config, BadStep(149, "spike", "x"), before)[0]


def test_only_what_the_config_answers_so_is_rewound() -> None:
    config = job(**REWIND)
    assert asked_for(config, BadStep(50, "non-finite", ""))
    assert not asked_for(config, BadStep(50, "spike", "")), "on_spike is off"
    assert asked_for(job(elastic__on_spike="rewind"), BadStep(50, "spike", ""))
    assert not asked_for(config, BadStep(100, "non-finite", "")), "the last step"
    world = World()  # skip: more than its limit
    one = world.up(("a", 4))
    world.answer(bad(world, 50), flush(one, 49, [0, 1, 2, 3]))
    assert world.state is MachineState.FINALISING


def test_a_failure_at_the_same_time_goes_first() -> None:
    world = running()
    committed(world, 25)
    one = world.spec
    commands = bad(world, 50)
    commands += world.send(m.WorkerExited(one.members[0].worker, "killed"))
    after = world.spec
    if after is one:  # the exit came while inventories are taken
        after = world.run(world.answer(commands, flush(one, 49, [0, 1, 2, 3])))
    assert after.rewinds in ((), (m.Rewind(25, 50, "non-finite"),))
    first = running()
    one = first.spec
    committed(first, 25)
    commands = first.send(m.WorkerExited(one.members[0].worker, "killed"))
    commands += bad(first, 50)
    after = first.run(first.answer(commands, flush(one, 49, [0, 1, 2, 3])))
    assert (after.resume_step, after.rewinds) == (49, ()), "the numbers may be its work: computed again"


def test_a_stop_is_obeyed_before_a_rewind() -> None:
    world = running()
    one = world.spec
    commands = world.send(m.UserRequest("stop"))
    world.answer(commands + bad(world, 50), flush(one, 49, [0, 1, 2, 3]))
    assert world.state is MachineState.FINALISING
    world.send(m.Uploaded("a", one.id, 49))
    assert [end.status for end in of(world.log_appends(), m.Finish)] == ["stopped"]


def test_a_user_who_goes_back_further_is_not_bound_by_rewinds() -> None:
    old = spec(1, m.Source("init"), None)
    passed = (m.Rewind(5, 8, "spike"), m.Rewind(25, 50, "spike"))
    commits = tuple(m.Commit(step, gid(2), f"m{step}", step) for step in (10, 60))
    later = replace(spec(2, m.Source("init"), old), rewinds=passed)
    world = World(job(checkpoint__resume_step=10))
    started = world.begin(("a", 4), term=2, commits=commits, generations=(old, later))
    after = world.run(world.answer(world.ready(started)))
    assert (after.resume_step, after.rewinds) == (10, passed[:1])


@pytest.mark.parametrize(
    ("wanted", "below", "slots", "commits", "found"),
    [
        (30, 50, (48, 49), (10, 30, 40), ("commit", 30)),
        (30, 50, (30, 49), (30,), ("slots", 30)),  # nearer
        (30, 50, (48, 49), (40, 45), ("commit", 40)),  # the oldest where none is old enough
        (48, 50, (48, 49), (10,), ("slots", 48)),
        (-5, 10, (9,), (), ("slots", 9)),
        (30, 50, (50, 51), (60,), ("init", 0)),
    ],
)
def test_the_state_to_rewind_to(
    wanted: int, below: int, slots: tuple[int, ...], commits: tuple[int, ...], found: tuple[str, int]
) -> None:
    one = spec(1, m.Source("init"), None)
    held = [slot for step in slots for slot in snapshot(one, step)]
    entries = [m.Commit(step, one.id, f"m{step}", step) for step in commits]
    source, why = older_state(held, {one.id: one.layout}, entries, one, wanted=wanted, below=below)
    assert (source.kind, source.step) == found
    assert why


def test_concerns_have_one_order() -> None:
    kinds = [
        concern_of(FailureKind.HANG),
        concern_of(FailureKind.FAILED, "oom"),
        concern_of(FailureKind.NUMERICS),
    ]
    assert kinds == [Concern.FAILURE, Concern.MEMORY, Concern.NUMERICS] == sorted(Concern)[:3]
    assert goes_before(FailureKind.HANG, "", FailureKind.NUMERICS, "")
    assert goes_before(FailureKind.HANG, "", FailureKind.FAILED, "oom")
    assert goes_before(FailureKind.FAILED, "oom", FailureKind.NUMERICS, "")
    assert not goes_before(FailureKind.HANG, "", FailureKind.NODE_LOST, "")


def test_a_step_that_is_always_bad_is_passed_over_whatever_else_goes_wrong() -> None:
    reports = [simulate(seed, bad_step=41, rewind=True) for seed in range(SEEDS)]
    broken = [f"seed {report.seed}: {report.failures[0]}" for report in reports if report.failures]
    assert not broken, "\n".join(broken[:10])
