"""gpt-oss under every parallelism against one process in fp64, its kernels, and transformers' own module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.layers.expert_counts import Counts
from picotron_ray.models.layers.experts import COMPUTE, ExpertStacks
from picotron_ray.models.layers.pointwise import clamped_gate
from picotron_ray.models.layers.sinks import sink_attention
from picotron_ray.models.transformer import Transformer
from picotron_ray.parallel.attention import sinks as sunk
from picotron_ray.parallel.attention.sinks import sunk_kernel
from picotron_ray.parallel.tensor.tensor_parallel import TensorParallel
from tests.support.gloo.faults import replace
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    MODEL,
    Result,
    documents_job,
    make_job,
    run_layout,
)
from tests.support.gloo.parity import check, compare, primaries, thinned
from tests.support.gloo.pool import Job, Pool

pytestmark = pytest.mark.gloo
STRETCHED = {"type": "yarn", "factor": 4.0, "original_length": 4, "beta_fast": 2.0, "truncate": False}
GPT_OSS = ModelConfig(
    **{
        **MODEL.model_dump(),
        "family": "gpt_oss",
        "head_dim": 8,
        "sliding_window": 3,
        "full_attention_every": 2,
        "rope_scaling": STRETCHED,
        "moe": {"experts": 8, "top_k": 3, "intermediate_size": 12, "loss_coefficient": 0.5},
    }
)

# fmt: off
LAYOUTS = [
    (Layout(dp=2, tp=2, ep=2, zero=3, micro_batch=2), 7),
    (Layout(tp=2, cp=2, micro_batch=4), 12),
    (Layout(cp=2, pp=2, micro_batch=3, context="ulysses"), 12),
    (Layout(cp=2, micro_batch=4, context="all-gather"), 12),
    (Layout(tp=2, pp=2, micro_batch=3), 12),
    (Layout(cp=4, micro_batch=4), 12),
    (Layout(tp=2, cp=2, ep=2, zero=2, micro_batch=4), 12),
    (Layout(dp=2, zero=3, micro_batch=2, recompute="selective"), 7),
    (Layout(cp=2, micro_batch=4, recompute="full"), 12),
    (Layout(dp=2, cp=2, ep=4, micro_batch=2, context="ulysses"), 7),
    (Layout(pp=2, schedule="zbv", virtual_stages=2, micro_batch=2), 12),
    (Layout(dp=2, zero=1, micro_batch=3), 12),
    (Layout(tp=2, micro_batch=4, offload_activations=True), 12),
]
# fmt: on


@pytest.mark.parametrize(("layout", "rows"), thinned(LAYOUTS, range(3)))
def test_every_layout_equals_one_process(pool: Pool, layout: Layout, rows: int) -> None:
    ranks = check(pool, layout, rows, GPT_OSS)
    primaries(layout, ranks, GPT_OSS)
    said = "attention, window of 3, of every 2 blocks but one, with sinks"
    assert any(phrase.endswith(said) for phrase in ranks[0].applied)


@pytest.mark.parametrize(
    "kernels",
    [
        KernelsConfig(tp_overlap="ring", projections="fused"),
        pytest.param(KernelsConfig(norm="eager", loss="linear", loss_chunk=5), marks=pytest.mark.parity),
        pytest.param(KernelsConfig(attention="math"), marks=pytest.mark.parity),
    ],
    ids=["overlapped", "eager", "math"],
)
def test_kernels_under_tensor_parallelism(pool: Pool, kernels: KernelsConfig) -> None:
    layout, job = Layout(tp=2, micro_batch=4), make_job("adamw", 12, GPT_OSS, kernels=kernels)
    assert compare(job, layout, [results[0] for results in pool.run(2, run_layout, [job], layout)]) == []


@pytest.mark.parametrize(
    "layout",
    [
        Layout(cp=2, micro_batch=5),
        pytest.param(Layout(cp=2, micro_batch=5, context="ulysses"), marks=pytest.mark.parity),
        pytest.param(Layout(tp=2, micro_batch=5), marks=pytest.mark.parity),
    ],
    ids=str,
)
def test_documents_that_share_rows(pool: Pool, layout: Layout) -> None:
    job = documents_job("adamw", 10, GPT_OSS)
    assert compare(job, layout, [results[0] for results in pool.run(2, run_layout, [job], layout)]) == []


@pytest.mark.timeout(600)  # a compiler runs
@pytest.mark.slow
def test_a_compiled_block(pool: Pool) -> None:
    job = make_job("adamw", 12, GPT_OSS.model_copy(update={"layers": 1}), kernels=KernelsConfig(compile=True))
    [[found, *_]] = pool.run(1, run_layout, [job], Layout(micro_batch=12))
    assert "1 blocks compiled" in found.applied
    assert compare(job, Layout(micro_batch=12), [found]) == []


def twice_added(job: Job, *arguments: Any) -> list[Result]:
    """`run_layout` where every tensor-parallel rank adds the biases of the experts' results."""

    def experts(self: TensorParallel, module: Any) -> None:
        plain(self, module)
        module.adds_bias = True

    plain = TensorParallel.experts
    undo = replace(TensorParallel, "experts", experts)
    try:
        return run_layout(job, *arguments)
    finally:
        undo()


