"""Mixtures of experts: every layout against one process, and what balancing promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig, MoeConfig
from picotron_ray.config.support.kernels import groups_experts
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.layout.layout import Layout
from picotron_ray.models.layers.expert_counts import Counts
from picotron_ray.models.layers.experts import ExpertStacks, grouped, looped
from picotron_ray.models.layers.moe import MixtureOfExperts, Router
from picotron_ray.models.layers.pointwise import silu_gate
from picotron_ray.train.engine import build_engine
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    CPU,
    MIXTURE,
    MODEL,
    STEPS,
    batch,
    make_job,
    run_layout,
)
from tests.support.gloo.parity import check, compare, primaries, thinned
from tests.support.gloo.pool import Pool


def moe(**options: Any) -> ModelConfig:
    given = {"experts": 4, "intermediate_size": 12, **options}
    return ModelConfig(**{**MODEL.model_dump(), "moe": given})


ALIGNED = moe(intermediate_size=16)  # a grouped product wants rows of 16 bytes, on each tp rank
TIGHT = moe(capacity_factor=0.75, loss_coefficient=0.5, normalize=False)
# fmt: off
LAYOUTS = [  # what pairs of dimensions on four processes leave out (test_matrix)
    (moe(experts=3), Layout(dp=2, zero=3, micro_batch=3), 10),  # ZeRO cuts within the experts
    (moe(experts=3), Layout(dp=2, cp=2, tp=2, zero=2, micro_batch=3), 10),
    (MIXTURE, Layout(dp=8, ep=4, zero=3, micro_batch=1), 7),    # one replica has nothing but fill rows
    (MIXTURE, Layout(dp=2, cp=2, tp=2, ep=2, zero=2, micro_batch=3), 10),
    (MIXTURE, Layout(dp=2, tp=2, pp=2, ep=2, schedule="1f1b", micro_batch=2), 10),
    (TIGHT, Layout(cp=4, ep=2, zero=3, micro_batch=4), 7),
    (TIGHT, Layout(tp=2, cp=2, ep=2, micro_batch=3), 12),
]
# fmt: on


@pytest.mark.parametrize(
    ("model", "layout", "global_batch"), thinned(LAYOUTS, (0,), lambda _, layout, __: str(layout))
)
def test_layout_equals_one_process(pool: Pool, model: ModelConfig, layout: Layout, global_batch: int) -> None:
    ranks = check(pool, layout, global_batch, model)
    primaries(layout, ranks, model)


PADDED, CHUNKED = {"expert_exchange": "padded"}, {"expert_chunks": 2}
EXCHANGES = [
    ({**PADDED, **CHUNKED}, TIGHT, Layout(dp=2, ep=2, micro_batch=3), 10),
    (PADDED, MIXTURE, Layout(dp=2, tp=2, pp=2, ep=2, schedule="1f1b", micro_batch=2), 10),
    (CHUNKED, TIGHT, Layout(dp=2, cp=2, tp=2, ep=2, zero=3, micro_batch=3), 10),
    ({**PADDED, **CHUNKED}, TIGHT, Layout(cp=4, ep=2, zero=3, micro_batch=4), 7),
    ({**PADDED, **CHUNKED}, MIXTURE, Layout(dp=2, ep=2, zero=2, micro_batch=3, recompute="full"), 10),
    (CHUNKED, MIXTURE, Layout(dp=2, pp=2, ep=2, schedule="zbv", virtual_stages=2, micro_batch=1), 10),
]


@pytest.mark.parametrize(
    ("kernels", "model", "layout", "global_batch"),
    thinned(EXCHANGES, (0,), lambda kernels, _, layout, __: f"{layout}-{'-'.join(kernels)}"),
)
def test_rows_may_travel_padded_and_in_chunks(
    pool: Pool, kernels: dict[str, Any], model: ModelConfig, layout: Layout, global_batch: int
) -> None:
    job = make_job("adamw", global_batch, model, kernels=KernelsConfig(**kernels))
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    assert compare(job, layout, ranks) == []
    how, chunks = kernels.get("expert_exchange", "exact"), kernels.get("expert_chunks", 1)
    (said,) = [words for words in ranks[0].applied if words.startswith("expert parallel")]
    assert f"modules, {how}" in said
    assert f" in {chunks} chunk" in said


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [0, 9, 0, 0]], ids=str)
def test_grouped_products_equal_one_expert_after_the_other(counts: list[int]) -> None:
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), 16, requires_grad=True)
    weights = [torch.randn(4, *shape, requires_grad=True) for shape in ((8, 16), (8, 16), (16, 8))]
    found, slopes = [], []
    for compute in (looped, grouped):
        out = compute(rows, Counts(torch.tensor(counts), 0), ExpertStacks(*weights), silu_gate)
        found.append(out)
        slopes.append(torch.autograd.grad(out.square().sum(), (rows, *weights)))
    torch.testing.assert_close(found[0], found[1])
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_rows_that_are_nobodys_are_zero_where_8_bits_would_scale_them_with_others() -> None:
    rows, counts = torch.randn(9, 16, requires_grad=True), Counts(torch.tensor([3, 0, 2, 1]), 0)
    weights = [torch.randn(4, *shape, requires_grad=True) for shape in ((8, 16), (8, 16), (16, 8))]
    for compute in (grouped, looped):
        out = compute(rows, counts, ExpertStacks(*weights), silu_gate)
        assert not out[6:].any()
        (gradient,) = torch.autograd.grad(out.square().sum(), rows)
        assert gradient[:6].all(dim=-1).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("hidden", "inner"), [(16, 30), (16, 12), (16, 16), (16, 8), (12, 16), (14, 16)])
def test_what_no_grouped_product_takes_is_known(precision: str, tp: int, hidden: int, inner: int) -> None:
    """The rule, by what torch does with such widths; auto groups where it may, and only there."""
    model = ModelConfig(
        **{**ALIGNED.model_dump(), "hidden_size": hidden, "heads": 2, "kv_heads": 2}
        | {"moe": {"experts": 4, "intermediate_size": inner}}
    )
    job = make_job("sgd", 4, model, precision=precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    rows, local = torch.randn(9, hidden, dtype=dtype, requires_grad=True), inner // tp
    shapes = ((local, hidden), (local, hidden), (hidden, local))
    weights = [torch.randn(4, *shape, dtype=dtype, requires_grad=True) for shape in shapes]
    try:
        here = Counts(torch.tensor([3, 0, 5, 1]), 0)
        grouped(rows, here, ExpertStacks(*weights), silu_gate).square().sum().backward()
        said = ""
    except RuntimeError as error:
        said = str(error)
    taken = not said
    assert taken or "multiple of 16 bytes" in said
    assert groups_experts(job, "cuda", tp) is taken
    assert not groups_experts(job, "cpu", tp)
    asked = make_job("sgd", 4, model, precision=precision, kernels=KernelsConfig(experts="grouped"))
    found = [problem.key for problem in layout_problems(asked, Layout(tp=tp))]
    assert found == ([] if taken else ["kernels.experts"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_grouped_experts_train_as_looped_ones_do(pool: Pool, precision: str) -> None:
    """Under expert and tensor parallelism and ZeRO; in fp32 but for the order of sums."""
    layout, losses = Layout(dp=2, tp=2, ep=2, zero=3, micro_batch=6), []
    for kind in ("loop", "grouped"):
        job = make_job("adamw", 12, ALIGNED, precision=precision, kernels=KernelsConfig(experts=kind))
        ranks = [results[0] for results in pool.run(4, run_layout, [job], layout)]
        assert ("grouped experts" in ranks[0].applied) is (kind == "grouped")
        losses.append([sum(rank.loss[step] for rank in ranks) for step in range(STEPS)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if precision == "fp32" else 2e-2)


PLANTS = {
    "edp": Layout(dp=4, ep=2, micro_batch=2),
    "dispatch": Layout(dp=2, ep=2, micro_batch=3),
    "auxiliary": Layout(dp=2, ep=2, micro_batch=3),
    "load": Layout(cp=2, ep=2, micro_batch=6),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_noticed(pool: Pool, plant: str) -> None:
    layout = PLANTS[plant]
    job = make_job("adamw", 12, MIXTURE)
    per_rank = pool.run(layout.world_size, run_layout, [job], layout, plant)
    wrong = compare(job, layout, [results[0] for results in per_rank])
    assert any("gradient" in line for line in wrong), f"{plant} went unnoticed: {wrong}"


def imbalance(model: ModelConfig, steps: int) -> list[float]:
    """Per step the most used expert's load / the mean, the worst of all layers."""
    job = make_job("sgd", 12, model)
    layout = Layout(micro_batch=12)
    engine = build_engine(job, layout, 0, None, CPU)
    engine.initialise(job.seed)
    found = []
    for step in range(1, steps + 1):
        engine.forward_backward(batch(job, layout, 0, step))
        engine.reduce()
        engine.clip()
        engine.optimizer_step(0.05)
        found.append(float(engine.expert_load().imbalance))
    engine.close()
    return found


