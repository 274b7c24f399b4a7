"""What a run goes on from where the state that it went back to cannot be used: no commit is given up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.checkpoint.store.gc import retained, rewind_reach
from picotron_ray.checkpoint.store.run_log import Entry
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import plain
from picotron_ray.failures import FailureKind
from tests.pure.coordinator.test_rewind import bad, committed, running
from tests.support.runs.coordinator_world import World, flush, gid, job, of, snapshot, spec

ALL = [0, 1, 2, 3]


def source_fails(world: World, slots: tuple[m.SlotInfo, ...] = ()) -> list[m.Command]:
    """All members find the state corrupt that they are to start from; then nodes say what they hold."""
    one = world.spec
    name = one.source.manifest or one.source.slots[0].slot
    found = [
        m.Outcome(x.worker, one.id, FailureKind.FAILED, one.resume_step, f"corrupt:{name}")
        for x in one.members
    ]
    commands = world.send(*found)
    return commands + world.answer(commands, slots)


def ends(commands: list[m.Command]) -> list[tuple[str, str]]:
    return [(end.status, end.detail) for end in of(commands, m.Finish)]


# --- a rewind ------------------------------------------------------------------------------------------


def rewound_to_25(*steps: int) -> tuple[World, tuple[m.SlotInfo, ...]]:
    """Step 50 was bad, and the run goes back to the commit of step 25; slots of step 49 are still held."""
    world = running()
    for step in steps:
        committed(world, step)
    held = flush(world.spec, 49, ALL)
    after = world.run(world.answer(bad(world, 50), held))
    assert (after.source.kind, after.resume_step, after.rewinds[-1].bad_step) == ("commit", 25, 50)
    return world, held


def test_a_rewind_whose_commit_is_damaged_goes_to_the_next_best_from_before_the_bad_step() -> None:
    world, held = rewound_to_25(5, 25, 40, 45)
    after = world.run(source_fails(world, held))
    assert (after.resume_step, after.rewinds) == (5, (m.Rewind(5, 50, "non-finite"),)), "still 20 steps older"
    world, held = rewound_to_25(25, 40, 45)
    after = world.run(source_fails(world, held))
    assert (after.resume_step, after.rewinds) == (40, (m.Rewind(40, 50, "non-finite"),)), "it is whole"
    assert after.lineage == (m.Link(gid(1), 40),)
    assert world.machine.view.committed == 40


def test_what_the_failed_rewind_left_out_counts_again_for_a_later_loss() -> None:
    world, held = rewound_to_25(25, 40, 45)
    world.run(source_fails(world, held))
    again = world.run(source_fails(world, held))
    assert (again.resume_step, again.rewinds) == (45, (m.Rewind(45, 50, "non-finite"),))


def test_a_rewind_takes_what_is_left_from_before_the_bad_step_or_ends_the_run_by_name() -> None:
    world, held = rewound_to_25(25)
    after = world.run(source_fails(world, held))
    assert (after.source.kind, after.rewinds) == ("slots", (m.Rewind(49, 50, "non-finite"),))
    world, _ = rewound_to_25(25)
    ((status, detail),) = ends(source_fails(world))
    assert status == "storage"
    assert detail.startswith("all commits are damaged, the newest one is of step 25")


def test_a_member_lost_before_its_state_was_there_leaves_the_rewind_to_be_done() -> None:
    """Its source, a snapshot, goes with it; the commits that it had voided are from before the bad step."""
    world = running()
    one = world.spec
    committed(world, 40)
    older = snapshot(one, 30)
    rewound = world.run(world.answer(bad(world, 50), (*flush(one, 49, ALL), *older)))
    assert (rewound.source.kind, rewound.resume_step) == ("slots", 30)
    commands = world.send(m.WorkerExited(rewound.members[0].worker, "killed"))
    commands += world.send(
        *(m.Outcome(x.worker, rewound.id, FailureKind.PEER_LOST, 30) for x in rewound.members[1:])
    )
    after = world.run(commands + world.answer(commands))
    assert (after.source.kind, after.resume_step) == ("commit", 40)
    assert after.rewinds == (m.Rewind(40, 50, "non-finite"),)


def test_a_rewind_that_was_at_work_is_not_taken_back() -> None:
    world, _ = rewound_to_25(25, 40, 45)
    two = world.spec
    world.send(m.Heartbeat("a", two.id, {two.members[0].worker: 51}))
    commands = world.send(
        *(m.Outcome(x.worker, two.id, FailureKind.FAILED, 51, "error") for x in two.members)
    )
    after = world.run(world.answer(commands, flush(two, 51, ALL)))
    assert (after.resume_step, after.rewinds) == (51, two.rewinds)
    assert after.lineage == (m.Link(gid(1), 25), m.Link(two.id, 51))


# --- checkpoint.resume_step ---------------------------------------------------------------------------

OLD = spec(1, m.Source("init"), None)
COMMITS = tuple(m.Commit(step, gid(1), f"m{step}", step) for step in (10, 20, 30))


def launched(
    config: JobConfig, *known: m.GenerationSpec, commits: Any = COMMITS
) -> tuple[World, list[m.Command]]:
    world = World(config)
    commands = world.ready(
        world.begin(("a", 4), term=2 + len(known), commits=commits, generations=(OLD, *known))
    )
    return world, commands + world.answer(commands)


def gone_back(step: int) -> tuple[World, m.GenerationSpec]:
    """A run that was told to go back, and finds the commit of that step damaged: it has ended."""
    world, commands = launched(job(checkpoint__resume_step=step))
    after = world.run(commands)
    assert (after.resume_step, after.obeyed_step) == (step, step)
    ((status, detail),) = ends(source_fails(world))
    assert status == "storage"
    assert f"the commit of step {step}, which checkpoint.resume_step asks for, is damaged" in detail
    assert "name another one of [20, 30], or leave it out to go on from the newest" in detail
    return world, after


@pytest.mark.parametrize(("asked", "found"), [(None, 30), (30, 30), (20, 20)])
def test_going_back_to_a_damaged_commit_gives_nothing_up(asked: int | None, found: int) -> None:
    _, failed = gone_back(10)
    world, commands = launched(job(checkpoint__resume_step=asked), failed)
    after = world.run(commands)
    assert (after.source.kind, after.resume_step, after.obeyed_step) == ("commit", found, asked)
    assert after.lineage == (m.Link(gid(1), found),)


def test_the_same_launch_again_still_owes_the_step_that_it_never_went_back_to() -> None:
    _, failed = gone_back(10)
    _, commands = launched(job(checkpoint__resume_step=10), failed)
    assert commands == commands
    after = World.run(commands)
    assert (after.resume_step, after.obeyed_step) == (10, 10), "the user may have mended it"


def test_a_launch_without_the_step_says_that_the_run_had_gone_back_to_it() -> None:
    """Nothing is left of what it did since, and nobody knows whether it did anything."""
    two = replace(spec(2, m.Source("commit", 10, gid(1), manifest="m10"), OLD), obeyed_step=10)
    world, commands = launched(job(), two)
    assert world.run(commands).resume_step == 30
    told = [alert.text for alert in of(world.log, m.Alert) if alert.kind == "resume"]
    assert [text[:39] for text in told] == ["the run had gone back to step 10, and n"]
    assert told[0].endswith("launch with checkpoint.resume_step=10")
    later = m.Commit(12, two.id, "n12", 90)
    world, commands = launched(job(), two, commits=(*COMMITS, later))
    assert world.run(commands).resume_step == 12
    assert not [alert for alert in of(world.log, m.Alert) if alert.kind == "resume"]


def test_a_user_may_go_back_to_a_commit_that_was_made_void() -> None:
    """Generation 1 went to 30; 2 went back to 10 and did 15 and 40; the user wants 30 of generation 1."""
    two = replace(
        spec(2, m.Source("commit", 10, gid(1), manifest="m10"), OLD), rewinds=(m.Rewind(10, 12, "spike"),)
    )
    later = tuple(m.Commit(step, two.id, f"n{step}", 90 + step) for step in (15, 40))
    world, commands = launched(job(checkpoint__resume_step=30), two, commits=(*COMMITS, *later))
    after = world.run(commands)
    assert (after.source.manifest, after.lineage, after.rewinds) == ("m30", (m.Link(gid(1), 30),), ())


# --- what is retired ---------------------------------------------------------------------------------------


def test_the_machine_forgets_what_was_retired() -> None:
    world = running()
    for step in (10, 25, 40):
        committed(world, step)
    one = world.spec
    assert world.send(m.Retired((f"manifests/25-{one.id}",))) == []
    after = world.run(world.answer(bad(world, 50), flush(one, 49, ALL)))
    assert after.resume_step == 10


def test_what_is_committed_goes_back_with_a_newest_commit_that_is_given_up() -> None:
    world = running()
    for step in (10, 25, 40):
        committed(world, step)
    world.send(m.Retired((f"manifests/10-{world.spec.id}",)))
    assert world.machine.view.committed == 40
    world.send(m.Retired((f"manifests/40-{world.spec.id}",)))
    assert world.machine.view.committed == 25


class Retention:
    """A machine with the log and the retention of its run, of which it hears unless it is ``deaf``."""

    def __init__(self, world: World, deaf: bool = False) -> None:
        self.world, self.deaf, self.entries = world, deaf, list[Entry]()
        self.log: Any = SimpleNamespace(entries=lambda: self.entries, commits=self.commits)

    def add(self, kind: Any, **body: Any) -> None:
        self.entries.append(Entry(len(self.entries) + 1, kind, 1, "w", "", body))

    def gone(self) -> set[str]:
        return {key for e in self.entries if e.kind == "retire" for key in e.body["manifests"]}

    def commits(self) -> list[Entry]:
        return [e for e in self.entries if e.kind == "commit" and e.body["manifest"] not in self.gone()]

    def launched(self) -> None:
        one = self.world.spec
        self.add("generation", term=one.id.term, n=one.id.n, source=plain(one.source), spec={})

    def commit(self, step: int) -> None:
        one, config = self.world.spec, self.world.config
        self.world.send(m.Heartbeat("a", one.id, {one.members[0].worker: step}))
        committed(self.world, step)
        self.add("commit", term=one.id.term, n=one.id.n, step=step, manifest=f"manifests/{step}-{one.id}")
        keep = {e.seq for e in retained(self.log, config.checkpoint, (), rewind_reach(config))}
        given_up = [e.body["manifest"] for e in self.commits() if e.seq not in keep]
        if given_up:
            self.add("retire", manifests=given_up)
        if given_up and not self.deaf:
            self.world.send(m.Retired(tuple(given_up)))


def twice_rewound(deaf: bool = False) -> tuple[Retention, m.GenerationSpec]:
    """Steps 260 and 320 are bad, a rewind goes back 100 steps, commits are 50 steps apart."""
    world = running(elastic__rewind_steps=100, steps=5000)
    run = Retention(world, deaf)
    run.launched()
    for step in (50, 100, 150, 200, 250):
        run.commit(step)
    after = world.run(world.answer(bad(world, 260), flush(world.spec, 259, ALL)))
    assert after.resume_step == 150
    run.launched()
    run.commit(300)
    after = world.run(world.answer(bad(world, 320), flush(world.spec, 319, ALL)))
    run.launched()
    return run, after


def test_the_second_rewind_finds_the_commit_that_it_goes_back_to() -> None:
    run, after = twice_rewound()
    assert (after.source.kind, after.resume_step) == ("commit", 150)
    assert after.source.manifest not in run.gone()


def test_a_run_whose_rewind_finds_nothing_never_begins_anew() -> None:
    """Whatever was retired under its feet, the next launch goes on from the newest commit that counts."""
    run, _ = twice_rewound()
    left = tuple(
        m.Commit(e.body["step"], m.GenerationId(1, e.body["n"]), e.body["manifest"], e.seq)
        for e in run.commits()
        if e.body["step"] > 150  # as if it was lost
    )
    specs = tuple(c.spec for c in of(run.world.log, m.RunGeneration))
    world = World(run.world.config)
    commands = world.ready(world.begin(("a", 4), term=2, commits=left, generations=specs))
    begun = world.run(commands + world.answer(commands))
    assert (begun.source.kind, begun.resume_step) == ("commit", 300)
    assert begun.rewinds == (*specs[1].rewinds, m.Rewind(300, 320, "non-finite")), "it is still owed"


def test_commits_that_no_known_generation_descends_from_end_the_run_by_name() -> None:
    """Their generations' entries are lost: nobody can say what they are."""
    world = World()
    commits = (m.Commit(20, gid(7), "m20", 3),)
    commands = world.ready(world.begin(("a", 4), term=2, commits=commits, generations=(OLD,)))
    ((status, detail),) = ends(commands + world.answer(commands))
    assert status == "storage"
    assert "does not begin anew unasked; go on from a commit of [20] by checkpoint.resume_step" in detail
