"""Meta-gradients of the engine: those of a plain double backward, and of finite differences, in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import StepBatch, make_batch
from picotron_ray.data.dataset import DataSplits
from picotron_ray.data.tasks.open_tasks import open_data
from picotron_ray.layout.layout import Layout
from picotron_ray.train.custom_model.inspect import inspect
from picotron_ray.train.engine import Engine, build_engine
from picotron_ray.train.meta.inner_rates import SHIFT
from tests.support.gloo.plain_meta import Task, adapted, meta_gradients, squares

STRATEGIES = ("maml", "fomaml", "reptile", "metasgd")
TASKS, SUPPORT, QUERY, STEPS, RATE = 4, 5, 7, 3, 0.05
CPU = torch.device("cpu")


def job_of(strategy: str, **more: Any) -> JobConfig:
    """Waves for a small network without kinks."""
    words = {
        "precision": "fp64",
        "model": {
            "builder": "picotron_ray.models.regressor:build",
            "arguments": {"width": 8, "activation": "tanh"},
        },
        "data": {"global_batch": TASKS},
        "meta": {
            "strategy": strategy,
            "inner_rate": RATE,
            "inner_steps": STEPS,
            "support": SUPPORT,
            "query": QUERY,
        },
        "optimizer": {"clip_norm": None, "weight_decay": 0.0, "schedule": {"kind": "constant"}},
    }
    job = parse_job(words | more)
    built, _ = inspect(job)
    return job.model_copy(update={"model": job.model.model_copy(update={"built": built})})


def engine_of(job: JobConfig) -> Engine:
    engine = build_engine(job, Layout(micro_batch=2), 0, None, CPU)
    engine.initialise(job.seed)
    return engine


def tasks_of(batch: StepBatch, examples: int = SUPPORT + QUERY) -> list[Task]:
    """Decode a batch's rows by hand: of each example x and y as the bits of a float32."""
    found = []
    for row in batch.tokens.reshape(-1, batch.tokens.shape[-1]):
        words = torch.from_numpy(row.astype("uint32").view("float32")).double().view(examples, 2)
        x, y = words[:, :1], words[:, 1:]
        found.append((x[:SUPPORT], y[:SUPPORT], x[SUPPORT:], y[SUPPORT:]))
    return found


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    return {one.shard.name: one.tensor.clone() for one in engine.gradients()}


def weights_of(engine: Engine) -> list[Tensor]:
    return [one.tensor.clone() for one in engine.weights()]


def shifts_of(engine: Engine) -> list[Tensor]:
    held = {one.shard.name: one.tensor for one in engine.state()}
    return [held[f"{SHIFT}/{one.shard.name}"] for one in engine.weights()]


def batch_of(job: JobConfig, step: int) -> StepBatch:
    return make_batch(open_data(job, Path()).feed, Layout(micro_batch=2), 0, step)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_of_a_plain_double_backward(strategy: str) -> None:
    job = job_of(strategy)
    engine, batch = engine_of(job), batch_of(job, 1)
    weights = weights_of(engine)
    rates = [torch.full_like(w, RATE) for w in weights]
    if strategy == "metasgd":  # rates that differ
        torch.manual_seed(3)
        for shift, rate in zip(shifts_of(engine), rates, strict=True):
            shift.copy_(0.02 * torch.randn_like(shift))
            rate += shift
    loss, _ = engine.gradients_of(batch)
    found = gradients_of(engine)
    expected, of_rates, expected_loss = meta_gradients(strategy, weights, rates, tasks_of(batch), STEPS)
    assert float(loss) / batch.loss_tokens == pytest.approx(expected_loss, rel=1e-12)
    names = [one.shard.name for one in engine.weights()]
    pairs = dict(zip(names, expected, strict=True))
    if strategy == "metasgd":
        pairs |= {f"{SHIFT}/{name}": slope for name, slope in zip(names, of_rates, strict=True)}
    assert set(found) == set(pairs)
    for name, slope in pairs.items():
        assert slope.abs().max() > 1e-6, name
        torch.testing.assert_close(found[name], slope, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strategy", ["maml", "metasgd"])
def test_of_finite_differences(strategy: str) -> None:
    """Of the loss after adaptation, along single weights and rates."""
    job = job_of(strategy)
    engine, batch = engine_of(job), batch_of(job, 1)
    engine.gradients_of(batch)
    found, weights = gradients_of(engine), weights_of(engine)
    rates = [torch.full_like(w, RATE) for w in weights]
    tasks, h = tasks_of(batch), 1e-6

    def loss() -> float:
        sets = ((adapted(leaves(), rates, x, y, STEPS, False), a, b) for x, y, a, b in tasks)
        return sum(float(squares(*one).detach()) for one in sets) / len(tasks)

    def leaves() -> list[Tensor]:
        return [w.clone().requires_grad_() for w in weights]

    moved = {"": weights} | ({f"{SHIFT}/": rates} if strategy == "metasgd" else {})
    for prefix, tensors in moved.items():
        for one, tensor in zip(engine.weights(), tensors, strict=True):
            flat, at = tensor.view(-1), tensor.numel() // 2
            before = float(flat[at])
            flat[at] = before + h
            above = loss()
            flat[at] = before - h
            slope = (above - loss()) / (2 * h)
            flat[at] = before
            name = f"{prefix}{one.shard.name}"
            assert float(found[name].view(-1)[at]) == pytest.approx(slope, rel=1e-5, abs=1e-7), name


def held_out(data: DataSplits) -> list[StepBatch]:
    return data.eval_batches(Layout(micro_batch=2), 0, 16)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equal_meta_steps_reach_the_loss_of_the_plain_reference(strategy: str) -> None:
    """160 updates by AdamW, and then the loss of tasks that were never trained on: far within 1 %."""
    job = job_of(strategy)
    engine, data = engine_of(job), open_data(job, Path())
    weights = [w.requires_grad_() for w in weights_of(engine)]
    rates = [torch.full_like(w, RATE).requires_grad_() for w in weights]
    trained = [*weights, *(rates if strategy == "metasgd" else [])]
    config = job.optimizer
    plain = torch.optim.AdamW(
        trained, lr=0.01, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=0.0
    )
    evaluated = held_out(data)
    total = sum(batch.loss_tokens for batch in evaluated)
    first = engine.evaluate(evaluated)[0] / total
    for step in range(1, 161):
        batch = make_batch(data.feed, Layout(micro_batch=2), 0, step)
        engine.gradients_of(batch)
        engine.optimizer_step(0.01)
        of_weights, of_rates, _ = meta_gradients(strategy, weights, rates, tasks_of(batch), STEPS)
        for leaf, slope in zip(trained, [*of_weights, *of_rates], strict=False):
            leaf.grad = slope
        plain.step()
    tasks = [task for batch in evaluated for task in tasks_of(batch)]
    expected = meta_gradients(strategy, weights, rates, tasks, STEPS)[2]
    found = engine.evaluate(evaluated)[0] / total
    assert found == pytest.approx(expected, rel=1e-6)
    assert found < 0.95 * first, "it learned something"
    before = engine.evaluate(evaluated, adapted=False)[0] / total
    plainly = sum(float(squares(weights, x, y).detach()) for _, _, x, y in tasks) / len(tasks)
    assert before == pytest.approx(plainly, rel=1e-6)
