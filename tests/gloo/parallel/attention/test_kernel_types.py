"""Kernels over parts of rows get queries, keys and values of one type, as CUDA's take no other."""

from __future__ import annotations

import pytest
import torch

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from tests.support.gloo.parallel_jobs.matrix_jobs import MODEL, make_job, run_layout
from tests.support.gloo.parity import reference
from tests.support.gloo.pool import Pool

FAMILIES = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "olmo2": {"family": "olmo2", "qk_norm": True, "kv_heads": 4},
    "gpt2": {"family": "gpt2", "max_positions": 10, "kv_heads": 4},
}


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.deep)])
@pytest.mark.parametrize("context", ["ring", pytest.param("all-gather", marks=pytest.mark.deep)])
@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(name, marks=pytest.mark.deep) for name in ("llama", "olmo2", "gpt2"))]
)
def test_norms_of_queries_and_keys_change_no_type(
    pool: Pool, family: str, context: str, precision: str
) -> None:
    """They are fp32 under autocast; flash attention refused them under context parallelism."""
    model = ModelConfig.model_validate({**MODEL.model_dump(), **FAMILIES[family]})
    job = make_job("adamw", 12, model, precision=precision)
    layout = Layout(cp=2, micro_batch=12, context=context)
    ranks = [results[0] for results in pool.run(2, run_layout, [job], layout, "cuda-kernels")]
    expected = reference("adamw", 12, model)
    assert sum(rank.loss[0] for rank in ranks) == pytest.approx(expected.loss[0], rel=0.03)
    assert torch.isfinite(torch.tensor([rank.norm for rank in ranks])).all()
