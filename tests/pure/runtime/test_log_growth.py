"""A week of re-meshes at 2,048 nodes of 8 workers: what is stored and held of it, what a restart reads."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.run_log import Entry, RunLog
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import decode, encode, plain
from picotron_ray.coordinator.lineage import descend, slim, trimmed
from picotron_ray.coordinator.replay import event_line
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.coordinator.admission import joined
from picotron_ray.runtime.coordinator.beginning import begin_event
from picotron_ray.runtime.run_storage import run_store
from picotron_ray.runtime.run_storage.generation_entries import generation_body, read_generations, spec_of
from picotron_ray.runtime.run_storage.run_store import RunStore
from tests.support.checkpoint.checkpoint_kit import generation

NODES, EACH = 2048, 8
WEEK = 7 * 17  # Llama 3's 8.6 interruptions a day at this size: a generation without a node, and one with it
KB, MB = 1 << 10, 1 << 20


def remeshes(count: int, nodes: int, term: int = 1) -> list[m.GenerationSpec]:
    """Generations that each go on from the one before, by slots of all of its workers and copies of them."""
    names = [f"{at:056x}" for at in range(nodes)]
    members = tuple(m.Member(f"w{term}-{at}", names[at // EACH]) for at in range(nodes * EACH))
    layout, found = Layout(dp=len(members), zero=3), list[m.GenerationSpec]()
    slots = _slots(members, layout)
    for n in range(1, count + 1):
        before = found[-1] if found else None
        source = m.Source("init") if before is None else replace(slots, step=50 * n, generation=before.id)
        words = m.GenerationId(term, n), members, layout, source, "worker lost", descend(before, source)
        found.append(m.GenerationSpec(*words))
    return found


def _slots(members: tuple[m.Member, ...], layout: Layout) -> m.Source:
    """Source that names a slot of each member; the same ones stand for those of all generations."""
    slots = tuple(
        m.SlotInfo(
            member.node, f"{member.worker}.1.slot", m.GenerationId(1, 1), 50, rank, (m.Fragment(rank),)
        )
        for rank, member in enumerate(members)
    )
    copies = (m.StateCopy(members[0].node, (0,), ("w.1.slot",)),)
    return m.Source("slots", slots=slots, layout=layout, copies=copies)


def of_before(spec: m.GenerationSpec) -> dict[str, Any]:
    """Body of an earlier version's entry."""
    return {"term": spec.id.term, "n": spec.id.n, "source": plain(spec.source), "spec": plain(spec)}


def commit_of(spec: m.GenerationSpec) -> dict[str, Any]:
    step = spec.resume_step + 10
    return {"term": spec.id.term, "n": spec.id.n, "step": step, "manifest": f"m/{spec.id}", "digest": "d"}


def written(job: JobConfig, specs: Iterable[m.GenerationSpec]) -> RunStore:
    """A run's storage with generations, each with a commit but the last two; two commits are retained."""
    store = RunStore(job, lambda step: None)
    store.claim()
    specs = list(specs)
    for at, spec in enumerate(specs):
        assert store.append_generation(spec).seq
        if at < len(specs) - 2:
            store._log.append("commit", commit_of(spec))
    gone = [f"m/{spec.id}" for spec in specs[:-4]]
    store._log.append("retire", {"manifests": gone})
    return store


def job_of(folder: Path) -> JobConfig:
    return JobConfig.model_validate({"name": "week", "storage": {"url": str(folder)}})


def restarted(job: JobConfig) -> tuple[RunStore, m.Begin]:
    """The store and the first event of a term that is claimed now."""
    store = RunStore(job, lambda step: None)
    begin = begin_event(store.claim(), *store.state(verify=False), {})
    store.close()
    return store, begin


def held_bytes(hold: Any) -> tuple[Any, int, int]:
    """Call ``hold``; return what it does, the bytes that it holds then, and the most while it worked."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = hold()
        gc.collect()
        return kept, *tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Reads of storage: key and bytes."""
    found: list[tuple[str, int]] = []
    get_range = LocalStorage.get_range

    def counted(self: LocalStorage, key: str, start: int, length: int) -> bytes:
        data = get_range(self, key, start, length)
        found.append((key, len(data)))
        return data

    monkeypatch.setattr(LocalStorage, "get_range", counted)
    return found


def test_a_restart_after_a_week_of_remeshes_at_size(memory_path: Path, reads: list[tuple[str, int]]) -> None:
    job, specs = job_of(memory_path), remeshes(WEEK, NODES)
    written(job, specs).close()
    reads.clear()
    _, begin = restarted(job)
    entries = [(key, size) for key, size in reads if key.startswith("log/") and size]
    assert len(entries) <= len(list((memory_path / "week" / "log").iterdir())), "each is read once"
    assert sum(size for _, size in entries) < WEEK * 400 * KB, "it was 9 MB a generation, and 1.1 GB"
    assert [spec.id for spec in begin.generations] == [spec.id for spec in specs]
    assert begin.generations == trimmed(specs, {commit.generation for commit in begin.commits})
    assert [len(spec.members) for spec in begin.generations] == [0] * (WEEK - 1) + [NODES * EACH]
    assert begin.generations[-1].members == specs[-1].members
    assert sum(len(spec.lineage) for spec in begin.generations) <= 4 * WEEK, "of those that may count"
    line = event_line(1.0, begin, [])
    assert len(line) < 3 * MB, "it was a GB; a part of the event log has 64 MiB"
    assert decode(json.loads(line)["event"]) == begin


