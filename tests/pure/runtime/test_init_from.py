"""``init_from``: another run's commit becomes the first one of a new run, or is refused before it starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store import import_commit
from picotron_ray.checkpoint.store.gc import collect
from picotron_ray.checkpoint.store.manifest import UPDATES, load_manifest
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import latest_good
from picotron_ray.config.export import public_dict
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import CheckpointConfig
from picotron_ray.errors import ConfigError, CorruptError
from picotron_ray.runtime.driver.resolve_start import settled_start
from tests.support.checkpoint.checkpoint_kit import generation, load, make_state, same, save

STATE = make_state(7)
WEIGHTS = {name: array for name, array in STATE.items() if "/" not in name}
MakeJob = Callable[..., JobConfig]


@pytest.fixture
def old(memory_path: Path) -> LocalStorage:
    """Run ``old`` with commits of steps 4 and 8."""
    storage = LocalStorage(str(memory_path), "old")
    storage.put("run.json", json.dumps({"config": public_dict(JobConfig(name="old"))}).encode())
    log = RunLog(storage)
    log.claim_term("test")
    save(storage, log, memory_path / "slots", make_state(4), (1, 1, 4))
    save(storage, log, memory_path / "slots", STATE, (1, 1, 8))
    return storage


@pytest.fixture
def job(memory_path: Path) -> MakeJob:
    def make(**init_from: Any) -> JobConfig:
        others = {key: init_from.pop(key) for key in ("model", "precision", "optimizer") if key in init_from}
        values = {"name": "new", "storage": {"url": str(memory_path)}, **others}
        return JobConfig.model_validate({**values, "init_from": {"run": "old", **init_from}})

    return make


def taken_over(old: LocalStorage, folder: Path, with_moments: bool) -> tuple[LocalStorage, RunLog]:
    found = import_commit.find(old, None)
    new = LocalStorage(str(folder), "new")
    log = RunLog(new)
    log.claim_term("test")
    log.append("generation", generation(1, 0))
    key, digest = import_commit.copy_commit(old, found.key, found.digest, new, (1, 0), with_moments)
    log.append("commit", {"term": 1, "n": 0, "step": 0, "manifest": key, "digest": digest})
    return new, log


@pytest.mark.parametrize("with_moments", [True, False])
def test_what_is_taken_over_is_a_whole_commit_of_step_0(
    old: LocalStorage, memory_path: Path, with_moments: bool
) -> None:
    new, log = taken_over(old, memory_path, with_moments)
    good = latest_good(new, log)
    assert good is not None
    assert (good.manifest.step, good.manifest.cursor, good.manifest.ledger) == (0, 0, ())
    assert same(load(new, good.manifest), STATE if with_moments else WEIGHTS)
    assert import_commit.weights_only(good.manifest) is not with_moments
    assert good.manifest.extra[import_commit.ORIGIN]["step"] == 8
    found = import_commit.find(old, None)
    again = import_commit.copy_commit(old, found.key, found.digest, new, (2, 0), with_moments)
    assert again[0] == "manifests/0-2-0.json", "after a crash it is done again, by the next term"


@pytest.mark.parametrize("with_moments", [True, False])
def test_moments_bring_the_number_of_updates_that_they_have_not_seen(
    old: LocalStorage, memory_path: Path, with_moments: bool
) -> None:
    """The bias correction counts from the other run's step; its window of bad steps stays behind."""
    found = import_commit.find(old, None)
    left = {"skipped": 2, "recent": [[3, "non-finite"], [5, "spike"]], "losses": [2.0]}
    changed = replace(found.manifest, extra={UPDATES: left}).encode()
    old.put("manifests/changed.json", changed)
    new = LocalStorage(str(memory_path), "new")
    key, _ = import_commit.copy_commit(old, "manifests/changed.json", "", new, (1, 0), with_moments)
    taken = load_manifest(new, key).extra.get(UPDATES)
    assert taken == ({"skipped": 2} if with_moments else None)


def test_the_new_run_outlives_the_old_and_continues_its_own_ledger(
    old: LocalStorage, memory_path: Path
) -> None:
    new, log = taken_over(old, memory_path, True)
    for entry in list(old.list("")):
        old.delete(entry.key)
    source = {"kind": "commit", "step": 0, "generation": {"term": 1, "n": 0}}
    log.append("generation", {**generation(1, 1), "source": source})
    save(new, log, memory_path / "slots", make_state(9), (1, 1, 3))
    good = latest_good(new, log)
    assert good is not None
    assert [(part.first, part.last) for part in good.manifest.ledger] == [(1, 3)]
    assert collect(new, log, CheckpointConfig(keep_last=1, gc_grace_s=0.0)).retired == (
        "manifests/0-1-0.json",
    )
    assert same(load(new, good.manifest), make_state(9))


