"""Every layout against the same model in one process, in fp64."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from picotron_ray.config.job import JobConfig, ModelConfig
from picotron_ray.config.layout import Layout
from picotron_ray.models.plan import parameter_table
from tests.gloo.matrix_jobs import MODEL, STEPS, Result, assemble, make_job, run_layout, train
from tests.gloo.pool import Pool

TOLERANCE = 1e-10
WEIGHTS_TOLERANCE = 1e-9

# fmt: off
LAYOUTS = [
    # (layout, global batch): 12 rows divide evenly by most, 7 and 10 leave uneven rows and fill rows
    (Layout(micro_batch=4), 12),
    (Layout(dp=2, micro_batch=3), 12),
    (Layout(dp=3, micro_batch=2), 10),
    (Layout(dp=4, micro_batch=2), 7),
    (Layout(dp=5, micro_batch=1), 7),
    (Layout(dp=8, micro_batch=1), 7),       # one replica has nothing but fill rows
    (Layout(dp=2, zero=2, micro_batch=3), 12),
    (Layout(dp=3, zero=2, micro_batch=2), 10),
    (Layout(dp=4, zero=2, micro_batch=2), 7),
    (Layout(dp=2, zero=3, micro_batch=3), 12),
    (Layout(dp=3, zero=3, micro_batch=2), 10),
    (Layout(dp=7, zero=3, micro_batch=1), 10),  # chunks of 16 rows over 7: the last ranks hold less or none
    (Layout(tp=2, micro_batch=6), 12),
    (Layout(dp=2, tp=2, micro_batch=3), 12),
    (Layout(dp=3, tp=2, micro_batch=2), 10),
    (Layout(dp=2, tp=2, zero=2, micro_batch=3), 12),
    (Layout(dp=2, tp=2, zero=3, micro_batch=3), 12),
    (Layout(dp=3, tp=2, zero=3, micro_batch=2), 10),
    (Layout(dp=4, tp=2, zero=2, micro_batch=2), 7),
    (Layout(pp=2, schedule="afab", micro_batch=3), 12),
    (Layout(pp=2, schedule="1f1b", micro_batch=3), 12),
    (Layout(pp=3, schedule="afab", micro_batch=4), 10),
    (Layout(pp=3, schedule="1f1b", micro_batch=2), 10),  # 4 layers over 3 stages
    (Layout(pp=4, schedule="1f1b", micro_batch=3), 12),
    (Layout(pp=4, schedule="afab", micro_batch=5), 7),   # fewer micro-batches than stages
    (Layout(dp=2, pp=2, schedule="1f1b", micro_batch=2), 7),
    (Layout(dp=2, pp=2, schedule="afab", micro_batch=3), 12),
    (Layout(dp=3, pp=2, schedule="1f1b", micro_batch=1), 10),
    (Layout(dp=2, pp=2, zero=2, schedule="1f1b", micro_batch=2), 10),
    (Layout(dp=2, pp=2, zero=3, schedule="1f1b", micro_batch=2), 10),
    (Layout(dp=3, pp=2, zero=3, schedule="afab", micro_batch=2), 10),
    (Layout(dp=2, pp=4, zero=2, schedule="1f1b", micro_batch=1), 10),
    (Layout(tp=2, pp=2, schedule="afab", micro_batch=3), 12),
    (Layout(tp=2, pp=2, schedule="1f1b", micro_batch=2), 7),
    (Layout(tp=2, pp=4, schedule="1f1b", micro_batch=2), 10),
    (Layout(dp=2, tp=2, pp=2, schedule="1f1b", micro_batch=2), 10),
    (Layout(dp=2, tp=2, pp=2, schedule="afab", micro_batch=2), 7),
    (Layout(dp=2, tp=2, pp=2, zero=2, schedule="1f1b", micro_batch=2), 10),
    (Layout(dp=2, tp=2, pp=2, zero=3, schedule="1f1b", micro_batch=2), 7),
    (Layout(dp=2, tp=2, pp=2, zero=3, schedule="afab", micro_batch=3), 12),
    (Layout(cp=2, micro_batch=6), 12),
    (Layout(cp=2, micro_batch=6, context="all-gather"), 12),
    (Layout(cp=4, micro_batch=4), 7),
    (Layout(cp=4, micro_batch=4, context="all-gather"), 7),
    (Layout(dp=2, cp=2, micro_batch=3), 12),
    (Layout(dp=2, cp=2, zero=2, micro_batch=2), 7),
    (Layout(cp=2, zero=3, micro_batch=3), 12),
    (Layout(dp=2, cp=4, zero=3, micro_batch=2, context="all-gather"), 7),
    (Layout(tp=2, cp=2, micro_batch=3), 12),
    (Layout(tp=2, cp=4, micro_batch=4, context="all-gather"), 10),
    (Layout(pp=2, cp=2, schedule="1f1b", micro_batch=3), 10),
    (Layout(tp=2, pp=2, cp=2, schedule="afab", micro_batch=3), 12),
    (Layout(dp=2, pp=2, cp=2, zero=2, schedule="1f1b", micro_batch=2, context="all-gather"), 10),
    (Layout(dp=2, tp=2, cp=2, zero=3, micro_batch=2), 7),
]
# fmt: on
WIDE = ModelConfig(**{**MODEL.model_dump(), "kv_heads": 4})  # heads that four tp ranks divide
TIED = ModelConfig(**{**MODEL.model_dump(), "tie_embeddings": True})
OTHER_MODELS = [
    (Layout(tp=4, micro_batch=4), 12, WIDE),
    (Layout(dp=2, tp=4, zero=3, micro_batch=2), 7, WIDE),
    (Layout(tp=4, pp=2, micro_batch=3), 12, WIDE),
    (Layout(dp=2, micro_batch=3), 12, TIED),
    (Layout(tp=2, micro_batch=4), 12, TIED),
    (Layout(dp=2, zero=3, micro_batch=2), 7, TIED),
    (Layout(dp=2, tp=2, zero=2, micro_batch=2), 7, TIED),
]


@functools.cache
def reference(optimizer: str, global_batch: int, model: ModelConfig = MODEL) -> Result:
    """The same job in this process, one micro-batch of the whole global batch."""
    job = make_job(optimizer, global_batch, model)
    return train(job, Layout(micro_batch=global_batch), 0, None)


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative difference in the Euclidean norm."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def worst(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    assert found.keys() == expected.keys()
    return max((distance(found[name], expected[name]), name) for name in expected)


def compare(job: JobConfig, layout: Layout, ranks: list[Result]) -> list[str]:
    """Everything in which a layout differs from one process, one line each."""
    expected = reference(job.optimizer.name, job.data.global_batch, job.model)
    wrong = []
    for step in range(STEPS):
        loss = sum(rank.loss[step] for rank in ranks)
        if abs(loss / expected.loss[step] - 1) > TOLERANCE:
            wrong.append(f"loss of step {step + 1}: {loss} instead of {expected.loss[step]}")
        for rank in ranks:
            if abs(rank.norm[step] / expected.norm[step] - 1) > TOLERANCE:
                wrong.append(f"norm of step {step + 1}: {rank.norm[step]} instead of {expected.norm[step]}")
    total = sum(rank.evaluation[0] for rank in ranks)
    if abs(total / expected.evaluation[0] - 1) > TOLERANCE * 10:
        wrong.append(f"evaluation: {total} instead of {expected.evaluation[0]}")
    if sum(rank.evaluation[1] for rank in ranks) != expected.evaluation[1]:
        wrong.append("tokens of the evaluation")
    far, name = worst(assemble([r.gradients for r in ranks]), assemble([expected.gradients]))
    if far > TOLERANCE:
        wrong.append(f"gradient of {name}: off by {far:.3g}")
    far, name = worst(assemble([r.state for r in ranks]), assemble([expected.state]))
    if far > WEIGHTS_TOLERANCE:
        wrong.append(f"{name} after {STEPS} steps: off by {far:.3g}")
    return wrong


def check(pool: Pool, layout: Layout, global_batch: int, model: ModelConfig = MODEL) -> list[Result]:
    """Compare SGD and AdamW with one process; returns the ranks' results of AdamW."""
    jobs = [make_job(optimizer, global_batch, model) for optimizer in ("sgd", "adamw")]
    per_rank = pool.run(layout.world_size, run_layout, jobs, layout)
    for job, ranks in zip(jobs, zip(*per_rank, strict=True), strict=True):
        assert compare(job, layout, list(ranks)) == []
        assert all(rank.stable for rank in ranks), "state() must stay valid for the engine's whole life"
    return [results[-1] for results in per_rank]