@pytest.mark.parametrize("who", ["writes them", "reads them", "reads an earlier version's"])
def test_memory_does_not_grow_with_the_members_of_past_generations(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    nodes = 64
    if who == "reads an earlier version's":
        nodes = 24
        monkeypatch.setattr(run_store, "generation_body", of_before)
    held, most = [], []
    hold: Callable[[], Any]
    for count in (6, 30):
        specs, job = remeshes(count, nodes), job_of(memory_path / str(count))
        if who == "writes them":
            hold = partial(written, job, specs)
        else:
            written(job, specs).close()
            hold = partial(restarted, job)
        _, *figures = held_bytes(hold)
        held.append(figures[0])
        most.append(figures[1])
    assert held[1] - held[0] < 24 * 20 * KB, "it was 600 KB and more for each"
    assert most[1] - most[0] < 6 * MB, "some are read at a time"


@pytest.mark.parametrize("of", ["this version", "an earlier one", "both"])
def test_generations_are_read_alike_however_they_were_entered(storage: LocalStorage, of: str) -> None:
    specs = [*remeshes(6, 3), *remeshes(2, 2, term=2)]
    bodies = {"this version": generation_body, "an earlier one": of_before}
    log = RunLog(storage)
    log.claim_term("a")
    for at, spec in enumerate(specs):
        body = list(bodies.values())[at % 2] if of == "both" else bodies[of]
        log.append("generation", body(spec))
        if at in (1, 3):
            log.append("commit", commit_of(spec))
    reader = RunLog(storage)
    reader.refresh()
    for each in (log, reader, reader.witness()):
        found = read_generations(each.entries(), each.commits())
        assert found == trimmed(specs, {specs[1].id, specs[3].id})
        assert not any(spec.source.slots or spec.source.copies for spec in found)
    assert read_generations(log.entries()) == trimmed(specs, ()), "without a commit all may count"


def test_an_entry_tells_each_name_once_and_what_it_was_given() -> None:
    struck = (m.Strike(80, 70, "dp2", 0.1),)
    spec = m.GenerationSpec(
        m.GenerationId(2, 3),
        tuple(m.Member(f"w{at}", node) for at, node in enumerate("aabacc")),
        Layout(dp=6),
        m.Source("commit", 9, m.GenerationId(1, 4), manifest="m9", digest="d"),
        "why",
        (m.Link(m.GenerationId(1, 4), 9),),
        struck,
        (m.Rewind(9, 11, "spike"),),
        obeyed_step=9,
    )
    body = generation_body(spec)
    assert spec_of(json.loads(json.dumps(body))) == spec
    assert (body["nodes"], body["members"][:3]) == (
        ["a", "b", "c"],
        [[0, "w0", "w1"], [1, "w2"], [0, "w3"]],
    )
    assert "source" not in body["spec"]
    assert spec_of(body, with_lineage=False) == m.GenerationSpec(
        **{name: getattr(spec, name) for name in spec.__slots__ if name != "lineage"}
    )


def test_the_newest_entry_alone_is_whole(storage: LocalStorage) -> None:
    log = RunLog(storage)
    log.claim_term("a")
    for spec in remeshes(3, 2):
        log.append("generation", generation_body(spec))
        bodies = [entry.body for entry in log.entries() if entry.kind == "generation"]
        assert [bool(body["members"]) for body in bodies] == [False] * (len(bodies) - 1) + [True]
    log.append("generation", generation(1, 4))
    assert [entry.body["members"] for entry in log.entries() if entry.kind == "generation"] == [[]] * 4


def test_what_is_logged_of_a_generation_is_slim(storage: LocalStorage) -> None:
    """A slim spec is entered, read and decoded like any other."""
    (first, second) = remeshes(2, 2)
    for spec in (slim(first), slim(second)):
        entry = Entry(2, "generation", 1, "w", "n", generation_body(spec))
        assert read_generations([entry]) == (spec,)
        assert decode(encode(m.Begin(2, generations=(spec,)))).generations == (spec,)


def test_a_node_that_kept_slots_joins_without_the_members_of_their_generation() -> None:
    """Each of 2,048 nodes names that generation, and each that joins has a line in the event log."""
    (_, spec) = remeshes(2, 256)
    hello = {"spec": None, "workers": (), "busy": (), "kept_by": spec}
    one = joined(m.NodeTraits("a"), EACH, hello=hello)
    assert one.kept_by == slim(spec)
    assert begin_event(1, (), (), {"a": hello}).kept_by == slim(spec)
    assert len(event_line(1.0, one, [])) < 2 * KB, "it was 560 KB, and 4.5 MB at 2,048 nodes"


@pytest.fixture
def storage(memory_path: Path) -> LocalStorage:
    return LocalStorage(str(memory_path), "r1")
