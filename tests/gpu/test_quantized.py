"""Moments in 8 bits on a CUDA device: the codes and the training that a CPU gives, and the memory."""

from __future__ import annotations

import gc

import pytest
import torch

from picotron_ray.config.schema.optimizer import OptimizerConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import build_engine
from picotron_ray.train.optim.adamw import QuantizedAdamW
from picotron_ray.train.optim.adamw_offload import ParameterGroup
from picotron_ray.train.optim.quantized_state import BLOCK, QuantizedTensor, codebook_of, decode, encode
from tests.support.gloo.parallel_jobs.matrix_jobs import batch
from tests.support.gloo.train_jobs.quantized_jobs import BATCH, job_of

pytest.importorskip("torchao")
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("stored", [True, False])
def test_codes_are_those_of_a_cpu(signed: bool, stored: bool) -> None:
    """Bit for bit: divisions and products of fp32 are rounded alike."""
    values = torch.randn(4096, BLOCK, generator=torch.Generator().manual_seed(0)).view(-1)
    values = values if signed else values.square()
    codes, scales = encode(values, codebook_of(signed, CPU), stored)
    found, found_scales = encode(values.to(CUDA), codebook_of(signed, CUDA), stored)
    assert torch.equal(found.cpu(), codes)
    assert torch.equal(found_scales.cpu(), scales)
    decoded = decode(found, found_scales, codebook_of(signed, CUDA))
    assert torch.equal(decoded.cpu(), decode(codes, scales, codebook_of(signed, CPU)))


def test_what_comes_out_goes_back_in() -> None:
    """Through the host's memory, as snapshots and restores do it."""
    values, codebook = torch.randn(64 * 512, device=CUDA), codebook_of(True, CUDA)
    kept = QuantizedTensor(*encode(values, codebook), codebook, (64, 512))
    codes, scales = kept.codes.clone(), kept.scales.clone()
    out = kept.decoded()
    assert out.device.type == "cpu"
    assert torch.equal(kept[3:7].decoded(), out[3:7])
    kept.zero_()
    kept.encode(out)
    assert torch.equal(kept.codes, codes)
    assert torch.equal(kept.scales, scales)


@pytest.mark.parametrize("fused", [True, False])
def test_updates_are_those_of_a_cpu(fused: bool) -> None:
    found = []
    for device in (CPU, CUDA):
        weights = [torch.ones(512, 512, device=device), torch.ones(100, device=device)]
        ours = QuantizedAdamW(
            OptimizerConfig(), [ParameterGroup(["a", "b"], weights, [0, 1], 0.1)], fused, 2**16
        )
        generator = torch.Generator().manual_seed(0)
        for step in range(1, 6):
            gradients = [torch.randn(w.shape, generator=generator).to(device) for w in weights]
            ours.step(gradients, 1e-2, step)
        found.append([weight.cpu() - 1.0 for weight in weights])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() < 1e-3 * a.norm(), "few codes differ by a rounding"


def test_training_and_memory() -> None:
    layout, losses, held = Layout(micro_batch=BATCH), {}, {}
    for moments, device in (("full", CUDA), ("8bit", CUDA), ("8bit", CPU)):
        gc.collect()
        before = torch.cuda.memory_allocated()
        job = job_of(moments)
        engine = build_engine(job, layout, 0, None, device)
        engine.initialise(0)
        found = []
        for step in range(1, 6):
            found.append(float(engine.gradients_of(batch(job, layout, 0, step))[0]))
            engine.optimizer_step(1e-3)
        losses[moments, device.type] = found
        held[moments, device.type] = torch.cuda.memory_allocated() - before
        size = sum(4 * entry.shard.box.numel for entry in engine.state() if "/" in entry.shard.name)
        engine.close()
        del engine
    assert losses["8bit", "cuda"] == pytest.approx(losses["8bit", "cpu"], rel=1e-3)
    assert losses["8bit", "cuda"] == pytest.approx(losses["full", "cuda"], rel=1e-2)
    assert held["full", "cuda"] - held["8bit", "cuda"] > 0.7 * size
