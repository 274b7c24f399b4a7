"""Moving average of the weights: its recursion, its place in the state, and computing with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, slot_bytes
from picotron_ray.checkpoint.torch_state import buffers, restore
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.memory_causes import memory_by_cause
from picotron_ray.planner.memory_explained import explain_memory
from picotron_ray.train.engine import Engine, build_engine
from tests.gloo.checkpoint.test_restore_slots import source
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    CPU,
    MIXTURE,
    MODEL,
    assemble,
    batch,
    make_job,
    pieces,
)
from tests.support.gloo.parity import WEIGHTS_TOLERANCE, worst
from tests.support.gloo.pool import Pool
from tests.support.gloo.train_jobs.muon_jobs import leg

DECAY = 0.7
ROWS = 4
ALONE = Layout(micro_batch=ROWS)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def averaged(job: JobConfig) -> JobConfig:
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"ema_decay": DECAY})})


def step(engine: Engine, number: int) -> None:
    engine.forward_backward(batch(engine.job, engine.layout, 0, number))
    engine.reduce()
    engine.clip()
    engine.optimizer_step(0.05)


def state_of(engine: Engine) -> dict[str, np.ndarray]:
    return assemble([pieces(engine.state())])


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_the_average_follows_every_update(name: str) -> None:
    job = averaged(make_job(name, ROWS, MIXTURE))
    engine = build_engine(job, ALONE, 0, None, CPU)
    engine.initialise(0)
    weights = {item.shard.name: item.values().clone() for item in engine.weights()}
    expected = dict(weights)
    for number in range(1, 5):
        if number == 3:
            engine.skip_step()  # no update, nothing to follow
        else:
            step(engine, number)
            for item in engine.weights():
                expected[item.shard.name] = DECAY * expected[item.shard.name] + (1 - DECAY) * item.values()
    found = state_of(engine)
    names = {name.partition("/")[2] for name in found if name.startswith("ema/")}
    assert names == set(weights)
    for name in names:
        np.testing.assert_allclose(found[f"ema/{name}"], expected[name].numpy(), rtol=1e-12, atol=1e-15)
    engine.close()


def test_what_is_not_trained_has_no_average() -> None:
    moe = MIXTURE.moe.model_copy(update={"balance": "bias", "loss_coefficient": 0.01})
    job = averaged(make_job("sgd", ROWS, MIXTURE.model_copy(update={"moe": moe})))
    engine = build_engine(job, ALONE, 0, None, CPU)
    names = {item.shard.name for item in engine.state()}
    assert "layers.0.mlp.router.bias" in names
    assert not {name for name in names if name.startswith("ema/") and name.endswith("router.bias")}
    engine.close()


def test_the_average_is_evaluated_and_the_weights_come_back() -> None:
    tied = MODEL.model_copy(update={"tie_embeddings": True})
    job = averaged(make_job("adamw", ROWS, tied))
    engine, other = (build_engine(job, ALONE, 0, None, CPU) for _ in range(2))
    engine.initialise(0)
    for number in (1, 2):
        step(engine, number)
    before, feed = state_of(engine), [batch(job, ALONE, 0, 9)]
    trained, found = engine.evaluate(feed), engine.evaluate(feed, averaged=True)
    after = state_of(engine)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    for item in other.weights():
        item.values().copy_(torch.from_numpy(before[f"ema/{item.shard.name}"]))
    assert found == other.evaluate(feed) != trained
    engine.close()
    other.close()


def test_weights_come_back_where_an_evaluation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(averaged(make_job("adamw", ROWS)), ALONE, 0, None, CPU)
    engine.initialise(0)
    step(engine, 1)
    before = state_of(engine)

    def gone(_: object) -> None:
        raise RuntimeError("a peer is gone")

    monkeypatch.setattr(engine._passes, "losses", gone)
    with pytest.raises(RuntimeError, match="a peer is gone"):
        engine.evaluate([batch(engine.job, ALONE, 0, 9)], averaged=True)
    after = state_of(engine)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    engine.close()


@pytest.mark.parametrize("after", [Layout(tp=2, micro_batch=6), Layout(pp=2, dp=2, micro_batch=3)], ids=str)
def test_the_average_goes_on_in_another_layout(pool: Pool, tmp_path: Path, after: Layout) -> None:
    job, before, alone = (
        averaged(make_job("adamw", 12)),
        Layout(dp=3, zero=3, micro_batch=2),
        Layout(micro_batch=12),
    )
    pool.run(before.world_size, leg, job, before, (0, 2), tmp_path)
    found = pool.run(after.world_size, leg, job, after, (2, 3), tmp_path)
    engine = build_engine(job, alone, 0, None, CPU)
    engine.initialise(job.seed)
    for number in (1, 2, 3):
        engine.forward_backward(batch(job, alone, 0, number))
        engine.reduce()
        engine.clip()
        engine.optimizer_step(job.optimizer.learning_rate)
    far, name = worst(assemble(found), state_of(engine))
    assert far < WEIGHTS_TOLERANCE, name
    engine.close()


def test_an_average_that_was_not_kept_begins_as_the_weights(pool: Pool, tmp_path: Path) -> None:
    plain, before, after = make_job("adamw", 12), Layout(dp=2, micro_batch=6), Layout(tp=2, micro_batch=6)
    stored = assemble(pool.run(before.world_size, leg, plain, before, (0, 2), tmp_path))
    found = assemble(pool.run(after.world_size, leg, averaged(plain), after, (2, 3), tmp_path))
    for name in (name for name in stored if "/" not in name):
        expected = DECAY * stored[name] + (1 - DECAY) * found[name]
        np.testing.assert_allclose(found[f"ema/{name}"], expected, rtol=1e-12, atol=1e-15)


def test_weights_alone_begin_an_average(tmp_path: Path) -> None:
    """As a commit of another run, or of Hugging Face, is restored: no moments come with it."""
    engine = build_engine(averaged(make_job("adamw", ROWS)), ALONE, 0, None, CPU)
    engine.initialise(5)
    shards = tuple(item.shard for item in engine.weights())
    slot = SlotFile.create(tmp_path / "0.0.slot", slot_bytes(shards))
    slot.write(SlotHeader(1, 1, 0, 0), shards, buffers(engine.weights()))
    slot.close()
    expected = state_of(engine)
    engine.initialise(0)
    restore(engine.weights(averages=True), source([slot.path]))
    found = state_of(engine)
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert np.array_equal(found["ema/embed.weight"], found["embed.weight"])
    engine.close()


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_planner_counts_it(name: str) -> None:
    job = averaged(make_job(name, ROWS, precision="fp32"))
    engine = build_engine(job, ALONE, 0, None, CPU)
    held = sum(item.values().nbytes for item in engine.state())
    engine.close()
    estimate = memory_estimate(job, ALONE)
    assert estimate.kept_bytes == held
    weights = held / (2 if name == "sgd" else 4)
    causes = memory_by_cause(job, ALONE, 0)
    assert (causes["weights"], causes["optimizer"]) == (weights, held - weights)
    found = {cause.cause: cause for cause in explain_memory(job, ALONE, 0)}
    assert found["optimizer"].bytes == held - weights
    assert found["optimizer"].formula.endswith(f"+ {weights / 4:,.0f} parameters x 4 bytes (average)")