def test_damage_is_found_at_the_launch_and_again_while_copying(old: LocalStorage, memory_path: Path) -> None:
    found = import_commit.find(old, 8)
    victim = (
        Path(old.where)
        / f"chunks/{next(iter(found.manifest.chunks))[:2]}"
        / next(iter(found.manifest.chunks))
    )
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(raw)
    assert import_commit.find(old, 8, verify=False).manifest.step == 8
    with pytest.raises(CorruptError, match="commit of step 8 does not verify"):
        import_commit.find(old, 8)
    with pytest.raises(CorruptError, match="do not match their address"):
        import_commit.copy_commit(
            old, found.key, found.digest, LocalStorage(str(memory_path), "new"), (1, 0), True
        )


def test_the_step_is_settled_once(old: LocalStorage, memory_path: Path, job: MakeJob) -> None:
    new = LocalStorage(str(memory_path), "new")
    step, record = settled_start(job(), new, verify=True)
    assert step == 8
    assert record is not None
    assert (record["from"], record["step"]) == (old.where, 8)
    assert settled_start(job(step=4), new)[0] == 4
    chosen = job(step=4)
    new.put("run.json", json.dumps({"config": public_dict(chosen), "origin": record}).encode())
    assert settled_start(job(), new) == (4, None), "the step that run.json holds, though there is a newer one"
    assert settled_start(JobConfig(), new) == (None, None)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"step": 5}, [r"init_from: .*expected a commit of step 5, found commits at steps \[4, 8\]"]),
        ({"run": "nobody"}, ["init_from: .*nobody.*check init_from.run, .url and .step"]),
        (
            {"model": {"layers": 2}, "precision": "fp64"},
            ["precision: run 'old' in init_from has 'fp32', saw 'fp64'", "model.layers: .*has 4, saw 2"],
        ),
        ({"optimizer": {"name": "sgd"}, "optimizer_state": True}, ["optimizer.name: .*'adamw', saw 'sgd'"]),
    ],
    ids=["step", "run", "model", "optimizer"],
)
def test_what_cannot_be_taken_is_refused(
    old: LocalStorage, memory_path: Path, job: MakeJob, asked: dict[str, Any], expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        settled_start(job(**asked), LocalStorage(str(memory_path), "new"), verify=True)
    assert len(refused.value.problems) == len(expected)
    for line, pattern in zip(refused.value.problems, expected, strict=True):
        with pytest.raises(ConfigError, match=pattern):
            raise ConfigError(line)


def test_other_optimizers_and_bf16_take_the_weights(
    old: LocalStorage, memory_path: Path, job: MakeJob
) -> None:
    new = LocalStorage(str(memory_path), "new")
    assert settled_start(job(optimizer={"name": "sgd"}), new)[0] == 8
    assert settled_start(job(precision="bf16"), new)[0] == 8


def test_adapters_and_freezing_are_the_new_runs_own(
    old: LocalStorage, memory_path: Path, job: MakeJob
) -> None:
    """Weights are taken into a run that freezes or adapts them; moments only where both train the same."""
    new, lora = LocalStorage(str(memory_path), "new"), {"lora": {"rank": 4, "alpha": 8}}
    assert settled_start(job(model={"freeze": ["embed.*"]}), new)[0] == 8
    assert settled_start(job(model=lora), new)[0] == 8
    with pytest.raises(ConfigError, match=r"model\.freeze: run 'old' in init_from has \[\], saw"):
        settled_start(job(model={"freeze": ["embed.*"]}, optimizer_state=True), new)
    with pytest.raises(ConfigError, match=r"model\.lora\.rank: run 'old' in init_from has 0, saw 4"):
        settled_start(job(model=lora, optimizer_state=True), new)
    adapted = public_dict(JobConfig.model_validate({"name": "old", "model": lora}))
    old.put("run.json", json.dumps({"config": adapted}).encode())
    assert settled_start(job(model=lora), new)[0] == 8
    with pytest.raises(ConfigError, match=r"model\.lora\.rank: run 'old' in init_from has 4, saw 0"):
        settled_start(job(), new)


def test_moments_are_not_taken_from_a_commit_without_them(
    old: LocalStorage, memory_path: Path, job: MakeJob
) -> None:
    new, _ = taken_over(old, memory_path, False)
    new.put("run.json", json.dumps({"config": public_dict(JobConfig(name="new"))}).encode())
    asked = job(run="new", optimizer_state=True).model_copy(update={"name": "third"})
    with pytest.raises(ConfigError, match=r"init_from\.optimizer_state: .*holds weights alone"):
        settled_start(asked, LocalStorage(str(memory_path), "third"))
