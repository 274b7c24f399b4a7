"""Steps of the benchmarks, by what they call in turn, of a made-up engine and a made-up replica."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from picotron_ray.bench.common import training
from picotron_ray.bench.common.training import EngineTraining, PlainTraining
from picotron_ray.bench.recovery.peers import replica as replicas
from picotron_ray.bench.recovery.peers.replica import Replica
from picotron_ray.config.load import load_job
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import build_engine
from picotron_ray.train.optim.lr_schedule import learning_rate
from picotron_ray.train.training_state import MadeWeights

JOB = load_job("tiny", ["seed=5", "steps=40"])
BATCH: Any = SimpleNamespace(step=3, tokens=torch.zeros(3, 2, 4))
"""Step 3, in three micro-batches."""


def test_a_step_of_the_engine() -> None:
    calls: list[Any] = []

    def gradients_of(batch: Any, on_phase: Any) -> tuple[float, float]:
        calls.append(batch)
        on_phase("forward")
        return 0.25, 1.0

    engine: Any = SimpleNamespace(
        job=JOB,
        initialise=lambda seed, made: calls.append(f"seed {seed}"),
        gradients_of=gradients_of,
        optimizer_step=calls.append,
        close=lambda: calls.append("close"),
    )
    found = EngineTraining(engine)
    assert found.step(BATCH, calls.append) == 0.25
    found.close()
    rate = learning_rate(JOB.optimizer, 3, 40)
    assert calls == ["seed 5", BATCH, "forward", "optimizer", rate, "close"]


@pytest.mark.parametrize("replicated", [False, True])
def test_a_step_by_hand(replicated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are exchanged with the last micro-batch alone, by whom there is."""
    calls: list[Any] = []

    class Whole:
        def __init__(self, model: Any) -> None:
            self.model = model

        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            calls.append("apart")
            yield

    def loss(model: Any, batch: Any, number: int) -> Any:
        assert isinstance(model, Whole) == replicated
        assert batch is BATCH
        value = torch.tensor(2.0**number, requires_grad=True)
        value.register_hook(lambda gradient: calls.append(f"backward {number}"))
        return value

    replica: Any = SimpleNamespace(
        model="model",
        set_rate=lambda step: calls.append(f"rate of {step}"),
        optimizer=SimpleNamespace(
            zero_grad=lambda: calls.append("zero"), step=lambda: calls.append("optimizer")
        ),
        loss=loss,
        clip=lambda: calls.append("clip"),
    )
    monkeypatch.setattr(training, "DistributedDataParallel", Whole)
    monkeypatch.setattr(training.dist, "is_initialized", lambda: replicated)
    found = PlainTraining(replica)
    total = found.step(BATCH)
    found.close()
    assert (float(total), total.requires_grad) == (7.0, False)
    apart = ["apart"] * replicated
    assert calls == [
        *("rate of 3", "zero"),
        *(*apart, "backward 0", *apart, "backward 1", "backward 2"),
        *("clip", "optimizer"),
    ]


def test_a_replica_is_an_equal_share_under_the_jobs_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_job("tiny", ["optimizer.weight_decay=0.5", "optimizer.decay_embeddings=false"])
    asked: list[Any] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(replicas, "build_dataset", lambda *arguments: SimpleNamespace(feed=arguments))
    replica = Replica(job, 1, 4, Path("cache"))
    assert asked == [1]
    assert replica.layout == Layout(dp=4, micro_batch=2)
    assert replica.feed == (job.data, job.model.vocab_size, job.seed, Path("cache"))
    groups = replica.optimizer.param_groups
    assert [(group["weight_decay"], group["fused"]) for group in groups] == [(0.5, True), (0.0, True)]
    parameters = list(replica.model.parameters())
    assert sorted(map(id, parameters)) == sorted(id(p) for group in groups for p in group["params"])
    assert {p.dim() for p in groups[0]["params"]} == {2}
    replica.set_rate(3)
    assert {group["lr"] for group in groups} == {learning_rate(job.optimizer, 3, job.steps)}


@pytest.mark.parametrize(("clip_norm", "norm"), [("0.5", 0.5), ("null", 2.0)])
def test_a_replica_clips_where_the_job_says_so(clip_norm: str, norm: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.ones(4)
    own: Any = SimpleNamespace(
        job=load_job("tiny", [f"optimizer.clip_norm={clip_norm}"]),
        model=SimpleNamespace(parameters=lambda: [weight]),
    )
    Replica.clip(own)
    assert float(weight.grad.norm()) == pytest.approx(norm, rel=1e-4)


def test_engines_of_a_benchmark_share_what_was_made() -> None:
    """The second one makes nothing, and begins alike."""
    made: MadeWeights = {}

    def weights() -> list[torch.Tensor]:
        engine = build_engine(JOB, Layout(micro_batch=2), 0, None, torch.device("cpu"))
        engine.initialise(3, made=made)
        found = [item.tensor.clone() for item in engine.weights()]
        engine.close()
        return found

    first, count = weights(), len(made)
    for key in made:
        made[key] = made[key] + 1
    assert len(made) == count > 0
    assert all(torch.equal(b, a + 1) for a, b in zip(first, weights(), strict=True))