def frozen_sinks(job: Job, *arguments: Any) -> list[Result]:
    """`run_layout` where results know of sinks, and their log-sum-exp does not."""

    def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return plain(out, lse, sinks)[0], lse

    plain = sunk.with_sinks
    undo = replace(sunk, "with_sinks", with_sinks)
    try:
        return run_layout(job, *arguments)
    finally:
        undo()


@pytest.mark.parametrize(
    ("run", "layout"),
    [(twice_added, Layout(tp=2, micro_batch=6)), (frozen_sinks, Layout(dp=2, micro_batch=6))],
    ids=["biases-twice", "plain-log-sum-exp"],
)
def test_a_fault_is_noticed(pool: Pool, run: Any, layout: Layout) -> None:
    job = make_job("adamw", 12, GPT_OSS)
    ranks = [results[0] for results in pool.run(2, run, [job], layout)]
    assert any("gradient" in line for line in compare(job, layout, ranks))


def grown(*shape: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("backend", ["flash", "math"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("documents", [False, True])
def test_kernels_corrected_by_log_sum_exp_are_the_formula(
    backend: Any, window: int | None, documents: bool
) -> None:
    given = grown(2, 4, 11, 8, seed=0), grown(2, 2, 11, 8, seed=1), grown(2, 2, 11, 8, seed=2)
    sinks = grown(4, seed=3)
    numbers = (torch.arange(22).view(2, 11) // 5).int() if documents else None
    found = []
    for kernel in (sink_attention, sunk_kernel(backend)):
        out = kernel(*given, numbers, window, sinks)
        found.append((out, *torch.autograd.grad(out.square().sum(), (*given, sinks))))
    for expected, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_the_clamped_gate_has_the_gradient_of_its_formula() -> None:
    gate = torch.linspace(-9, 9, 38, dtype=torch.float64).requires_grad_()
    up = (gate.detach().flip(0) * 1.1).requires_grad_()
    opened, passed = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = (passed + 1) * opened * torch.sigmoid(1.702 * opened)
    torch.testing.assert_close(clamped_gate(gate, up), expected, rtol=1e-14, atol=1e-14)
    slopes = (torch.autograd.grad(out.sum(), (gate, up)) for out in (clamped_gate(gate, up), expected))
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [0, 9, 0, 0]], ids=str)
def test_experts_with_biases_equal_each_other(counts: list[int]) -> None:
    torch.manual_seed(0)
    rows = torch.randn(10, 16, requires_grad=True)  # the last ones are nobody's
    shapes = ((8, 16), (8, 16), (16, 8), (8,), (8,), (16,))
    weights = [torch.randn(4, *shape, requires_grad=True) for shape in shapes]
    found = []
    for compute in COMPUTE.values():
        here = Counts(torch.tensor(counts), sum(counts))
        out = compute(rows, here, ExpertStacks(*weights), clamped_gate)[: sum(counts)]
        of_rows, *slopes = torch.autograd.grad(out.square().sum(), (rows, *weights))
        found.append((out, of_rows[: sum(counts)], *slopes))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_one_process_is_transformers_module_in_fp64() -> None:
    """Loss and the gradient of every parameter, by names and forms of the checkpoint's mapping."""
    transformers = pytest.importorskip("transformers", reason="of the hf extra")
    from picotron_ray.models.families.registry import parameter_table
    from picotron_ray.models.huggingface.names import hf_config, tensors
    from picotron_ray.runtime.run_storage.hf_arrays import ours_of

    keys = hf_config(GPT_OSS, 16, "float64")
    config = transformers.GptOssConfig(**{k: v for k, v in keys.items() if k != "dtype"})
    config._attn_implementation = config._experts_implementation = "eager"
    theirs = transformers.GptOssForCausalLM(config).double()
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    shapes = {spec.name: spec.shape for spec in parameter_table(GPT_OSS)}

    def mapped(values: dict[str, Any]) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(array)
            for held in tensors(GPT_OSS, "GptOssForCausalLM")
            for name, array in zip(
                held.ours, ours_of(held, [values[key].numpy() for key in held.theirs], shapes), strict=True
            )
        }

    ours = Transformer(GPT_OSS).double()
    ours.load_state_dict(mapped({name: value.detach() for name, value in theirs.named_parameters()}))
    tokens = torch.arange(48).view(2, 24) * 5 % 24
    losses = []
    for model in (theirs, ours):
        logits = model(tokens).logits if model is theirs else model(tokens)
        losses.append(
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        )
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    expected = mapped({name: value.grad for name, value in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
