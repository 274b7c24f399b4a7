"""Activations in host memory: what leaves and what stays, the same gradients bit for bit, under every layout.

Here the device is a CPU, so that everything runs but streams.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import recomputed
from picotron_ray.models.families.registry import family_of
from picotron_ray.models.layers.fused_linear import lay_together
from picotron_ray.models.transformer import Transformer
from picotron_ray.parallel.memory import activation_offload as offload_module
from picotron_ray.parallel.memory.activation_checkpointing import apply_recompute
from picotron_ray.parallel.memory.activation_offload import ActivationOffload, BlockPass
from picotron_ray.parallel.tensor.tensor_parallel import named_modules
from picotron_ray.planner.model_sizes import sizes_of
from tests.support.gloo.late_copies import LateCopyStream
from tests.support.gloo.parallel_jobs.matrix_jobs import MIXTURE, MODEL, make_job, run_layout
from tests.support.gloo.parity import compare, thinned
from tests.support.gloo.pool import Pool, WorkerError

ROWS, LENGTH = 3, 128
WIDE = ModelConfig(vocab_size=64, hidden_size=64, intermediate_size=256, layers=4, heads=4)
# fmt: off
LAYOUTS = [
    (MODEL, Layout(dp=2, zero=3, micro_batch=3), 12),
    (MODEL, Layout(dp=2, zero=2, micro_batch=3, recompute="full"), 12),
    (MODEL, Layout(tp=2, micro_batch=6, recompute="every-2"), 12),
    (MODEL, Layout(pp=2, micro_batch=2), 12),
    (MODEL, Layout(pp=2, micro_batch=2, schedule="zbv", virtual_stages=2), 12),
    (MODEL, Layout(dp=2, pp=2, zero=3, micro_batch=2, schedule="interleaved-1f1b", virtual_stages=2), 12),
    (MODEL, Layout(cp=2, micro_batch=6), 12),
    (MIXTURE, Layout(dp=2, tp=2, ep=2, micro_batch=3, recompute="blocks-2"), 12),
    (MIXTURE, Layout(dp=4, ep=2, zero=3, micro_batch=2), 12),
]
# fmt: on
CASES = [(model, replace(layout, offload_activations=True), batch) for model, layout, batch in LAYOUTS]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


FUSED = KernelsConfig(projections="fused")
COMPILED = KernelsConfig(norm="compiled", activation="compiled")
FUSED_AND_NORM = KernelsConfig(projections="fused", norm="compiled")
IN_KERNELS = [
    (MODEL, Layout(dp=2, micro_batch=3, recompute="every-2", offload_activations=True), COMPILED),
    (MODEL, Layout(dp=2, zero=3, micro_batch=3, offload_activations=True), COMPILED),
    (MODEL, Layout(tp=2, micro_batch=6, offload_activations=True), COMPILED),
    (MODEL, Layout(dp=2, zero=2, micro_batch=3, offload_activations=True), FUSED_AND_NORM),
    (MODEL, Layout(pp=2, micro_batch=2, offload_activations=True), COMPILED),
    (MODEL, Layout(pp=2, micro_batch=2, schedule="zbv", virtual_stages=2, offload_activations=True), FUSED),
    (MIXTURE, Layout(dp=2, ep=2, micro_batch=3, offload_activations=True), FUSED),
    (MODEL, Layout(tp=2, micro_batch=6, offload_activations=True), KernelsConfig(tp_overlap="ring")),
]


@pytest.mark.parametrize(
    ("model", "layout", "global_batch"),
    thinned(CASES, (0, 1, 4, 5, 7), lambda model, layout, _: f"{'mixture-' * (model is MIXTURE)}{layout}"),
)
def test_layout_equals_one_process(pool: Pool, model: ModelConfig, layout: Layout, global_batch: int) -> None:
    job = make_job("adamw", global_batch, model)
    ranks = pool.run(layout.world_size, run_layout, [job], layout, "offload-everything")
    assert compare(job, layout, [results[0] for results in ranks]) == []
    assert all("blocks offloaded" in " ".join(results[0].applied) for results in ranks)


@pytest.mark.timeout(300)  # a compiler runs
@pytest.mark.parametrize(
    ("model", "layout", "kernels"), thinned(IN_KERNELS, (6,), lambda model, layout, _: str(layout))
)
def test_with_other_kernels(pool: Pool, model: ModelConfig, layout: Layout, kernels: KernelsConfig) -> None:
    job = make_job("adamw", 12, model, kernels=kernels)
    ranks = pool.run(layout.world_size, run_layout, [job], layout, "offload-everything")
    assert compare(job, layout, [results[0] for results in ranks]) == []
    assert all("blocks offloaded" in " ".join(results[0].applied) for results in ranks)


@pytest.mark.slow
def test_why_a_compiled_gate_of_a_fused_product_is_refused(pool: Pool) -> None:
    layout = Layout(micro_batch=12, offload_activations=True)
    kernels = KernelsConfig(projections="fused", activation="compiled")
    with pytest.raises(WorkerError, match=r"expected size .* stride"):
        pool.run(1, run_layout, [make_job("adamw", 12, kernels=kernels)], layout, "offload-everything")


def test_what_comes_back_damaged_is_noticed(pool: Pool) -> None:
    layout, job = Layout(dp=2, micro_batch=3, offload_activations=True), make_job("adamw", 12)
    ranks = pool.run(2, run_layout, [job], layout, "offload-damaged")
    assert any("gradient of" in line for line in compare(job, layout, [results[0] for results in ranks]))


def model_and_blocks(*, fused: bool = False) -> tuple[Transformer, list[nn.Module]]:
    torch.manual_seed(0)
    model = Transformer(WIDE)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    if fused:
        for module in named_modules(model, family_of(WIDE).fused_modules(WIDE)):
            module.fuse()
        lay_together(model)
    return model, list(model.layers.values())


def gradients(
    policy: str, offload: ActivationOffload | None, dtype: torch.dtype | None, *, fused: bool = False
) -> list[Tensor]:
    """Of two micro-batches."""
    model, blocks = model_and_blocks(fused=fused)
    apply_recompute(blocks, recomputed(policy, len(blocks)), [[] for _ in blocks])
    for number, block in enumerate(blocks if offload is not None else []):
        assert offload is not None
        offload.wrap(number, block)
    tokens = torch.arange(2 * ROWS * LENGTH).view(2, ROWS, LENGTH) % 64
    for rows in tokens:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(rows).float().square().mean()
        loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("policy", ["none", "full"])
def test_copies_are_waited_for(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """However late a copy comes, nothing reads what it has not brought, or frees what it has not read."""
    monkeypatch.setattr(offload_module, "CopyStream", LateCopyStream)
    expected, found = gradients(policy, None, None), gradients(policy, ActivationOffload(0), None)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("policy", ["none", "full", "every-2"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_the_same_bit_for_bit(policy: str, dtype: torch.dtype | None, fused: bool) -> None:
    offload = ActivationOffload(smallest_bytes=0)
    expected = gradients(policy, None, dtype, fused=fused)
    found = gradients(policy, offload, dtype, fused=fused)
    assert len(found) == len(expected) > 30
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert offload.moved_bytes


@pytest.mark.parametrize(("policy", "kept"), [("none", "activations"), ("full", "hidden")])
def test_what_leaves_is_what_the_planner_counts(policy: str, kept: str) -> None:
    """fp32: each tensor once, however many nodes save it; no parameter, nothing that blocks share."""
    offload = ActivationOffload(smallest_bytes=2**13)  # turns and row statistics are smaller
    gradients(policy, offload, None)
    planned = 2 * ROWS * LENGTH * WIDE.layers * getattr(sizes_of(WIDE), kept) * 4
    if policy == "full":
        assert offload.moved_bytes == planned
    else:
        # the planner counts kernels that fuse: here both norms save their product before the weight too, and
        # the output projection an attention output with its heads side by side
        more = 3 * 2 * ROWS * LENGTH * WIDE.layers * WIDE.hidden_size * 4
        assert offload.moved_bytes == planned + more


def test_the_graph_keeps_offloaded_tensors_alive_and_drops_them() -> None:
    """Two blocks' sources at most are held on the way; after the backward pass nothing is."""
    model, blocks = model_and_blocks()
    offload = ActivationOffload(smallest_bytes=0)
    for number, block in enumerate(blocks):
        offload.wrap(number, block)
    loss = model(torch.zeros(ROWS, LENGTH, dtype=torch.long)).square().mean()
    passes, block_pass = [], offload._last
    while block_pass is not None:
        passes.append(block_pass)
        block_pass = block_pass.before
    assert len(passes) == len(blocks)
    assert [bool(each.sources) for each in passes] == [True, False, False, False], "newest first"
    alive = [reference for each in passes for reference in each.offloaded if reference() is not None]
    assert len(alive) == sum(len(each.offloaded) for each in passes) > 20
    assert not any(each.fetched for each in passes)
    loss.backward()
    assert all(each.fetched and not each.sources for each in passes)
    assert not offload._held, "sources are let go once"
    del loss
    gc.collect()
    assert all(reference() is None for reference in alive)


