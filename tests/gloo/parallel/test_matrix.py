"""Every layout against the same model in one process, in fp64."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from tests.support.gloo.layouts import CASES, FITTING, LISTED, PAIRS, REFUSED, Case
from tests.support.gloo.parallel_jobs.matrix_jobs import MODEL, STEPS, make_job, run_layout
from tests.support.gloo.parity import check, compare, primaries, reference, thinned
from tests.support.gloo.pool import Pool

# fmt: off
CORNERS = [
    # (layout, global batch): 12 rows divide evenly by most, 7 and 10 leave uneven rows and fill rows
    (Layout(dp=8, micro_batch=1), 7),       # one replica has nothing but fill rows
    (Layout(dp=7, zero=3, micro_batch=1), 10),  # chunks of 16 rows over 7: the last ranks hold less or none
    (Layout(pp=3, schedule="1f1b", micro_batch=2), 10),  # 4 layers over 3 stages
    (Layout(pp=4, schedule="gpipe", micro_batch=5), 7),   # fewer micro-batches than stages
    (Layout(dp=2, tp=2, pp=2, zero=3, schedule="1f1b", micro_batch=2), 7),
    (Layout(dp=2, cp=4, zero=3, micro_batch=2, context="all-gather"), 7),
    (Layout(dp=4, tp=2, zero=1, replicate=2, micro_batch=1), 10),
    (Layout(dp=4, pp=2, zero=3, replicate=2, micro_batch=1), 12),
    (Layout(dp=2, tp=2, micro_batch=3, recompute="selective"), 10),
    (Layout(dp=2, pp=2, zero=3, micro_batch=3, recompute="full"), 12),
]
# fmt: on
WIDE = ModelConfig(**{**MODEL.model_dump(), "kv_heads": 4})  # heads that four tp ranks divide
TIED = ModelConfig(**{**MODEL.model_dump(), "tie_embeddings": True})
ODD = ModelConfig(  # what Mistral, Qwen and Llama 3 add
    **{
        **MODEL.model_dump(),
        "head_dim": 8,
        "qkv_bias": True,
        "qk_norm": True,
        "sliding_window": 5,
        "rope_scaling": {"factor": 4.0, "original_length": 4},
    }
)
YARN = ModelConfig(  # and rows of 8 tokens, twice those of the first training
    **{
        **MODEL.model_dump(),
        "head_dim": 8,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_length": 4, "beta_fast": 2.0},
    }
)
DYNAMIC = ModelConfig(
    **{**MODEL.model_dump(), "rope_scaling": {"type": "dynamic", "factor": 2.0, "original_length": 4}}
)
GPT2 = ModelConfig(**{**WIDE.model_dump(), "family": "gpt2", "max_positions": 10})
GPT2_TIED = ModelConfig(**{**GPT2.model_dump(), "tie_embeddings": True})
KINDS = {
    WIDE: "wide",
    TIED: "tied",
    ODD: "odd",
    GPT2: "gpt2",
    GPT2_TIED: "gpt2-tied",
    YARN: "yarn",
    DYNAMIC: "dynamic",
}
OTHER_MODELS = [
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), 7, ODD),
    (Layout(tp=2, pp=2, micro_batch=3), 12, ODD),
    (Layout(tp=4, micro_batch=4), 12, WIDE),
    (Layout(tp=4, pp=2, micro_batch=3), 12, WIDE),
    (Layout(dp=2, micro_batch=3), 12, TIED),
    (Layout(tp=2, micro_batch=4), 12, TIED),
    (Layout(dp=2, zero=3, micro_batch=2), 7, TIED),
    (Layout(dp=2, tp=2, zero=2, micro_batch=2), 7, TIED),
    (Layout(tp=2, micro_batch=4), 12, GPT2_TIED),
    (Layout(pp=2, micro_batch=3), 12, GPT2),
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), 7, GPT2_TIED),
    (Layout(tp=2, cp=2, micro_batch=4), 12, GPT2_TIED),
    (Layout(cp=2, zero=3, micro_batch=4, recompute="selective"), 12, GPT2),
    (Layout(tp=2, cp=2, micro_batch=4), 12, YARN),
    (Layout(cp=2, micro_batch=4, context="all-gather"), 12, DYNAMIC),
]


def holds(
    pool: Pool, layout: Layout, global_batch: int, model: ModelConfig, actions: tuple[str, ...] = ()
) -> None:
    ranks = check(pool, layout, global_batch, model, actions)
    primaries(layout, ranks, model)
    said = " ".join(ranks[0].applied)
    assert (f"of {layout.stages}, {layout.schedule}" in said) == (layout.pp > 1)
    assert ("tensor" in said) == (layout.tp > 1)
    assert ("FSDP2" in said) == (layout.zero > 0 and layout.replicas > 1)
    assert (f"context parallel over {layout.cp}, {layout.context}" in said) == (layout.cp > 1)
    assert (f"recompute {layout.recompute}: " in said) == (layout.recompute != "none")
    assert (f"expert parallel over {layout.ep}" in said) == bool(model.moe.experts)


@pytest.mark.parametrize("case", thinned([(case,) for case in PAIRS], range(0, len(PAIRS), 2)))
def test_every_pair_of_dimensions(pool: Pool, case: Case) -> None:
    holds(pool, case.layout, case.batch, case.model)


@pytest.mark.parametrize(("layout", "global_batch"), thinned(CORNERS, (1, 3, 4)))
def test_corners(pool: Pool, layout: Layout, global_batch: int) -> None:
    holds(pool, layout, global_batch, MODEL)


@pytest.mark.parity
@pytest.mark.parametrize("case", [*CASES, *LISTED], ids=str)
def test_every_layout(pool: Pool, case: Case) -> None:
    holds(pool, case.layout, case.batch, case.model, case.actions)


@pytest.mark.parity
def test_refusals_are_few_and_have_their_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    """What is refused is refused by a rule that this test knows; the numbers are printed."""
    reasons = {
        "layout.ep": ("a model without experts", "does not divide"),
        "layout.replicate": ("expected a divisor", "ranks per copy"),
        "layout.pp": ("every stage needs a layer", "micro-batches"),
        "layout.zero": ("gradients come out wrong",),
        "layout.cp": ("layout.context=ulysses, which does not divide model.kv_heads",),
        "layout.recompute": ("splits the backward pass", "gathers its experts within"),
    }
    for case, reason in REFUSED:
        key = reason.partition(":")[0]
        assert any(text in reason for text in reasons[key]), f"{case}: {reason}"
    with capsys.disabled():
        print(f"\n{len(FITTING)} layouts fit, {len(CASES)} of them compared; refused:")
        for key, number in Counter(reason.partition(":")[0] for _, reason in REFUSED).items():
            print(f"  {number:5} {key}, as: {next(r for _, r in REFUSED if r.startswith(key))}")


@pytest.mark.parametrize(
    ("layout", "global_batch", "model"),
    thinned(OTHER_MODELS, (0, 6, 8, 10, 13), lambda layout, _, model: f"{layout}-{KINDS[model]}"),
)
def test_other_models(pool: Pool, layout: Layout, global_batch: int, model: ModelConfig) -> None:
    check(pool, layout, global_batch, model)


def test_every_stage_has_its_own_recomputation(pool: Pool) -> None:
    layout = Layout(dp=2, pp=2, micro_batch=2, recompute="blocks-1-1,none")
    ranks = check(pool, layout, 8, MODEL)
    first, last = (" ".join(ranks[rank].applied) for rank in (0, 2))
    assert "blocks-1-1,none: 2 of " in first
    assert "blocks-1-1,none: 0 of " in last


PLANTS = {
    "dp": Layout(dp=2, micro_batch=3),
    "tp-partial": Layout(tp=2, micro_batch=6),
    "fsdp": Layout(dp=2, zero=3, micro_batch=3),
    "copies": Layout(dp=4, zero=2, replicate=2, micro_batch=1),
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
