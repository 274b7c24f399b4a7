"""Tied embeddings in pipelines: two copies of one parameter, at every schedule and beside other options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from tests.gloo.runtime.test_remesh import job_of
from tests.support.gloo.action_lists import V_SPLIT, Rows, layout_of, made
from tests.support.gloo.parallel_jobs.matrix_jobs import MODEL, assemble, make_job, run_layout, train
from tests.support.gloo.parity import (
    TOLERANCE,
    WEIGHTS_TOLERANCE,
    check,
    compare,
    primaries,
    reference,
    thinned,
    worst,
)
from tests.support.gloo.pool import Pool
from tests.support.gloo.runs import Run, losses
from tests.support.gloo.train_jobs.data_jobs import scaled
from tests.support.gloo.train_jobs.muon_jobs import leg

TIED = ModelConfig(**{**MODEL.model_dump(), "tie_embeddings": True})
DEEP = ModelConfig(**{**TIED.model_dump(), "layers": 5})
ODD = ModelConfig(**{**TIED.model_dump(), "vocab_size": 23})
GPT2_TIED = ModelConfig(**{**DEEP.model_dump(), "family": "gpt2", "kv_heads": 4, "max_positions": 10})
KINDS = {TIED: "tied", DEEP: "deep", ODD: "odd", GPT2_TIED: "gpt2"}
TWICE = {"pp": 2, "virtual_stages": 2}
V_WHOLE = made(((0, 3), (1, 2)), 4, split=False)  # as V_SPLIT, with backward passes in one
TURNED = made(((2,), (0,), (1,)), 4, split=False)  # the last stage on the first rank, the first on the second

# fmt: off
LAYOUTS: list[tuple[Layout, int, ModelConfig, Rows]] = [
    (Layout(pp=2, micro_batch=3), 12, TIED, ()),
    (Layout(pp=3, schedule="gpipe", micro_batch=3), 12, GPT2_TIED, ()),
    (Layout(**TWICE, schedule="interleaved-1f1b", micro_batch=3), 12, DEEP, ()),
    (Layout(**TWICE, schedule="zbv", micro_batch=2), 12, DEEP, ()),
    (Layout(**TWICE, schedule="dualpipev", micro_batch=2), 12, GPT2_TIED, ()),
    (Layout(dp=2, **TWICE, schedule="zbv", zero=2, micro_batch=1), 12, DEEP, ()),
    (Layout(dp=2, **TWICE, schedule="dualpipev", micro_batch=1), 12, DEEP, ()),
    (Layout(dp=2, pp=2, zero=3, micro_batch=2), 7, TIED, ()),
    (Layout(tp=2, pp=2, micro_batch=3), 12, ODD, ()),
    (layout_of(V_WHOLE, 16, dp=2, zero=3), 16, DEEP, V_WHOLE),
    (layout_of(TURNED, 12), 12, TIED, TURNED),
    (Layout(dp=2, pp=3, micro_batch=2), 12, DEEP, ()),  # others between the ends, and beside them
    (Layout(pp=4, micro_batch=3), 12, DEEP, ()),
    (Layout(dp=2, pp=2, micro_batch=3), 12, GPT2_TIED, ()),
    (Layout(**TWICE, schedule="looped-bfs", micro_batch=3), 12, DEEP, ()),
    (Layout(**TWICE, schedule="interleaved-zero-bubble", micro_batch=3), 12, GPT2_TIED, ()),
    (Layout(dp=2, **TWICE, schedule="zbv", zero=1, micro_batch=1), 12, GPT2_TIED, ()),
    (Layout(tp=2, **TWICE, schedule="dualpipev", micro_batch=2), 12, DEEP, ()),
    (Layout(cp=2, **TWICE, schedule="zbv", zero=2, micro_batch=2), 12, DEEP, ()),
    (Layout(dp=2, pp=2, zero=1, micro_batch=3), 12, TIED, ()),
    (Layout(dp=3, pp=2, zero=2, micro_batch=1), 10, ODD, ()),
    (Layout(dp=4, pp=2, zero=3, replicate=2, micro_batch=1), 12, TIED, ()),
    (Layout(dp=2, tp=2, pp=2, zero=3, micro_batch=2), 7, ODD, ()),
    (Layout(cp=2, pp=2, micro_batch=3, context="all-gather"), 12, GPT2_TIED, ()),
    (Layout(dp=2, pp=2, zero=2, micro_batch=3, recompute="full"), 12, TIED, ()),
    (layout_of(V_SPLIT, 12, dp=2, zero=2), 12, DEEP, V_SPLIT),
    (layout_of(V_WHOLE, 12, tp=2), 12, DEEP, V_WHOLE),
]
# fmt: on


def named(layout: Layout, batch: int, model: ModelConfig, actions: Rows) -> str:
    return f"{layout}-{KINDS[model]}-{batch}"


@pytest.mark.parametrize(("layout", "batch", "model", "actions"), thinned(LAYOUTS, (0, 3, 6, 9), named))
def test_every_schedule_equals_one_process(
    pool: Pool, layout: Layout, batch: int, model: ModelConfig, actions: Rows
) -> None:
    """Loss, norm, raw gradients, weights; copies agree bit by bit, and one of them speaks for the tensor."""
    ranks = check(pool, layout, batch, model, actions)
    primaries(layout, ranks, model)
    holders = {
        layout.coordinates(rank).pp
        for rank, result in enumerate(ranks)
        if any(piece[0] == "embed.weight" for piece in result.state)
    }
    assert holders == {layout.first_stage_rank, layout.last_stage_rank}


# --- beside other options ----------------------------------------------------------------------------

PAIR = Layout(pp=2, micro_batch=3)
CUT = Layout(tp=2, pp=2, micro_batch=3)
V = Layout(**TWICE, schedule="zbv", micro_batch=2)
OTHER_V = Layout(dp=2, **TWICE, schedule="dualpipev", zero=2, micro_batch=1)
FOREACH = KernelsConfig(optimizer="foreach")
LINEAR = KernelsConfig(loss="linear", loss_chunk=5)
OTHERS: list[tuple[str, Layout, str, ModelConfig, dict[str, Any]]] = [
    ("muon", Layout(dp=2, pp=2, zero=2, micro_batch=3), "muon", TIED, {}),
    ("muon", V, "muon", DEEP, {}),
    ("offload", PAIR, "adamw", ODD, {"offload": True}),
    ("offload", OTHER_V, "adamw", DEEP, {"offload": True}),
    ("undecayed", V, "adamw", DEEP, {"decay_embeddings": False}),
    ("foreach", CUT, "adamw", ODD, {"kernels": FOREACH}),
    ("linear", CUT, "adamw", ODD, {"kernels": LINEAR}),
    ("linear", V, "adamw", DEEP, {"kernels": LINEAR}),
]


def job_with(optimizer: str, model: ModelConfig, options: dict[str, Any]) -> JobConfig:
    own = {key: value for key, value in options.items() if key != "kernels"}
    job = make_job(optimizer, 12, model, **{k: v for k, v in options.items() if k == "kernels"})
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update=own)})


@pytest.mark.parametrize(
    ("layout", "optimizer", "model", "options"),
    [pytest.param(*case, id=f"{name}-{case[0]}") for name, *case in OTHERS],
)
def test_beside_other_options(
    pool: Pool, layout: Layout, optimizer: str, model: ModelConfig, options: dict[str, Any]
) -> None:
    """Against the same job in one process; both ends agree bit by bit (`assemble`)."""
    job = job_with(optimizer, model, options)
    alone = train(job, Layout(micro_batch=12), 0, None)
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    primaries(layout, ranks, model)
    for kind, tolerance in (("gradients", TOLERANCE), ("state", WEIGHTS_TOLERANCE)):
        found, expected = (assemble([getattr(r, kind) for r in some]) for some in (ranks, [alone]))
        far, name = worst(found, expected)
        assert far < tolerance, name
    moments = {name.rpartition("/")[0] for name in found if name.endswith("embed.weight")}
    assert moments == {"", "exp_avg", "exp_avg_sq"}, "the embedding is AdamW's"


@pytest.mark.parametrize("layout", [Layout(dp=2, pp=2, zero=2, micro_batch=3), V], ids=str)
def test_an_overflow_is_seen_at_both_ends(pool: Pool, layout: Layout) -> None:
    job = make_job("sgd", 12, DEEP, precision="fp16")
    expected = assemble([reference("sgd", 12, DEEP).gradients])
    ranks = pool.run(layout.world_size, scaled, job, layout, 2.0**40)
    norm, (scale, _), _ = ranks[0]
    assert all(rank[:2] == ranks[0][:2] for rank in ranks)
    assert scale < 2.0**40
    clipped = {name: value * (0.5 / norm) for name, value in expected.items()}
    far, name = worst(assemble([rank[2] for rank in ranks]), clipped)
    assert far < 0.05, name


# --- faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plant", "layout", "sign"),
    [
        ("dropped", PAIR, "replicas disagree about embed.weight"),
        ("dropped", V, "gradient of embed.weight"),
        ("stale", V, "replicas disagree about embed.weight"),
        ("counted", PAIR, "norm of step 1"),
    ],
)
def test_a_planted_fault_is_noticed(pool: Pool, plant: str, layout: Layout, sign: str) -> None:
    job = make_job("adamw", 12, DEEP)
    per_rank = pool.run(layout.world_size, run_layout, [job], layout, f"tied-{plant}")
    try:
        wrong = compare(job, layout, [results[0] for results in per_rank])
    except AssertionError as error:
        wrong = [str(error)]
    assert any(sign in line for line in wrong), wrong


# --- from any layout into any other ------------------------------------------------------------------

LEGS = [
    (Layout(dp=2, pp=2, zero=3, micro_batch=2), V),
    (V, Layout(dp=2, tp=2, zero=3, micro_batch=2)),
    (Layout(micro_batch=12), Layout(pp=3, schedule="gpipe", micro_batch=3)),
    (OTHER_V, CUT),
]


@pytest.mark.parametrize(("before", "after"), LEGS, ids=str)
def test_state_goes_on_in_another_layout(pool: Pool, tmp_path: Path, before: Layout, after: Layout) -> None:
    """Weights and moments through slots, in which the embedding is one tensor."""
    job = make_job("adamw", 12, DEEP)
    pool.run(before.world_size, leg, job, before, (0, 2), tmp_path)
    found = pool.run(after.world_size, leg, job, after, (2, 3), tmp_path)
    far, name = worst(assemble(found), assemble([reference("adamw", 12, DEEP).state]))
    assert far < WEIGHTS_TOLERANCE, name


def test_a_kill_takes_the_ends_apart_and_together(pool: Pool, tmp_path: Path) -> None:
    """On three ranks the last one dies while the first waits for its gradient; then on one; then tp."""
    (tmp_path / "alone").mkdir()
    runs = []
    for folder in (tmp_path / "alone", tmp_path):
        runs.append(Run(pool, job_of("tied", folder), folder))
    alone, run = runs
    alone.finish(Layout(micro_batch=12))
    run.strike(Layout(pp=3, micro_batch=3), (2, 3, "reduce"))
    run.strike(Layout(dp=2, **TWICE, schedule="zbv", zero=2, micro_batch=1), (1, 5, "clip"))
    run.finish(Layout(dp=2, tp=2, micro_batch=3))
    assert run.last is not None
    assert run.last.resume_step > 3, "from the second generation's snapshots"
    assert losses(run.ledger()) == pytest.approx(losses(alone.ledger()), rel=1e-9)
