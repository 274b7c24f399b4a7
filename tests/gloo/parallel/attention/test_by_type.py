"""Parts in 16 bits keep their kernel, others have one that takes fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.attention import sinks as module
from picotron_ray.parallel.attention.backends import AttentionPlan
from picotron_ray.parallel.mesh import make_mesh
from picotron_ray.parallel.parallelize import parallelize
from picotron_ray.parallel.stage_plan import StagePlan
from tests.support.gloo.parallel_jobs.matrix_jobs import MODEL, make_job, run_layout
from tests.support.gloo.parity import reference, thinned
from tests.support.gloo.pool import Pool


@pytest.mark.parametrize("full", [None, "efficient"])
def test_the_kernel_goes_by_the_type_of_queries(monkeypatch: pytest.MonkeyPatch, full: Any) -> None:
    def kernel(backend: str, **_: Any) -> Any:
        return lambda q, k, v, documents, window: f"{backend} {window}"

    monkeypatch.setattr(module, "attention_kernel", kernel)
    block = nn.Linear(2, 2)
    model = nn.ModuleDict({"block": block})
    plan = AttentionPlan(modules=("block",), backend="flash", length=8, full=full)
    said = parallelize(model, make_mesh(Layout(), 0, "cpu"), StagePlan(styles=(), blocks=[], attention=plan))
    assert said == (f"flash{', in fp32 efficient' if full else ''} attention",)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q = torch.zeros(1, dtype=dtype)
        found = block.kernel(q, q, q, None, 3)
        assert found == f"{'efficient' if full and dtype == torch.float32 else 'flash'} 3"


LAYOUTS = [
    (Layout(cp=2, micro_batch=12, context="ulysses"), {"qk_norm": True}),
    (Layout(dp=2, micro_batch=6), {}),
    (Layout(cp=2, tp=2, micro_batch=6, context="ulysses"), {"kv_heads": 4}),
]


@pytest.mark.parametrize(
    ("layout", "changes"), thinned(LAYOUTS, (0,), lambda layout, changes: f"{layout}-{len(changes)}")
)
def test_parts_in_fp32_are_not_given_to_a_kernel_that_has_none(
    pool: Pool, layout: Layout, changes: dict[str, Any]
) -> None:
    """Under adaptive precision, over whole rows: FlashAttention refuses fp32, and ulysses gave it some."""
    model = MODEL.model_copy(update=changes)
    job = make_job("adamw", 12, model, precision="bf16", adaptive_precision={"error_bound": 0.1})
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout, "rows-of-cuda")]
    assert "flash, in fp32 efficient attention" in ranks[0].applied
    expected = reference("adamw", 12, model)
    assert sum(rank.loss[0] for rank in ranks) == pytest.approx(expected.loss[0], rel=0.03)
    assert torch.isfinite(torch.tensor([rank.norm for rank in ranks])).all()
