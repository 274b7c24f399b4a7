"""Gemma 2 and Gemma 3 under every parallelism against one process in fp64, and their kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.layers import softcap as capping
from picotron_ray.models.transformer import Transformer
from picotron_ray.parallel.attention.lse_kernels import MathKernel
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
MIXED = {
    **MODEL.model_dump(),
    "head_dim": 8,
    "tie_embeddings": True,
    "sliding_window": 3,
    "full_attention_every": 2,
    "query_pre_attn_scalar": 6,
}
CAPS = {"attention_softcap": 1.5, "logit_softcap": 2.0}  # where scores and logits of these weights are
GEMMA2 = ModelConfig(**{**MIXED, **CAPS, "family": "gemma2"})
ROPES = {"rope_local_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
GEMMA3 = ModelConfig(**{**MIXED, **ROPES, "family": "gemma3"})
UNTIED = GEMMA2.model_copy(update={"tie_embeddings": False})
KINDS = {GEMMA2: "gemma2", GEMMA3: "gemma3", UNTIED: "untied"}

# fmt: off
LAYOUTS = [
    (Layout(tp=2, pp=2, micro_batch=3), 12, GEMMA2),
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), 7, GEMMA3),
    (Layout(tp=2, cp=2, micro_batch=4), 12, GEMMA2),
    (Layout(tp=2, micro_batch=6), 12, UNTIED),
    (Layout(dp=2, zero=3, micro_batch=2, recompute="selective"), 7, GEMMA2),
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), 7, GEMMA2),
    (Layout(cp=2, micro_batch=4, context="all-gather"), 12, GEMMA2),
    (Layout(cp=2, zero=3, micro_batch=4), 12, GEMMA3),
    (Layout(dp=2, micro_batch=3), 12, GEMMA2),
    (Layout(tp=2, pp=2, micro_batch=3), 12, GEMMA3),
    (Layout(pp=2, schedule="1f1b", micro_batch=3), 12, GEMMA3),
    (Layout(pp=2, schedule="zbv", virtual_stages=2, micro_batch=2), 12, GEMMA2),
    (Layout(tp=2, micro_batch=4, recompute="full"), 12, GEMMA3),
    (Layout(dp=2, tp=2, pp=2, zero=3, micro_batch=2), 7, GEMMA2),
    (Layout(tp=2, micro_batch=4, offload_activations=True), 12, GEMMA2),
]
# fmt: on


@pytest.mark.parametrize(
    ("layout", "rows", "model"),
    thinned(LAYOUTS, range(3), lambda layout, _, model: f"{layout}-{KINDS[model]}"),
)
def test_every_layout_equals_one_process(pool: Pool, layout: Layout, rows: int, model: ModelConfig) -> None:
    ranks = check(pool, layout, rows, model)
    primaries(layout, ranks, model)
    said = ", window of 3, of every 2 blocks but one"
    said += "" if model.attention_softcap is None else ", scores capped at 1.5"
    assert any(phrase.endswith(f" attention{said}") for phrase in ranks[0].applied)


@pytest.mark.parametrize(
    ("model", "kernels"),
    [
        (GEMMA2, KernelsConfig(loss="linear", loss_chunk=5)),
        pytest.param(GEMMA3, KernelsConfig(tp_overlap="ring", projections="fused"), marks=pytest.mark.parity),
        pytest.param(UNTIED, KernelsConfig(norm="eager", loss="linear"), marks=pytest.mark.parity),
    ],
    ids=["linear", "overlapped", "eager"],
)
def test_kernels_under_tensor_parallelism(pool: Pool, model: ModelConfig, kernels: KernelsConfig) -> None:
    layout, job = Layout(tp=2, micro_batch=4), make_job("adamw", 12, model, kernels=kernels)
    assert compare(job, layout, [results[0] for results in pool.run(2, run_layout, [job], layout)]) == []


@pytest.mark.parametrize("model", [GEMMA2, pytest.param(GEMMA3, marks=pytest.mark.parity)], ids=["2", "3"])
def test_documents_and_windows_of_two_kinds(pool: Pool, model: ModelConfig) -> None:
    job, layout = documents_job("adamw", 12, model), Layout(dp=2, micro_batch=2)
    assert compare(job, layout, [results[0] for results in pool.run(2, run_layout, [job], layout)]) == []


def uncapped(job: Job, *arguments: Any) -> list[Result]:
    """`run_layout` where the backward pass over parts of rows takes capped scores for plain ones."""

    def backward(self: MathKernel, *given: Any) -> Any:
        cap, self._softcap = self._softcap, None
        try:
            return plain(self, *given)
        finally:
            self._softcap = cap

    plain = MathKernel.backward
    undo = replace(MathKernel, "backward", backward)
    try:
        return run_layout(job, *arguments)
    finally:
        undo()


def test_a_cap_without_its_gradient_is_noticed(pool: Pool) -> None:
    job, layout = make_job("adamw", 12, GEMMA2), Layout(cp=2, micro_batch=6)
    ranks = [results[0] for results in pool.run(2, uncapped, [job], layout)]
    assert any("gradient" in line for line in compare(job, layout, ranks))


@pytest.mark.parametrize(("model", "per_block"), [(GEMMA2, 4), (GEMMA3, 6)], ids=["2", "3"])
def test_every_norm_is_meant_by_the_closed_form(
    monkeypatch: pytest.MonkeyPatch, model: ModelConfig, per_block: int
) -> None:
    built = Transformer(model).double()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            parameter.normal_(0.0, 0.2 if "norm" in name else 0.1)
    tokens = torch.arange(16).view(2, 8)
    expected = built(tokens)
    assert built.close_norms() == per_block * model.layers + 1
    monkeypatch.setattr(F, "rms_norm", None)  # nobody asks torch for one any more
    torch.testing.assert_close(built(tokens), expected)


def test_caps_by_hand() -> None:
    x = torch.tensor([-100.0, -1.0, 0.0, 0.5, 100.0], dtype=torch.float64)
    found = capping.softcap(x, 2.0)
    assert found.tolist() == pytest.approx([-2.0, -0.9242343, 0.0, 0.4898373, 2.0], abs=1e-7)
    q, k, v = (torch.randn(2, heads, 5, 4, dtype=torch.float64) for heads in (4, 2, 2))
    seen = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    wide = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(capping.capped_attention(q, k, v, seen, 1e6), wide)
    scores = 1.5 * torch.tanh(q @ k.repeat_interleave(2, 1).mT / 2 / 1.5)
    expected = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(capping.capped_attention(q, k, v, seen, 1.5), expected)