class Gate(nn.Module):
    """A block that multiplies by what others use too."""

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return x * shared * 2.0


def test_what_several_blocks_use_leaves_once_in_each_micro_batch() -> None:
    """It is on the device anyway, as long as any block has it."""
    offload, blocks = ActivationOffload(smallest_bytes=0), [Gate() for _ in range(5)]
    for number, block in enumerate(blocks):
        offload.wrap(number, block)
    shared, x = torch.rand(8, 8), torch.rand(8, 8, requires_grad=True)
    for _ in range(3):
        y = x
        for block in blocks:
            y = block(y, shared)
        y.sum().backward()
    assert offload.moved_bytes == 3 * shared.nbytes
    torch.testing.assert_close(x.grad, 3 * (2.0 * shared) ** 5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_casts_of_parameters_stay(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None, fused: bool
) -> None:
    """A linear layer saves its weight, its cast or, fused, several as one, which is no activation."""
    moved: list[torch.Size] = []
    kept = ActivationOffload._stays

    def stays(self: Any, tensor: Tensor) -> bool:
        found = kept(self, tensor)
        if not found:
            moved.append(tensor.size())
        return found

    monkeypatch.setattr(ActivationOffload, "_stays", stays)
    gradients("none", ActivationOffload(smallest_bytes=0), dtype, fused=fused)
    shapes = {tuple(p.shape) for p in model_and_blocks()[0].parameters()}
    if fused:
        shapes |= {(3 * WIDE.hidden_size, WIDE.hidden_size), (2 * WIDE.intermediate_size, WIDE.hidden_size)}
    transposed = {shape[::-1] for shape in shapes}
    assert moved
    assert not [size for size in moved if tuple(size) in shapes | transposed]


def test_a_tensor_of_64_kib_leaves_and_a_smaller_one_stays() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1).square()

    for count, moved in ((1 << 14, 1 << 16), ((1 << 14) - 1, 0)):
        offload, block = ActivationOffload(), Square()
        offload.wrap(0, block)
        block(torch.ones(count, requires_grad=True))
        assert offload.moved_bytes == moved


def test_parameters_and_their_casts_stay() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    for held in (parameter, parameter.to(torch.bfloat16)):
        offload = ActivationOffload(0)
        packed = offload._pack(BlockPass(None, held.device))(held)
        assert packed is held
        assert offload._unpack(packed) is held


def test_evaluation_moves_nothing() -> None:
    model, blocks = model_and_blocks()
    offload = ActivationOffload(smallest_bytes=0)
    for number, block in enumerate(blocks):
        offload.wrap(number, block)
    with torch.no_grad():
        model(torch.zeros(ROWS, LENGTH, dtype=torch.long))
    assert offload.moved_bytes == 0
