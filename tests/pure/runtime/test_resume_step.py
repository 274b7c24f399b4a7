"""``checkpoint.resume_step`` over several launches: obeyed once, by storage as by the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store import gc
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import CheckpointConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import plain
from picotron_ray.coordinator.lineage import descend
from picotron_ray.errors import ConfigError, StorageUnavailableError
from picotron_ray.runtime.driver.preflight import check_resume_step
from picotron_ray.runtime.run_storage.generation_entries import generation_body
from picotron_ray.runtime.run_storage.run_store import RunStore
from tests.support.checkpoint import checkpoint_kit as kit
from tests.support.runs.coordinator_world import World, of

MEMBERS = tuple(m.Member(f"w{at}", "a") for at in range(kit.LAYOUT.world_size))


@pytest.fixture
def folder() -> Iterator[Path]:
    yield from kit.memory_folder()


def job(folder: Path, step: int | None) -> JobConfig:
    tree = {
        "name": "again", "steps": 100, "cluster": {"max_workers": 4}, "checkpoint": {"resume_step": step},
        "storage": {"url": str(folder / "runs")},
    }  # fmt: skip
    return JobConfig.model_validate(tree)


def began(
    config: JobConfig, slots: tuple[m.SlotInfo, ...] = (), joins: m.NodeJoined | None = None
) -> tuple[RunStore, World, list[m.Command]]:
    """A term begun from storage as it is, through the real store and machine; nodes hold some slots."""
    store = RunStore(config, lambda step: None)
    term = store.claim()
    found, generations = store.state(verify=True)
    world = World(config)
    begun = world.send(m.Begin(term, found, generations), joins or m.NodeJoined("a", 4))
    commands = world.ready(begun)
    return store, world, commands + world.answer(commands, slots)


def launch(
    config: JobConfig, commits: tuple[int, ...], folder: Path, slots: tuple[m.SlotInfo, ...] = ()
) -> m.GenerationSpec:
    """A launch that commits some steps."""
    store, _, commands = began(config, slots)
    (order,) = of(commands, m.RunGeneration)
    spec = replace(order.spec, members=MEMBERS, layout=kit.LAYOUT)
    term = spec.id.term
    store._log.append("generation", generation_body(spec))
    for step in commits:
        key = (spec.id.term, spec.id.n, step)
        kit.save(store._storage, store._log, folder / f"slots-{term}-{step}", kit.make_state(step), key)
    return spec


def test_a_second_launch_with_the_same_config_goes_on_from_the_newest_commit(folder: Path) -> None:
    launch(job(folder, None), (10, 20), folder)
    back = launch(job(folder, 10), (15, 18, 60, 90), folder)
    assert (back.resume_step, back.obeyed_step) == (10, 10)
    again = launch(job(folder, 10), (), folder)
    assert (again.source.kind, again.resume_step, again.obeyed_step) == ("commit", 90, 10)
    assert launch(job(folder, 10), (), folder).resume_step == 90, "nor after any number of them"


def test_the_step_gone_back_to_may_be_retired_since(folder: Path) -> None:
    config = job(folder, 10)
    launch(job(folder, None), (10, 20), folder)
    launch(config, (15, 18, 60, 90), folder)
    storage = open_storage(config.storage, config.name)
    log = RunLog(storage)
    log.claim_term("retention")
    gc.collect(storage, log, CheckpointConfig(keep_last=3), 0)
    assert 10 not in {entry.body["step"] for entry in log.commits()}
    check_resume_step(config, storage)
    assert launch(config, (), folder).resume_step == 90
    with pytest.raises(ConfigError, match="resume_step: saw 20, expected a committed step"):
        check_resume_step(job(folder, 20), storage)


def test_another_step_and_a_launch_without_one_are_obeyed(folder: Path) -> None:
    launch(job(folder, None), (10, 20), folder)
    launch(job(folder, 10), (15, 30), folder)
    assert launch(job(folder, 15), (16, 17), folder).resume_step == 15, "another step is another wish"
    plain_launch = launch(job(folder, None), (40,), folder)
    assert (plain_launch.resume_step, plain_launch.obeyed_step) == (17, None)
    assert launch(job(folder, 15), (), folder).resume_step == 15, "asked for anew"


def test_an_ordinary_resume_from_that_step_obeyed_nobody(folder: Path) -> None:
    launch(job(folder, None), (10,), folder)
    assert launch(job(folder, None), (20, 30), folder).resume_step == 10
    assert launch(job(folder, 10), (12,), folder).resume_step == 10, "20 and 30 are to be left out"


def entered_by_an_earlier_version(storage: Storage, spec: m.GenerationSpec, steps: tuple[int, ...]) -> None:
    log = RunLog(storage)
    log.claim_term("an earlier version")
    body = generation_body(spec)
    del body["spec"]["obeyed_step"]
    log.append("generation", body)
    for step in steps:
        key = {"manifest": f"m{step}", "digest": "d", "step": step}
        log.append("commit", {"term": spec.id.term, "n": spec.id.n, **key})


@pytest.mark.parametrize(("steps", "owed"), [((10, 20), False), ((5, 10), True)])
def test_logs_of_earlier_versions_tell_by_what_was_voided(
    folder: Path, steps: tuple[int, ...], owed: bool
) -> None:
    config = job(folder, 10)
    (folder / "runs").mkdir()
    storage = open_storage(config.storage, config.name)
    one = m.GenerationSpec(m.GenerationId(1, 1), MEMBERS, kit.LAYOUT, m.Source("init"), "start")
    source = m.Source("commit", 10, one.id, manifest="m10", digest="d")
    two = m.GenerationSpec(m.GenerationId(2, 1), MEMBERS, kit.LAYOUT, source, "start", descend(one, source))
    three = m.GenerationSpec(m.GenerationId(2, 2), MEMBERS, kit.LAYOUT, m.Source("slots", 12, two.id), "x")
    entered_by_an_earlier_version(storage, one, steps)
    entered_by_an_earlier_version(storage, two, (15,))
    entered_by_an_earlier_version(storage, three, ())
    store = RunStore(config, lambda step: None)
    store.claim()
    _, generations = store.state(verify=False)
    assert [spec.obeyed_step for spec in generations] == [None, *([None, None] if owed else [10, 10])]
    assert plain(generations[1].source) == plain(source)


def test_the_step_to_go_back_to_outlives_the_commit_of_what_was_kept(folder: Path) -> None:
    """An earlier launch kept step 60; this one is to go back to 40, and commits 60 before it does."""
    one = launch(job(folder, None), (40, 50, 55), folder)
    config = job(folder, 40)
    assert config.checkpoint.keep_last == 3
    store, _, _ = began(config)
    kit.save(store._storage, store._log, folder / "kept", kit.make_state(60), (one.id.term, one.id.n, 60))
    assert store.collect_garbage() == ""
    steps = [entry.body["step"] for entry in store._log.commits()]
    assert steps == [40, 50, 55, 60]
    assert launch(config, (), folder).resume_step == 40
    launch(config, (41, 42, 43, 44), folder)
    store, _, _ = began(config)
    store.collect_garbage()
    assert [entry.body["step"] for entry in store._log.commits()] == [42, 43, 44], "it was obeyed"


def test_what_a_collection_retires_is_told_once_also_where_it_fails_after_that(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(folder, None).model_copy(update={"checkpoint": CheckpointConfig(keep_last=1)})
    launch(config, (10, 20, 30), folder)
    store = RunStore(config, lambda step: None)
    store.claim()
    assert store.take_retired() == ()
    told = {entry.body["step"]: entry.body["manifest"] for entry in store._log.commits()}

    def fails(*words: object) -> int:
        raise StorageUnavailableError("storage is down")

    monkeypatch.setattr(gc, "_condemn", fails)
    assert store.collect_garbage() == "storage is down"
    assert store.take_retired() == tuple(sorted((told[10], told[20])))
    store.collect_garbage()
    assert store.take_retired() == ()
