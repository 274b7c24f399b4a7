"""A vocabulary that does not divide by tp: the last rank holds fewer rows, and all is exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

import picotron_ray.train.passes as passes
from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.registry import parameter_table
from picotron_ray.parallel.shard_boxes import local_box
from picotron_ray.planner.model_sizes import stage_parameters
from tests.support.gloo.parallel_jobs.matrix_jobs import MODEL, Result, make_job, run_layout
from tests.support.gloo.parity import compare, primaries, thinned
from tests.support.gloo.pool import Job, Pool

LENGTH = 12  # which 2, 3 and 4 tensor-parallel ranks share
BASE = {**MODEL.model_dump(), "hidden_size": 48, "layers": 2, "heads": 12, "kv_heads": 12, "vocab_size": 23}
ODD = ModelConfig(**BASE)
TIED = ModelConfig(**{**BASE, "tie_embeddings": True})
GPT2 = ModelConfig(**{**BASE, "family": "gpt2", "max_positions": LENGTH, "tie_embeddings": True})
SHORT = ModelConfig(**{**BASE, "vocab_size": 10})  # over 4: 3, 3, 3 and 1
LINEAR = KernelsConfig(loss="linear", loss_chunk=7)
LOGITS = KernelsConfig()

# fmt: off
LAYOUTS = [
    (Layout(tp=2, micro_batch=4), ODD, LOGITS),
    (Layout(tp=2, micro_batch=4), ODD, LINEAR),
    (Layout(tp=3, micro_batch=4), TIED, LOGITS),
    (Layout(tp=3, micro_batch=4), ODD, LINEAR),
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), ODD, LOGITS),  # 12 and 11 rows, each over 2
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), GPT2, LINEAR),
    (Layout(dp=2, tp=3, zero=3, micro_batch=2), ODD, LOGITS),
    (Layout(dp=2, tp=3, zero=3, micro_batch=2), TIED, LINEAR),
    (Layout(tp=4, micro_batch=4), SHORT, LOGITS),
    (Layout(tp=4, micro_batch=4), SHORT, LINEAR),
    (Layout(dp=2, tp=2, zero=1, micro_batch=3), GPT2, LOGITS),
    (Layout(dp=2, tp=2, zero=2, micro_batch=2), TIED, LOGITS),
    (Layout(dp=2, tp=3, micro_batch=2), TIED, LINEAR),
    (Layout(tp=2, cp=2, micro_batch=4), ODD, LINEAR),
    (Layout(tp=2, pp=2, micro_batch=3), ODD, LOGITS),
    (Layout(dp=4, tp=2, zero=2, replicate=2, micro_batch=1), ODD, LOGITS),
]
# fmt: on


def named(layout: Layout, model: ModelConfig, kernels: KernelsConfig) -> str:
    return f"{layout}-{model.vocab_size}{'-tied' * model.tie_embeddings}-{kernels.loss}"


def both(pool: Pool, layout: Layout, model: ModelConfig, kernels: KernelsConfig, task: Any) -> list[str]:
    """What differs from one process, under SGD and AdamW."""
    jobs = [make_job(name, 12, model, kernels=kernels, length=LENGTH) for name in ("sgd", "adamw")]
    per_rank = pool.run(layout.world_size, task, jobs, layout)
    primaries(layout, [results[-1] for results in per_rank], model)
    found = zip(jobs, zip(*per_rank, strict=True), strict=True)
    return [line for job, ranks in found for line in compare(job, layout, list(ranks))]


@pytest.mark.parametrize(("layout", "model", "kernels"), thinned(LAYOUTS, (0, 2, 5), named))
def test_uneven_parts_equal_one_process(
    pool: Pool, layout: Layout, model: ModelConfig, kernels: KernelsConfig
) -> None:
    assert both(pool, layout, model, kernels, run_layout) == []


@contextmanager
def equal_parts() -> Iterator[None]:
    """The mistake of taking every rank's part for as large as one's own."""
    kept = passes.token_losses

    def wrong(logits: Tensor, targets: Tensor, group: Any, first: int) -> Tensor:
        return kept(logits, targets, group, 0 if group is None else group.rank() * logits.size(-1))

    passes.token_losses = wrong
    try:
        yield
    finally:
        passes.token_losses = kept


def with_equal_parts(job: Job, configs: list[Any], layout: Layout) -> list[Result]:
    with equal_parts():
        return run_layout(job, configs, layout)


def test_a_wrong_first_id_is_noticed(pool: Pool) -> None:
    wrong = both(pool, Layout(tp=2, micro_batch=4), ODD, LOGITS, with_equal_parts)
    assert any("gradient" in line for line in wrong), wrong


@pytest.mark.parametrize("model", [ODD, TIED, GPT2, SHORT])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_the_planner_counts_the_fullest_rank(model: ModelConfig, tp: int) -> None:
    layout = Layout(tp=tp)
    held = [sum(local_box(s, layout, rank).numel for s in parameter_table(model)) for rank in range(tp)]
    whole = sum(s.numel for s in parameter_table(model) if s.tp_dim is None)  # norms, shown as cut
    whole -= (model.max_positions or 0) * model.hidden_size
    assert stage_parameters(model, 1, 0, tp) == pytest.approx(max(held) - whole * (1 - 1 / tp))
