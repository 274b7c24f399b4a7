"""OLMo-2 under every parallelism against one process in fp64, and its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.transformer import Transformer
from picotron_ray.parallel.tensor import cut_norm
from tests.support.gloo.faults import replace
from tests.support.gloo.parallel_jobs.matrix_jobs import MODEL, Result, make_job, run_layout
from tests.support.gloo.parity import check, compare, primaries, thinned
from tests.support.gloo.pool import Job, Pool

pytestmark = pytest.mark.gloo
OLMO2 = ModelConfig(**{**MODEL.model_dump(), "family": "olmo2"})  # four heads, two of keys
WIDE = OLMO2.model_copy(update={"kv_heads": 4})
TIED = OLMO2.model_copy(update={"tie_embeddings": True})

# fmt: off
LAYOUTS = [
    (Layout(tp=2, micro_batch=6), 12, OLMO2),
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), 7, OLMO2),
    (Layout(tp=2, pp=2, micro_batch=3), 12, TIED),
    (Layout(tp=2, cp=2, micro_batch=4), 12, OLMO2),
    (Layout(tp=4, micro_batch=4, recompute="full"), 12, WIDE),
    (Layout(dp=2, micro_batch=3), 12, OLMO2),
    (Layout(dp=2, zero=3, micro_batch=2, recompute="selective"), 7, OLMO2),
    (Layout(pp=2, schedule="1f1b", micro_batch=3), 12, OLMO2),
    (Layout(cp=2, zero=3, micro_batch=4), 12, OLMO2),
    (Layout(cp=2, micro_batch=4, context="all-gather"), 12, OLMO2),
    (Layout(dp=2, tp=2, zero=1, micro_batch=2), 7, TIED),
    (Layout(dp=2, tp=2, zero=2, micro_batch=2, recompute="selective"), 10, OLMO2),
    (Layout(dp=2, tp=2, pp=2, zero=3, micro_batch=2), 7, OLMO2),
    (Layout(tp=2, pp=2, schedule="zbv", virtual_stages=2, micro_batch=2), 12, OLMO2),
    (Layout(tp=2, micro_batch=4, offload_activations=True), 12, OLMO2),
]
# fmt: on


@pytest.mark.parametrize(
    ("layout", "rows", "model"), thinned(LAYOUTS, range(3), lambda layout, *_: str(layout))
)
def test_every_layout_equals_one_process(pool: Pool, layout: Layout, rows: int, model: ModelConfig) -> None:
    ranks = check(pool, layout, rows, model)
    primaries(layout, ranks, model)


@pytest.mark.parametrize(
    "kernels",
    [
        KernelsConfig(tp_overlap="ring", projections="fused"),
        KernelsConfig(norm="eager", loss="linear", loss_chunk=5),
    ],
    ids=["overlapped", "eager"],
)
def test_kernels_under_tensor_parallelism(pool: Pool, kernels: KernelsConfig) -> None:
    layout, job = Layout(tp=2, micro_batch=4), make_job("adamw", 12, OLMO2, kernels=kernels)
    assert compare(job, layout, [results[0] for results in pool.run(2, run_layout, [job], layout)]) == []


@pytest.mark.timeout(300)  # a compiler runs
@pytest.mark.slow
def test_compiled_blocks_under_tensor_parallelism(pool: Pool) -> None:
    shallow = OLMO2.model_copy(update={"layers": 1})
    job, layout = (
        make_job("adamw", 12, shallow, kernels=KernelsConfig(compile=True)),
        Layout(tp=2, micro_batch=6),
    )
    ranks = [results[0] for results in pool.run(2, run_layout, [job], layout)]
    assert "1 blocks compiled" in ranks[0].applied
    assert compare(job, layout, ranks) == []


def own_sums(job: Job, *arguments: Any) -> list[Result]:
    """`run_layout` where every rank norms its own columns of q and k alone."""
    undo = replace(cut_norm, "all_sum", lambda x, group: x.clone())
    try:
        return run_layout(job, *arguments)
    finally:
        undo()


def test_a_norm_of_a_ranks_own_heads_alone_is_noticed(pool: Pool) -> None:
    job, layout = make_job("adamw", 12, OLMO2), Layout(tp=2, micro_batch=6)
    ranks = [results[0] for results in pool.run(2, own_sums, [job], layout)]
    assert any("gradient" in line for line in compare(job, layout, ranks))


def test_every_norm_is_meant_by_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    built = Transformer(OLMO2).double()
    tokens = torch.arange(8).view(2, 4)
    expected = built(tokens)
    assert built.close_norms() == 4 * OLMO2.layers + 1
    monkeypatch.setattr(F, "rms_norm", None)  # nobody asks torch for one any more
    torch.testing.assert_close(built(tokens), expected)