@pytest.mark.parametrize(("layout", "global_batch"), LAYOUTS, ids=str)
def test_layout_equals_one_process(pool: Pool, layout: Layout, global_batch: int) -> None:
    ranks = check(pool, layout, global_batch)
    primaries(layout, ranks)
    said = " ".join(ranks[0].applied)
    assert ("pipeline" in said, "tensor" in said) == (layout.pp > 1, layout.tp > 1)
    assert ("FSDP2" in said) == (layout.zero > 0 and layout.replicas > 1)
    assert (f"context parallel over {layout.cp}, {layout.context}" in said) == (layout.cp > 1)


def primaries(layout: Layout, ranks: list[Result]) -> None:
    """Exactly one state group is primary for each box, and replicas of a group hold the same boxes."""
    owners: dict[tuple[object, ...], set[int]] = {}
    held: dict[int, list[object]] = {}
    for rank, result in enumerate(ranks):
        group = layout.state_group(rank)
        boxes = [piece[:5] for piece in result.state]
        assert held.setdefault(group, boxes) == boxes
        for name, _, offset, size, primary, _ in result.state:
            owners.setdefault((name, offset, size), set()).update([group] if primary else [])
    assert all(len(groups) == 1 for groups in owners.values())
    assert {name for name, _, _ in owners if "/" not in name} == {
        spec.name for spec in parameter_table(MODEL)
    }


