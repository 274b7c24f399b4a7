"""Micro-batches replayed from a CUDA graph train as those that are launched kernel by kernel."""

from __future__ import annotations

import pytest
import torch

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import build_engine
from tests.gpu.training import CUDA, trained
from tests.support.gloo.parallel_jobs.matrix_jobs import batch

MODEL = ModelConfig(vocab_size=512, hidden_size=128, intermediate_size=256, layers=3, heads=4, kv_heads=2)


def job(precision: str, **kernels: object) -> JobConfig:
    return JobConfig(
        precision=precision,
        model=MODEL,
        data=DataConfig(sequence_length=32, global_batch=8),
        kernels=KernelsConfig(**kernels),
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("precision", "kernels", "tolerance"),
    [
        ("fp64", {}, 1e-12),
        ("bf16", {}, 1e-5),
        ("fp16", {"loss": "linear", "loss_chunk": 16}, 1e-5),
        ("bf16", {"projections": "fused", "compile": True}, 1e-5),
    ],
    ids=str,
)
def test_replays_train_alike(
    precision: str, kernels: dict[str, object], tolerance: float, recompute: str
) -> None:
    layout, found = Layout(micro_batch=2, recompute=recompute), {}
    for graphs in (False, True):
        engine, losses = trained(job(precision, cuda_graphs=graphs, **kernels), layout)
        assert ("micro-batches replayed from a CUDA graph" in engine.applied) is graphs
        found[graphs] = losses, {entry.shard.name: entry.tensor.cpu() for entry in engine.weights()}
        engine.close()
        del engine
    assert found[True][0] == pytest.approx(found[False][0], rel=tolerance)
    for name, weight in found[True][1].items():
        torch.testing.assert_close(weight, found[False][1][name], rtol=0, atol=100 * tolerance, msg=name)


def test_what_cannot_be_recorded_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for the device within the passes, which a recording does not allow."""
    from picotron_ray.errors import LayoutError

    engine = build_engine(job("fp32", cuda_graphs=True), Layout(micro_batch=2), 0, None, CUDA)
    engine.initialise(0)
    compute = engine._passes.compute  # type: ignore[attr-defined]
    plain = compute.loss

    def waiting(output: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        output.sum().item()
        return plain(output, *rest)

    monkeypatch.setattr(compute, "loss", waiting)
    with pytest.raises(LayoutError, match=r"kernels\.cuda_graphs: saw true, but this step"):
        engine.gradients_of(batch(engine.job, Layout(micro_batch=2), 0, 1))
