"""Passes over micro-batches that are made up: their order, what is told and what is asked of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.pipeline import pipeline
from picotron_ray.train import passes
from picotron_ray.train.passes import GraphPasses, LoopPasses, MicroBatchPass, PipelinePasses, loss_function
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, make_job

BATCH: Any = "batch"


class Batcher:
    """Cuts a batch into so many micro-batches, each a number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def micro_batches(self, batch: str) -> Any:
        assert batch == BATCH
        return iter(range(1, self.count + 1))


class Compute:
    """A loss of ten times the micro-batch's number, times the only weight."""

    model = "the model"

    def __init__(self) -> None:
        self.weight = torch.ones((), requires_grad=True)

    def forward(self, number: int) -> Tensor:
        return 10.0 * number * self.weight


@pytest.mark.parametrize(
    ("zero", "count", "prepared"),
    [(0, 3, []), (2, 1, []), (2, 2, [(1, False), (2, True)]), (3, 4, [(1, False), (4, True)])],
)
def test_the_first_and_the_last_of_several_are_prepared(
    monkeypatch: pytest.MonkeyPatch, zero: int, count: int, prepared: list[tuple[int, bool]]
) -> None:
    phases: list[str] = []
    told: list[Any] = []

    def prepare(model: str, kind: int, *, last: bool) -> None:
        assert (model, kind) == ("the model", zero)
        told.append((phases.count("backward"), last))

    monkeypatch.setattr(passes, "prepare_backward", prepare)
    compute: Any = Compute()
    batcher: Any = Batcher(count)
    loop = LoopPasses(compute, batcher, zero)
    total = 10.0 * count * (count + 1) / 2
    assert loop.run(BATCH, 0.5, phases.append).item() == total
    assert compute.weight.grad.item() == 0.5 * total
    assert phases == ["backward", *["forward", "backward"] * (count - 1)], "the caller begins the first"
    assert told == prepared
    with torch.no_grad():
        assert list(loop.losses(BATCH)) == [10.0 * n for n in range(1, count + 1)]
    loop.close()
    assert not hasattr(loop, "compute")


def test_the_first_micro_batch_is_recorded_and_all_are_replayed() -> None:
    log: list[Any] = []

    class Graph:
        recorded = False

        def record(self, number: int, scale: float) -> None:
            log.append(("record", number, scale))
            self.recorded = True

        def replay(self, number: int, scale: float) -> Tensor:
            log.append(("replay", number, scale))
            return torch.tensor(10.0 * number)

        def close(self) -> None:
            log.append("close")

    made: Any = (
        Compute(),
        Batcher(2),
        Graph(),
        SimpleNamespace(clear=lambda count: log.append(("clear", count))),
    )
    graph = GraphPasses(*made)
    replayed = [("replay", 1, 0.5), ("replay", 2, 0.5)]
    for expected in ([("record", 1, 0.5), ("clear", 2), *replayed], replayed):
        log.clear()
        assert graph.run(BATCH, 0.5, lambda phase: None).item() == 30.0
        assert log == expected
    with torch.no_grad():
        assert list(graph.losses(BATCH)) == [10.0, 20.0]
    graph.close()
    assert log[-1] == "close"


def test_a_micro_batchs_passes() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    compute = MicroBatchPass(
        lambda x, more: x * weight * more,  # type: ignore[arg-type]
        lambda output, targets, weights: ((output - targets) * weights).sum(),
    )
    inputs, targets, weights = torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.5])
    loss = compute((inputs, targets, weights, {"more": torch.tensor(10.0)}), torch.tensor(0.25))
    assert (loss.item(), loss.requires_grad) == (19.0 + 29.5, False)
    assert weight.grad is not None
    assert weight.grad.item() == 0.25 * (10.0 + 15.0)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_shapes_between_stages_and_places_in_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch, sequence_parallel: bool
) -> None:
    layout = Layout(tp=2, cp=2, pp=2, micro_batch=3)
    mesh: Any = SimpleNamespace(layout=layout, at=layout.coordinates(1), group=lambda name: name)
    definition: Any = SimpleNamespace(sequence_parallel=sequence_parallel, hidden_size=5)
    job, seen = make_job("sgd", 6), list[Any]()
    monkeypatch.setattr(pipeline, "Pipeline", lambda *given: seen.extend(given))
    loss: Any = object()
    passes._pipeline(job, mesh, definition, {0: torch.nn.Identity()}, loss, CPU)
    _, *places, hidden, sequence, function, device, actions = seen
    assert (places, sequence, function, device, actions) == ([layout, "pp"], 4, loss, CPU, ())
    assert hidden.shape == (3, 2 if sequence_parallel else 4, 5)
    assert (hidden.dtype, hidden.device.type, hidden.requires_grad) == (torch.float64, "meta", True)
    told: list[Any] = []
    monkeypatch.setattr(passes, "token_losses", lambda *given: told.append(given) or torch.ones(2, 3))
    of_logits = loss_function(job, mesh, definition)
    assert of_logits("logits", "targets", torch.tensor([1.0, 0.5])).item() == 4.5  # type: ignore[arg-type]
    assert told == [("logits", "targets", "tp" if sequence_parallel else None, 12)]


def test_a_pipelines_passes() -> None:
    log: list[Any] = []
    fake: Any = SimpleNamespace(
        step=lambda *given: log.append(given) or torch.tensor(3.0),
        evaluate=lambda given: torch.tensor(float(sum(given))),
        close=lambda: log.append("close"),
    )
    batcher: Any = Batcher(2)
    batcher.whole = lambda batch: (batch, 1, 2, {})
    found = PipelinePasses(fake, batcher)
    assert found.run(BATCH, 0.5, log.append).item() == 3.0
    assert list(found.losses(BATCH)) == [3.0]
    found.close()
    assert log == [(BATCH, 1, 2, {}, 0.5), "close"]
