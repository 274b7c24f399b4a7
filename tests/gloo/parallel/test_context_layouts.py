"""Context parallelism with windows, documents, mixtures and shared keys against one process, in fp64."""

from __future__ import annotations

from collections import Counter

import pytest

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    MIXTURE,
    MODEL,
    STEPS,
    documents_job,
    make_job,
    run_layout,
)
from tests.support.gloo.parity import check, compare, primaries, thinned
from tests.support.gloo.pool import Pool


def having(model: ModelConfig = MODEL, **changes: object) -> ModelConfig:
    return ModelConfig(**{**model.model_dump(), **changes})


WINDOW = having(sliding_window=3)
WIDE = having(kv_heads=4)
LONG = having(kv_heads=4, sliding_window=6)  # of more than a part of a row
SPARSE = having(MIXTURE, sliding_window=5)
GEMMA2 = {"family": "gemma2", "tie_embeddings": True, "full_attention_every": 2, "sliding_window": 3}
CAPPED = having(**GEMMA2, attention_softcap=1.5, logit_softcap=3.0)
GEMMA3 = having(
    **{**GEMMA2, "family": "gemma3", "full_attention_every": 3}, qk_norm=True, rope_local_theta=100.0
)
LATENT = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
DEEPSEEK = having(family="deepseek", kv_heads=4, mla=LATENT)
KINDS = {
    MODEL: "plain", WINDOW: "window", WIDE: "wide", LONG: "long", SPARSE: "sparse", CAPPED: "gemma2",
    GEMMA3: "gemma3", MIXTURE: "mixture", DEEPSEEK: "deepseek",
}  # fmt: skip
# fmt: off
LAYOUTS = [
    # the first ones run by default
    (Layout(cp=2, micro_batch=4, context="ulysses"), 12, SPARSE),
    (Layout(cp=2, tp=2, micro_batch=4), 12, WINDOW),
    (Layout(cp=2, pp=2, micro_batch=3, context="ulysses"), 12, GEMMA3),
    (Layout(cp=4, micro_batch=4, context="all-gather"), 12, LONG),
    *((Layout(cp=cp, micro_batch=4, context=context), 12, model)  # type: ignore[arg-type]
      for cp in (2, 4) for context in ("ring", "all-gather") for model in (WINDOW, SPARSE, CAPPED, GEMMA3)),
    *((Layout(cp=cp, micro_batch=4, context="ulysses"), 12, model)
      for cp, model in ((2, MODEL), (2, WINDOW), (4, WIDE), (4, LONG), (2, CAPPED), (4, DEEPSEEK))),
    *((Layout(cp=2, tp=2, micro_batch=4, context=context), 12, LONG)  # type: ignore[arg-type]
      for context in ("ring", "all-gather", "ulysses")),
    *((Layout(cp=2, pp=2, zero=2, dp=2, micro_batch=2, context=context), 7, WINDOW)  # type: ignore[arg-type]
      for context in ("ring", "all-gather", "ulysses")),
    (Layout(cp=4, tp=2, micro_batch=4), 12, WINDOW),
    (Layout(cp=4, dp=2, zero=3, micro_batch=2, context="ulysses"), 7, WIDE),
    (Layout(cp=2, dp=2, ep=4, micro_batch=2, context="ulysses"), 7, MIXTURE),
    (Layout(cp=2, micro_batch=4, context="ulysses", recompute="selective"), 12, WINDOW),
    (Layout(cp=2, micro_batch=4, context="ulysses", recompute="full"), 12, CAPPED),
    (Layout(cp=2, pp=2, schedule="zbv", virtual_stages=2, micro_batch=2, context="ulysses"), 12, MODEL),
]
# fmt: on


@pytest.mark.parametrize(
    ("layout", "rows", "model"),
    thinned(LAYOUTS, (0, 1, 3), lambda layout, _, model: f"{layout}-{KINDS[model]}"),
)
def test_every_layout_equals_one_process(pool: Pool, layout: Layout, rows: int, model: ModelConfig) -> None:
    ranks = check(pool, layout, rows, model)
    primaries(layout, ranks, model)
    said = " ".join(ranks[0].applied)
    assert f"context parallel over {layout.cp}, {layout.context}, " in said
    assert ("window of" in said) == (model.sliding_window is not None)


DOCUMENTS = [
    (Layout(cp=2, tp=2, micro_batch=4), WINDOW, "cuda-flash"),
    (Layout(cp=2, micro_batch=4, context="ulysses"), CAPPED, ""),
    *((Layout(cp=cp, micro_batch=4, context=context), model, "cuda-flash")  # type: ignore[arg-type]
      for cp in (2, 4) for context in ("ring", "all-gather") for model in (MODEL, WINDOW, LONG, GEMMA3)),
    *((Layout(cp=cp, micro_batch=4, context=context), model, "")  # type: ignore[arg-type]
      for cp in (2, 4) for context in ("ring", "all-gather") for model in (MODEL, WINDOW, CAPPED)),
    *((Layout(cp=cp, micro_batch=4, context="ulysses"), model, "")
      for cp, model in ((2, MODEL), (4, WIDE), (4, LONG), (2, GEMMA3), (2, MIXTURE))),
    (Layout(cp=2, pp=2, micro_batch=3), WINDOW, "cuda-flash"),
    (Layout(cp=2, pp=2, micro_batch=3, context="ulysses"), WINDOW, ""),
    (Layout(cp=2, micro_batch=4, recompute="full"), WINDOW, "cuda-flash"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "model", "plant"),
    thinned(DOCUMENTS, range(2), lambda layout, model, plant: f"{layout}-{KINDS[model]}-{plant}"),
)
def test_documents_that_share_rows(pool: Pool, layout: Layout, model: ModelConfig, plant: str) -> None:
    """``cuda-flash``: CUDA's kernel over parts of rows, whose operators are emulated; no mask is made."""
    job = documents_job("adamw", 10, model)
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout, plant)]
    assert compare(job, layout, ranks) == []


@pytest.mark.parametrize(
    ("plant", "layout"),
    [
        ("exchange", Layout(cp=2, micro_batch=6, context="ulysses")),
        ("longer-window", Layout(cp=2, micro_batch=6)),
        pytest.param(
            "longer-window", Layout(cp=2, micro_batch=6, context="all-gather"), marks=pytest.mark.parity
        ),
    ],
    ids=str,
)
def test_a_fault_is_noticed(pool: Pool, plant: str, layout: Layout) -> None:
    job = make_job("adamw", 12, WINDOW)
    ranks = [results[0] for results in pool.run(2, run_layout, [job], layout, plant)]
    assert any("gradient" in line for line in compare(job, layout, ranks))


def test_an_attention_exchanges_twice_each_way(pool: Pool) -> None:
    """Queries, keys and values in one message, results in another, and their gradients."""
    layout = Layout(cp=2, micro_batch=12, context="ulysses")
    job = make_job("sgd", 12)
    calls = [results[0].calls for results in pool.run(2, run_layout, [job], layout)]
    kinds = Counter(one.kind for one in calls[0])
    assert kinds["all_to_all"] == STEPS * 4 * MODEL.layers