@pytest.mark.parametrize("kind", ["loss", "bias"])
def test_balancing_evens_the_load(kind: str) -> None:
    """Against the same training without it, over the last steps of 60."""
    on = {"loss": {"loss_coefficient": 1.0}, "bias": {"bias_rate": 0.02}}[kind]
    router = "softmax" if kind == "loss" else "sigmoid"
    balanced = imbalance(moe(experts=8, router=router, balance=kind, **on), 60)
    free = imbalance(moe(experts=8, router=router, balance="none"), 60)
    assert balanced[0] == free[0]
    excess = [np.mean(run[-20:]) - 1 for run in (balanced, free)]
    assert excess[0] < 0.6 * excess[1], excess


def router_of(config: MoeConfig, hidden: int = 6) -> Router:
    router = Router(config, hidden).double()
    torch.manual_seed(0)
    torch.nn.init.normal_(router.weight)
    return router


def test_only_the_excess_is_dropped_and_counted() -> None:
    """Two experts, one each: the first takes what fits of every row, in the order of tokens."""
    router = router_of(MoeConfig(experts=2, top_k=1, capacity_factor=0.5, balance="none"))
    x = torch.zeros(2, 8, 6, dtype=torch.float64)
    x[:, :, 0] = 1.0
    with torch.no_grad():
        router.weight.zero_()
        router.weight[0, 0] = 1.0
    routing = router(x, torch.tensor([1.0, 0.0]))
    assert routing.kept[0, :, 0].tolist() == [True] * 2 + [False] * 6
    assert not routing.kept[1].any(), "rows of weight 0 go nowhere"
    assert router.load is not None
    assert router.load.tolist() == [8.0, 0.0, 6.0]
    assert (routing.gates[0, 2:] == 0).all()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("balance", "even", "z"), [("loss", 0.5, 0.0), ("loss", 0.5, 0.25), ("none", 0.5, 0.25)]
)
def test_the_auxiliary_loss_is_the_formula_written_out(
    scores: Any, balance: Any, even: float, z: float
) -> None:
    """Over the tokens of rows that weigh something; every expert's share times what it was likely to get."""
    router = router_of(
        MoeConfig(experts=3, top_k=2, router=scores, balance=balance, loss_coefficient=even, z_coefficient=z)
    )
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    found = router(x, torch.tensor([1.0, 0.0, 0.5])).loss
    expected = torch.zeros((), dtype=torch.float64)
    for row in (0, 2):
        logits = [router.weight @ token for token in x[row]]
        given = [logit.softmax(0) if scores == "softmax" else logit.sigmoid() for logit in logits]
        chosen = [set(score.topk(2).indices.tolist()) for score in given]
        for e in range(3) if balance == "loss" else ():
            share = 3 * sum(e in ids for ids in chosen) / (4 * 2)
            expected = expected + even * share * sum(score[e] / score.sum() for score in given)
        expected = expected + z * sum(logit.exp().sum().log() ** 2 for logit in logits)
    torch.testing.assert_close(found, expected)
    router.shares = 2
    torch.testing.assert_close(router(x, torch.tensor([1.0, 0.0, 0.5])).loss, expected / 2)


