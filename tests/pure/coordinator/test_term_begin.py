"""Begin of a term from what a log's reader leaves of old generations: the verdicts are those of the whole."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator import term_begin
from picotron_ray.coordinator.lineage import ancestors, descend, on_lineage, slim, trimmed
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.resume_state import MOST_CANDIDATES
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import World, job, of

LAYOUT = Layout(dp=2)
MEMBERS = (m.Member("w0", "a"), m.Member("w1", "b"))


def history(draw: random.Random, count: int) -> tuple[list[m.GenerationSpec], list[m.Commit]]:
    """Generations that go on from one another, from a commit or from nothing, some of them with commits."""
    specs: list[m.GenerationSpec] = []
    commits: list[m.Commit] = []
    term, n = 1, 0
    for _ in range(count):
        term, n = (term + 1, 1) if draw.random() < 0.2 else (term, n + 1)
        base = draw.choice(specs) if specs and draw.random() < 0.3 else (specs[-1] if specs else None)
        if base is None:
            source = m.Source("init")
        elif commits and draw.random() < 0.3:
            commit = draw.choice(commits)
            source = m.Source("commit", commit.step, commit.generation, manifest=commit.manifest)
            base = next((spec for spec in specs if spec.id == commit.generation), base)
        else:
            step = base.resume_step + draw.randrange(20)
            slot = m.SlotInfo("a", "w0.1.slot", base.id, step, 0, (m.Fragment(0),))
            source = m.Source("slots", step, base.id, (slot,), layout=LAYOUT)
        words = m.GenerationId(term, n), MEMBERS, LAYOUT, source, "x", descend(base, source)
        specs.append(m.GenerationSpec(*words, obeyed_step=draw.choice((None, 5))))
        for _ in range(draw.randrange(3) if draw.random() < 0.4 else 0):
            step = source.step + draw.randrange(30)
            name = f"m{len(commits)}"
            commits.append(m.Commit(step, specs[-1].id, name, len(specs) + len(commits)))
    return specs, commits


def begun(event: m.Begin, step: int | None) -> MachineMemory:
    machine = Machine(job(**({} if step is None else {"checkpoint__resume_step": step})))
    machine.handle(event, 0.0)
    return machine.memory


def counting(specs: list[m.GenerationSpec], commits: list[m.Commit]) -> list[m.GenerationId]:
    """Generations from the newest one with a commit on, also where another's lineage alone tells of it."""
    known = sorted({spec.id for spec in specs} | {each.id for spec in specs for each in ancestors(spec)})
    committed = {commit.generation for commit in commits}
    found = known[max((at for at, each in enumerate(known) if each in committed), default=0) :]
    return found if len(found) <= MOST_CANDIDATES else [found[0], *found[1 - MOST_CANDIDATES :]]


@pytest.mark.parametrize("seed", range(60))
def test_a_term_begins_alike_from_trimmed_generations(seed: int) -> None:
    """Also where entries of the log are missing, or an agent runs a newer generation than it has."""
    draw = random.Random(seed)
    specs, commits = history(draw, draw.randrange(1, 25))
    running = specs.pop() if len(specs) > 1 and draw.random() < 0.3 else None
    commits = [commit for commit in commits if running is None or commit.generation != running.id]
    kept = [spec for spec in specs if draw.random() < 0.8] or specs[-1:]
    step = draw.choice((None, *(commit.step for commit in commits)))
    whole = m.Begin(max(spec.id.term for spec in specs) + 1, tuple(commits), tuple(kept), running)
    least = replace(whole, generations=trimmed(kept, {commit.generation for commit in commits}))
    one, other = begun(whole, step), begun(least, step)
    told = [*kept, *([] if running is None else [running])]
    assert [spec.id for spec in one.candidates] == counting(told, commits)
    assert [slim(spec) for spec in one.candidates] == [slim(spec) for spec in other.candidates]
    assert (one.spec is None, one.state, one.rewind) == (other.spec is None, other.state, other.rewind)
    assert one.spec is not None
    assert other.spec is not None
    assert (one.spec.id, one.spec.members) == (other.spec.id, other.spec.members)
    writers = [{each: slim(spec) for each, spec in memory.writers.items()} for memory in (one, other)]
    assert writers[0] == writers[1]
    assert (one.layouts, one.logged) == (other.layouts, other.logged)
    assert one.checkpoints.committed == other.checkpoints.committed
    for spec, same in zip(one.candidates, other.candidates, strict=True):
        for commit in commits:
            place = commit.generation, commit.step
            assert on_lineage(spec, *place) == on_lineage(same, *place)


def test_a_begin_makes_no_stand_ins_of_what_is_older_than_the_newest_commits_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each generation names all of its ancestors: of 300 there were 45,000 stand-ins, each with a lineage."""
    specs: list[m.GenerationSpec] = []
    for n in range(1, 301):
        before = specs[-1] if specs else None
        source = m.Source("init") if before is None else m.Source("slots", 10 * n, before.id, layout=LAYOUT)
        words = m.GenerationId(1, n), MEMBERS, LAYOUT, source, "x", descend(before, source)
        specs.append(m.GenerationSpec(*words))
    commits = [m.Commit(10 * n + 5, m.GenerationId(1, n), f"m{n}", n) for n in (100, 297)]
    made = 0

    def counted(spec: m.GenerationSpec, since: m.GenerationId | None) -> list[m.GenerationSpec]:
        nonlocal made
        found = ancestors(spec, since)
        made += len(found)
        return found

    monkeypatch.setattr(term_begin, "ancestors", counted)
    told = trimmed(specs, {commit.generation for commit in commits})
    memory = begun(m.Begin(2, tuple(commits), told), None)
    assert [spec.id.n for spec in memory.candidates] == [297, 298, 299, 300]
    assert made <= 10
    assert sum(len(spec.lineage) for spec in told) < 5 * 300


def test_a_run_begins_from_a_generation_that_names_no_members() -> None:
    """Nobody of it failed: ``init_from`` writes such a one, and the coordinator died of that."""
    world = World(job())
    spec = m.GenerationSpec(m.GenerationId(1, 0), (), Layout(), m.Source("init"), "initial state")
    commit = m.Commit(0, spec.id, "m0", 3, "d")
    commands = world.begin(("a", 4), term=1, commits=(commit,), generations=(spec,))
    commands += world.ready(commands)
    commands += world.answer(commands)
    (order,) = of(commands, m.RunGeneration)
    assert order.spec.source == m.Source("commit", 0, spec.id, manifest="m0", digest="d")