@pytest.mark.parametrize(
    ("layout", "global_batch", "model"),
    OTHER_MODELS,
    ids=[f"{layout}-kv{model.kv_heads}-tied{model.tie_embeddings}" for layout, _, model in OTHER_MODELS],
)
def test_other_models(pool: Pool, layout: Layout, global_batch: int, model: ModelConfig) -> None:
    check(pool, layout, global_batch, model)


PLANTS = {
    "dp": Layout(dp=2, micro_batch=3),
    "tp-partial": Layout(tp=2, micro_batch=6),
    "fsdp": Layout(dp=2, zero=3, micro_batch=3),
    "norm": Layout(dp=2, tp=2, zero=2, micro_batch=3),
    "vocab": Layout(tp=2, micro_batch=6),
    "pipeline": Layout(pp=2, micro_batch=3),
    "ring": Layout(cp=2, micro_batch=6),
    "gathered": Layout(cp=2, micro_batch=6, context="all-gather"),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_doubled_reduction_is_noticed(pool: Pool, plant: str) -> None:
    layout = PLANTS[plant]
    job = make_job("adamw", 12)
    per_rank = pool.run(layout.world_size, run_layout, [job], layout, plant)
    wrong = compare(job, layout, [results[0] for results in per_rank])
    assert wrong, f"doubling {plant} went unnoticed"
    if plant not in ("norm", "vocab"):
        assert any("gradient" in line for line in wrong), wrong


def test_rows_that_fill_change_nothing(pool: Pool) -> None:
    """A replica with fill rows only, and the phases that a step goes through."""
    layout = Layout(dp=8, micro_batch=1)
    ranks = [results[0] for results in pool.run(8, run_layout, [make_job("sgd", 7)], layout)]
    assert ranks[7].loss == [0.0] * STEPS
    assert ranks[0].phases == ["forward", "backward", "reduce", "clip"] * STEPS


def test_the_same_layout_repeats_bit_by_bit(pool: Pool) -> None:
    """What happened in the processes in between leaves no trace in a later generation."""
    job = make_job("adamw", 10)
    for layout in (Layout(dp=3, micro_batch=2), Layout(dp=2, tp=2, zero=3, micro_batch=2)):
        runs = []
        for between in (Layout(dp=2, pp=2, zero=2, micro_batch=2), Layout(tp=2, pp=2, micro_batch=2)):
            runs.append([results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)])
            pool.run(between.world_size, run_layout, [job], between)
        first, second = runs
        assert [rank.loss for rank in first] == [rank.loss for rank in second]
        for a, b in zip(first, second, strict=True):
            assert all(np.array_equal(x[-1], y[-1]) for x, y in zip(a.state, b.state, strict=True))


@pytest.mark.parametrize(
    "layout", [Layout(dp=2, tp=2, pp=2, zero=3, micro_batch=2), Layout(tp=2, micro_batch=3)], ids=str
)
def test_bf16_is_close_to_fp64_at_every_layout(pool: Pool, layout: Layout) -> None:
    job = make_job("adamw", 12, precision="bf16")
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    expected = reference("adamw", 12)
    for step in range(STEPS):
        assert sum(rank.loss[step] for rank in ranks) == pytest.approx(expected.loss[step], rel=0.03)
    assert {values.dtype for rank in ranks for *_, values in rank.state} == {np.dtype("float32")}