def test_steps_without_gradients_have_no_loss_and_are_not_counted() -> None:
    router = router_of(MoeConfig(experts=3, top_k=2))
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    with torch.no_grad():
        assert router(x, None).loss is None
    router.counting = False
    assert router(x, None).loss is not None
    assert router.load is None
    router.counting = True
    for passes in (1, 2):
        router(x, None)
        assert router.load is not None
        assert (router.load[:3].sum(), router.load[3]) == (passes * 2 * 4 * 2, 0)
    assert router_of(MoeConfig(experts=3, top_k=2, balance="none"))(x, None).loss is None


def test_only_a_balance_by_bias_has_one_which_no_gradient_moves() -> None:
    router = Router(MoeConfig(experts=3, balance="bias"), 6)
    assert router.bias is not None
    assert (router.bias.requires_grad, router.weight.requires_grad) == (False, True)
    assert Router(MoeConfig(experts=3), 6).bias is None
    with torch.no_grad():
        router.weight.zero_()
        router.bias.copy_(torch.tensor([0.0, 0.2, 0.1]))
    routing = router(torch.ones(1, 1, 6), None)
    assert routing.experts.tolist() == [[[1, 2]]]
    assert routing.gates.tolist() == [[[0.5, 0.5]]], "the choice alone"


@pytest.mark.parametrize(("factor", "fits"), [(0.25, 1), (0.5, 2), (0.51, 3), (2.0, 8), (9.0, 8)])
def test_as_many_fit_as_the_factor_says(factor: float, fits: int) -> None:
    """Of eight tokens that all want the first of two experts, an even share being four."""
    router = router_of(MoeConfig(experts=2, top_k=1, capacity_factor=factor, balance="none"))
    with torch.no_grad():
        router.weight.zero_()
        router.weight[0, 0] = 1.0
    x = torch.zeros(1, 8, 6, dtype=torch.float64)
    x[:, :, 0] = 1.0
    assert router(x, None).kept.flatten().tolist() == [True] * fits + [False] * (8 - fits)


