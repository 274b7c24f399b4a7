"""Reducers in training: exact ones equal one process in fp64 at every layout; compressed ones owe a state."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from picotron_ray.checkpoint.torch_state import ERROR_FEEDBACK
from picotron_ray.config.schema.comm import COMPRESSED, CommConfig
from picotron_ray.layout.layout import Layout
from tests.support.gloo.parallel_jobs.matrix_jobs import MIXTURE, MODEL, assemble, make_job, run_layout
from tests.support.gloo.parallel_jobs.reducer_jobs import owed
from tests.support.gloo.parity import compare, thinned
from tests.support.gloo.pool import Pool

SMALL = {"bucket_mib": 0.016}  # several buckets
PLANS: dict[str, dict[str, Any]] = {
    "flat": {"gradients": "flat"},
    "bucketed": {"gradients": "bucketed", **SMALL},
    "overlapped": {"gradients": "overlapped", "overlap_ratio": 0.5, **SMALL},
    "reduce-scatter": {"gradients": "reduce-scatter", **SMALL},
    "hierarchical": {"gradients": "hierarchical", "inner_ranks": 2, **SMALL},
    "ring": {"topology": "ring", **SMALL},
    "tree": {"topology": "tree"},
    "mesh": {"topology": "mesh", "gradients": "flat"},
    "hierarchical-tree": {"gradients": "hierarchical", "topology": "tree", "inner_ranks": 2, **SMALL},
    "hierarchical-mesh": {"gradients": "hierarchical", "topology": "mesh", "inner_ranks": 2, **SMALL},
}
LAYOUTS = {
    "dp4": Layout(dp=4, micro_batch=2),
    "dp3": Layout(dp=3, micro_batch=2),
    "dp2-tp2": Layout(dp=2, tp=2, micro_batch=3),
    "dp2-pp2": Layout(dp=2, pp=2, micro_batch=3),
    "dp2-cp2": Layout(dp=2, cp=2, micro_batch=3),
    "dp2-tp2-pp2": Layout(dp=2, tp=2, pp=2, micro_batch=3),
    "dp2-ep2-cp2": Layout(dp=2, cp=2, ep=2, micro_batch=3),
}
BY_DEFAULT = {
    ("flat", "dp2-tp2"), ("bucketed", "dp3"), ("overlapped", "dp2-pp2"), ("reduce-scatter", "dp2-cp2"),
    ("hierarchical", "dp4"), ("ring", "dp2-pp2"), ("tree", "dp3"), ("mesh", "dp2-tp2"),
}  # fmt: skip
CUT_LAYOUTS = {
    "dp4": Layout(dp=4, micro_batch=2),
    "dp2-tp2": Layout(dp=2, tp=2, micro_batch=3),
    "dp2-pp2": Layout(dp=2, pp=2, micro_batch=3),
    "dp2-cp2": Layout(dp=2, cp=2, micro_batch=3),
    "dp4-ep2": Layout(dp=4, ep=2, micro_batch=3),
}
TWO_LEVELS = {
    "dp4": Layout(dp=4, replicate=2, zero=1, micro_batch=1),
    "dp4-tp2": Layout(dp=4, tp=2, replicate=2, zero=1, micro_batch=3),
    "dp2-cp2": Layout(dp=2, cp=2, replicate=2, zero=1, micro_batch=3),
}
SHARDED = {
    f"{name}-zero{zero}-{at}": ({"gradients": name}, replace(layout, zero=zero))
    for zero in (1, 2, 3)
    for name, layouts in (
        ("overlapped", CUT_LAYOUTS),
        ("reduce-scatter", CUT_LAYOUTS),
        ("hierarchical", TWO_LEVELS),
    )
    for at, layout in layouts.items()
}
"""Exact sums under ZeRO, which FSDP2 makes, at each of its stages."""


CHOSEN: dict[str, tuple[dict[str, Any], Layout]] = {
    "weights by a mesh": ({"parameters": "mesh"}, Layout(dp=4, zero=3, micro_batch=3)),
    "weights in two levels": (
        {"parameters": "hierarchical", "inner_ranks": 2, "gradients": "reduce-scatter"},
        Layout(dp=4, zero=1, micro_batch=2),
    ),
    "activations by a ring": ({"activations": "ring"}, Layout(dp=2, tp=2, micro_batch=3)),
    "activations in two levels": (
        {"activations": "hierarchical", "inner_ranks": 2},
        Layout(tp=4, micro_batch=6),
    ),
    "rows in pairs": ({"experts": "pairwise"}, Layout(dp=4, ep=4, micro_batch=3)),
    "rows in two levels": ({"experts": "hierarchical", "inner_ranks": 2}, Layout(dp=4, ep=4, micro_batch=3)),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_gathers_and_exchanges_equal_one_process(pool: Pool, name: str) -> None:
    asked, layout = CHOSEN[name]
    model = MIXTURE if layout.ep > 1 else MODEL
    if layout.tp == 4:
        model = MODEL.model_copy(update={"heads": 4, "kv_heads": 4})
    job = make_job("sgd", 12, model, comm=CommConfig(**asked))
    per_rank = pool.run(layout.world_size, run_layout, [job], layout)
    assert compare(job, layout, [results[0] for results in per_rank]) == []
    (thing,) = set(asked) & {"parameters", "activations", "experts"}
    said = f"{thing} {asked[thing]}" + (" in neighbourhoods of 2" if "inner_ranks" in asked else "")
    assert said in per_rank[0][0].applied


GATHERS = {True: ("flat", "ring", "mesh", "hierarchical"), False: ("auto",)}
"""By whether there is anything to gather."""


def drawn(count: int) -> list[Any]:
    """Layouts of two to four ranks, each with ways for all that travels there; the first three by default."""
    source, found = random.Random(13), list[Any]()
    while len(found) < count:
        tp, pp, cp, dp = (source.choice((1, 2)) for _ in range(4))
        if not 2 <= tp * pp * cp * dp <= 4:
            continue
        dp = source.choice((dp, dp + 1)) if tp * pp * cp == 1 else dp
        ep = source.choice((1, 2)) if pp == 1 and dp * cp % 2 == 0 else 1
        zero = source.choice((0, 0, 1, 2, 3)) if dp * cp > 1 else 0
        context = source.choice(("ring", "all-gather"))
        layout = Layout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero, micro_batch=3, context=context)
        asked: dict[str, Any] = {"inner_ranks": 2, **SMALL, "activations": source.choice(GATHERS[tp > 1])}
        if zero:
            asked |= {"parameters": source.choice(GATHERS[True])}
        elif dp * cp > 1:
            plan = PLANS[
                source.choice([plan for plan in PLANS if plan != "hierarchical" or dp * cp % 2 == 0])
            ]
            asked |= plan | ({"selector": True} if plan == PLANS["flat"] else {})
        if ep > 1:
            asked |= {"experts": source.choice(("flat", "pairwise", "hierarchical"))}
        if "hierarchical" not in asked.values():
            del asked["inner_ranks"]
        asked |= {"gradients": "auto"} if asked.get("selector") else {}
        marks = () if len(found) < 3 else pytest.mark.parity
        found.append(pytest.param(layout, asked, marks=marks, id=f"{len(found)}-{layout}"))
    return found


@pytest.mark.parametrize(("layout", "asked"), drawn(60))
def test_any_ways_at_any_layout_equal_one_process(pool: Pool, layout: Layout, asked: dict[str, Any]) -> None:
    job = make_job("sgd", 12, MIXTURE if layout.ep > 1 else MODEL, comm=CommConfig(**asked))
    per_rank = pool.run(layout.world_size, run_layout, [job], layout)
    assert compare(job, layout, [results[0] for results in per_rank]) == []


CUT = (Layout(dp=2, tp=2, micro_batch=3), Layout(dp=2, pp=2, micro_batch=3))


def cases() -> list[Any]:
    found = []
    for plan, asked in PLANS.items():
        for name, layout in LAYOUTS.items():
            if layout.replicas % asked.get("inner_ranks", 1) == 0:
                marks = () if (plan, name) in BY_DEFAULT else pytest.mark.parity
                found.append(pytest.param(asked, layout, marks=marks, id=f"{plan}-{name}"))
    for name, (asked, layout) in SHARDED.items():
        marks = () if name == "hierarchical-zero2-dp4" else pytest.mark.parity
        found.append(pytest.param(asked, layout, marks=marks, id=name))
    return found


@pytest.mark.parametrize(("asked", "layout"), cases())
def test_exact_sums_equal_one_process(pool: Pool, asked: dict[str, Any], layout: Layout) -> None:
    model = MIXTURE if layout.ep > 1 else MODEL
    job = make_job("sgd", 12, model, comm=CommConfig(**asked))
    per_rank = pool.run(layout.world_size, run_layout, [job], layout)
    assert compare(job, layout, [results[0] for results in per_rank]) == []
    said = " ".join(per_rank[0][0].applied)
    assert (f"gradients {job.comm.gradients}" in said) == (not layout.zero)


@pytest.mark.parametrize(
    ("asked", "layout", "said"),
    [
        ({"gradients": "overlapped", **SMALL}, Layout(dp=2, micro_batch=6), "5 buckets, 5 of them beside"),
        ({"overlap_ratio": 0.4, **SMALL}, Layout(dp=2, micro_batch=6), "5 buckets, 2 of them beside"),
        ({"gradients": "bucketed", **SMALL}, Layout(dp=2, micro_batch=6), "5 buckets, 0 of them beside"),
        ({"gradients": "flat", **SMALL}, Layout(dp=2, micro_batch=6), "1 buckets, 0 of them beside"),
        (
            {"gradients": "hierarchical", **SMALL},
            Layout(dp=4, micro_batch=3),
            "of 4: 5 buckets, 5 of them beside",
        ),
        (
            {"gradients": "hierarchical", "inner_ranks": 2, **SMALL},
            Layout(dp=4, micro_batch=3),
            "of 2: 5 buckets, 0 of them beside",
        ),
    ],
)
def test_what_is_applied_is_said(pool: Pool, asked: dict[str, Any], layout: Layout, said: str) -> None:
    job = make_job("sgd", 12, comm=CommConfig(**asked))
    _, _, applied = pool.run(layout.world_size, owed, job, layout, 1)[0]
    assert said in " ".join(applied)


@pytest.mark.parametrize(
    ("gradients", "layout"),
    thinned([(name, layout) for name in COMPRESSED for layout in CUT], (0, 3, 4)),
)
def test_error_feedback_is_state_in_the_boxes_of_its_parameters(
    pool: Pool, gradients: str, layout: Layout
) -> None:
    """After agreement replicas hold the same bits (`assemble` asserts it), and layouts the same names."""
    job = make_job("adamw", 12, precision="fp32", comm=CommConfig(gradients=gradients, **SMALL))
    ranks = pool.run(4, owed, job, layout, 3)
    state = assemble([pieces for pieces, _, _ in ranks])
    kept = {name.partition("/")[2] for name in state if name.startswith(ERROR_FEEDBACK)}
    matrices = {name for name in state if "/" not in name and state[name].ndim > 1}
    assert kept == matrices
    assert all(np.abs(state[f"{ERROR_FEEDBACK}/{name}"]).max() > 0 for name in kept)
    assert f"gradients {gradients} of " in " ".join(ranks[0][2])


def test_off_unless_asked(pool: Pool) -> None:
    pieces, _, applied = pool.run(2, owed, make_job("sgd", 12), Layout(dp=2, micro_batch=6), 1)[0]
    assert not any(ERROR_FEEDBACK in piece[0] for piece in pieces)
    assert "buckets" not in " ".join(applied)
