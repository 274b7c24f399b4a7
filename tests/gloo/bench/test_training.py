"""Steps of the benchmarks, by what they call in turn, of a made-up engine and a made-up replica."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from picotron_ray.bench.common import training
from picotron_ray.bench.common.training import EngineTraining, PlainTraining
from picotron_ray.config.load import load_job
from picotron_ray.train.optim.lr_schedule import learning_rate

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
        initialise=lambda seed: calls.append(f"seed {seed}"),
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