def test_a_token_is_the_gated_sum_of_its_experts() -> None:
    """Against the formula written out, token by token."""
    config = MoeConfig(experts=4, top_k=2, intermediate_size=5, shared_intermediate_size=3, balance="none")
    torch.manual_seed(1)
    mixture = MixtureOfExperts(config, 6).double()
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    found = mixture(x)

    def swiglu(v: torch.Tensor, gate: Any, up: Any, down: Any) -> torch.Tensor:
        return down @ (torch.nn.functional.silu(gate @ v) * (up @ v))

    experts, shared = mixture.experts, mixture.shared
    assert shared is not None
    for row in range(2):
        for at in range(3):
            token = x[row, at]
            scores = (mixture.router.weight @ token).softmax(0)
            gates, chosen = scores.topk(2)
            expected = swiglu(token, shared.gate.weight, shared.up.weight, shared.down.weight)
            for gate, e in zip(gates / gates.sum(), chosen, strict=True):
                expected = expected + gate * swiglu(token, experts.gate[e], experts.up[e], experts.down[e])
            torch.testing.assert_close(found[row, at], expected)


def test_steps_are_counted_apart(pool: Pool) -> None:
    """The load of a step is that of its global batch alone, the same at every layout."""
    layout = Layout(dp=2, ep=2, micro_batch=3)
    per_rank = pool.run(2, loads_of, make_job("sgd", 12, MIXTURE), layout)
    assert per_rank[0] == per_rank[1]
    alone = loads_of(None, make_job("sgd", 12, MIXTURE), Layout(micro_batch=12))
    assert per_rank[0] == alone
    assert len(alone) == STEPS


def loads_of(job: Any, config: Any, layout: Layout) -> list[list[list[float]]]:
    """The experts' loads of every step; ``job`` None: in this process."""
    groups = None if job is None else job.groups()
    if groups is not None:
        groups.connect()
    rank = 0 if job is None else job.rank
    engine = build_engine(config, layout, rank, groups, CPU)
    engine.initialise(config.seed)
    found = []
    for step in range(1, STEPS + 1):
        engine.forward_backward(batch(config, layout, layout.coordinates(rank).dp, step))
        engine.reduce()
        engine.clip()
        engine.optimizer_step(0.05)
        assert engine.expert_balance.per_layer is not None
        found.append(engine.expert_balance.per_layer.tolist())
    engine.close()
    if groups is not None:
        groups.close()
    return found
