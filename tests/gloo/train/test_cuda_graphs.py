"""Micro-batches replayed from static tensors compute what they do as they come.

Here the passes run on a CPU each time; that a device's graph does the same is for tests/gpu/test_graphs.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.train.cuda_graphs import StepGraph
from tests.support.gloo.parallel_jobs.matrix_jobs import make_job, run_layout
from tests.support.gloo.parity import compare
from tests.support.gloo.pool import Pool

APPLIED = "micro-batches replayed from a CUDA graph"


@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        (Layout(micro_batch=5), "logits"),
        (Layout(dp=2, micro_batch=4), "linear"),
        (Layout(dp=2, micro_batch=2, recompute="selective"), "logits"),
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_replayed_steps_equal_those_of_one_process(
    pool: Pool, layout: Layout, loss: str, optimizer: str
) -> None:
    kernels = KernelsConfig(cuda_graphs=True, loss=loss, loss_chunk=5 if loss == "linear" else 1024)
    job = make_job(optimizer, 12, kernels=kernels)
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    assert all(APPLIED in rank.applied for rank in ranks)
    assert compare(job, layout, ranks) == []


def test_a_micro_batch_that_is_not_copied_is_noticed(pool: Pool) -> None:
    job, layout = make_job("sgd", 12, kernels=KernelsConfig(cuda_graphs=True)), Layout(micro_batch=5)
    ((result,),) = pool.run(1, run_layout, [job], layout, "graph")
    assert compare(job, layout, [result])


# --- what a device is told --------------------------------------------------------------------------------


class Device(str):
    """Memory of the CPU that is taken for a CUDA device's."""

    type = "cuda"


class Cuda:
    """What is asked of torch.cuda, in order; ``fails``: what the recording raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.fails: Exception | None = None
        log, cuda = self.log, self

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = "main" if name == "main" else "side"

            def wait_stream(self, other: Stream) -> None:
                log.append(f"{self.name} waits for {other.name}")

        class Graph:
            def replay(self) -> None:
                log.append("replay")

            def reset(self) -> None:
                log.append("reset")

        @contextlib.contextmanager
        def stream(given: Stream) -> Iterator[None]:
            log.append(f"on {given.name}")
            yield
            log.append("off")

        @contextlib.contextmanager
        def graph(given: Graph, stream: Stream, capture_error_mode: str) -> Iterator[None]:
            assert isinstance(given, Graph)
            log.append(f"record on {stream.name}, {capture_error_mode}")
            yield
            if cuda.fails is not None:
                raise cuda.fails

        for name, value in {"Stream": Stream, "CUDAGraph": Graph, "stream": stream, "graph": graph}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main"))

    def passes(self, micro_batch: Any, scale: Tensor) -> Tensor:
        inputs, targets, weights, named = micro_batch
        self.log.append((*(x.item() for x in (inputs, targets, weights, named["n"])), scale.item()))
        self.fed = micro_batch
        return inputs * scale


def numbers(first: float) -> Any:
    inputs, targets, weights, name = (torch.tensor(first + i) for i in range(4))
    return inputs, targets, weights, {"n": name}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_a_graph_is_warmed_up_recorded_once_and_replayed(cuda: Cuda) -> None:
    """Three passes of warm-up, as PyTorch's notes have it, on the recording's stream."""
    device: Any = Device("cpu")
    graph = StepGraph(cuda.passes, device)
    assert not graph.recorded
    given = numbers(1.0)
    graph.record(given, 5.0)
    assert graph.recorded
    one = (1.0, 2.0, 3.0, 4.0, 5.0)
    around = ["side waits for main", "on side", one, one, one, "off", "main waits for side"]
    assert cuda.log == [*around, "record on side, thread_local", one]
    cuda.log.clear()
    held = cuda.fed
    assert all(a is not b for a, b in zip(held[:3], given[:3], strict=True))
    loss = graph.replay(numbers(10.0), 7.0)
    assert cuda.log == ["replay"]
    assert [*(x.item() for x in held[:3]), held[3]["n"].item()] == [10.0, 11.0, 12.0, 13.0]
    assert given[3]["n"].item() == 4.0, "the recording has tensors of its own"
    assert graph._scale.item() == 7.0
    assert loss.item() == 5.0, "a replay writes where the recording wrote"
    assert loss is not graph._loss
    graph.close()
    assert cuda.log == ["replay", "reset"]
    assert not graph.recorded


def test_without_a_device_passes_are_computed_anew(cuda: Cuda) -> None:
    graph = StepGraph(cuda.passes, torch.device("cpu"))
    graph.record(numbers(1.0), 5.0)
    assert cuda.log == [(1.0, 2.0, 3.0, 4.0, 5.0)] * 3
    assert graph.replay(numbers(2.0), 6.0).item() == 12.0
    assert cuda.log[3:] == [(2.0, 3.0, 4.0, 5.0, 6.0)]
    graph.close()


@pytest.mark.parametrize(
    ("error", "raised"), [(RuntimeError("no\nway"), LayoutError), (torch.OutOfMemoryError("full"), None)]
)
def test_a_recording_that_fails(cuda: Cuda, error: Exception, raised: type[Exception] | None) -> None:
    cuda.fails, device = error, Device("cpu")
    graph = StepGraph(cuda.passes, device)  # type: ignore[arg-type]
    with pytest.raises(raised or type(error)) as caught:
        graph.record(numbers(1.0), 1.0)
    if raised is not None:
        assert str(caught.value) == (
            "kernels.cuda_graphs: saw true, but this step cannot be recorded: no; use false"
        )
        assert not graph.recorded
    cuda.log.clear()
    graph.close()
    assert cuda.log == ([] if raised else ["reset"]), "nothing recorded is nothing to give back"
