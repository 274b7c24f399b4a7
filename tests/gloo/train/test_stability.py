"""Parts that become unstable in low precision rise and fall back; errors of rounding by one backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from picotron_ray.config.schema.compute import AdaptivePrecisionConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.train.engine import Engine, build_engine
from picotron_ray.train.precision.adaptive import AdaptivePrecision
from picotron_ray.train.precision.sensitivity import RoundingErrors
from picotron_ray.train.precision.stability import (
    LEARNING_STEPS,
    GradientFigures,
    StabilityWatch,
    count_elements,
    figures_of,
)
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, MODEL, batch, make_job
from tests.support.gloo.pool import Job, Pool

LOW = frozenset({"a", "b"})


def figures(*norms: float, over: Sequence[float] = (0, 0), gone: Sequence[float] = (0, 0)) -> GradientFigures:
    return GradientFigures(norms, over, gone)


def test_elements_that_a_type_does_not_hold() -> None:
    x = torch.tensor([0.0, 1.0, -7e4, math.inf, math.nan, 1e-5, 3e-8, -6e-5])
    assert count_elements(x, torch.float16, 1.0).tolist() == [3, 3, 6], "normal numbers begin at 6.1e-5"
    assert count_elements(x, torch.float16, 2.0).tolist() == [3, 2, 6], "scaled as the backward pass was"
    assert count_elements(x, torch.bfloat16, 1.0).tolist() == [2, 0, 6]
    found = figures_of([[4.0, 1, 2, 8], [9.0, 0, 0, 0]])
    assert found == GradientFigures([2.0, 3.0], [0.125, 0.0], [0.25, 0.0])
    assert figures_of([[16.0]]) == GradientFigures([4.0], [0.0], [0.0])


@pytest.mark.parametrize(
    "bad",
    [figures(math.nan, 1.0), figures(1.0, 1.0, over=(1e-6, 0)), figures(1.0, 1.0, gone=(0.3, 0))],
    ids=["not finite", "overflows", "vanishes"],
)
def test_an_unstable_part_rises_and_falls_after_calm_steps(bad: GradientFigures) -> None:
    watch = StabilityWatch(["a", "b"], calm_steps=3)
    assert watch.judge(figures(1.0, 1.0), LOW) == ([], [])
    assert watch.judge(bad, LOW) == (["a"], [])
    assert watch.judge(figures(1.0, 1.0), LOW) == ([], [])
    assert watch.judge(bad, LOW) == ([], []), "it is up already, and begins to be calm anew"
    assert [watch.judge(figures(1.0, 1.0), LOW) for _ in range(3)] == [([], []), ([], []), ([], ["a"])]
    assert watch.judge(bad, LOW) == (["a"], [])
    assert StabilityWatch(["a", "b"], 3).judge(bad, {"b"}) == ([], []), "a is in full precision anyway"


def test_a_norm_that_leaves_its_past_is_a_swing() -> None:
    watch = StabilityWatch(["a", "b"], calm_steps=3)
    assert watch.judge(figures(1.0, 1.0), LOW) == ([], [])
    assert watch.judge(figures(9.0, 1.0), LOW) == ([], []), "too early to tell"
    watch = StabilityWatch(["a", "b"], calm_steps=3)
    for step in range(LEARNING_STEPS):
        assert watch.judge(figures(1.0, math.exp((-1) ** step)), LOW) == ([], [])
    assert watch.judge(figures(1.9, 40.0), LOW) == ([], []), "less than twice, and within 5 deviations"
    assert watch.judge(figures(9.0, 40.0), LOW) == (["a"], [])


def test_first_order_errors_are_gradient_times_rounding() -> None:
    """Of two linear layers, by hand."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(16, 16), "second": nn.Linear(16, 1)}).double()
    x = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    errors = RoundingErrors(list(model), torch.bfloat16, CPU)
    with errors.watching(model.named_modules()):
        model["second"](model["first"](x)).square().sum().backward()
    assert not model["first"]._forward_hooks, "hooks go when they have seen what they should"
    between = model["first"](x)
    out = model["second"](between)
    slopes = torch.autograd.grad(out.square().sum(), (x, between, out))
    terms = [(v.bfloat16().double() - v) * slope for v, slope in zip((x, between, out), slopes, strict=True)]
    for at in range(2):
        both = torch.cat([term.flatten() for term in terms[at : at + 2]])
        expected = [both.sum().item(), both.square().sum().item()]
        assert errors.sums[at].tolist() == pytest.approx(expected)
        spec = ParameterSpec("w", (16, 16), 0, "block", None, True, 1.0)
        weight = model[["first", "second"][at]].weight
        held = LocalParameter(spec, Box((0, 0), tuple(weight.shape)), True, True, weight)
        before = errors.sums.clone()
        errors.add_weights([held], [weight.grad], [at])
        term = (weight.bfloat16().double() - weight) * weight.grad
        added = (errors.sums - before)[at].tolist()
        assert added == pytest.approx([term.sum().item(), term.square().sum().item()])
        held.counted = False
        errors.add_weights([held, held], [weight.grad] * 2, [at, -1])
        assert torch.equal((errors.sums - before)[1 - at], torch.zeros(2, dtype=torch.float64))
        assert (errors.sums - before)[at].tolist() == added


class Counting:
    """An engine whose passes are counted."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.forward, self.backward = engine, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def evaluate(self, batches: Any) -> Any:
        self.forward += len(batches)
        return self._engine.evaluate(batches)

    def forward_backward(self, one: Any) -> Any:
        self.backward += 1
        return self._engine.forward_backward(one)


def opened(layout: Layout, rank: int = 0, groups: Any = None, **options: Any) -> Engine:
    config = AdaptivePrecisionConfig(error_bound=0.5, calm_steps=2)
    job = make_job("adamw", 12, MODEL, precision="bf16", adaptive_precision=config, **options)
    engine = build_engine(job, layout, rank, groups, CPU)
    engine.initialise(3)
    return engine


def test_passes_do_not_grow_with_the_number_of_parts() -> None:
    engine = opened(Layout(micro_batch=12))
    counted = Counting(engine)
    feeds = [batch(engine.job, engine.layout, 0, step) for step in (7, 8)]
    policy = engine.adaptation.decide(feeds, counted)
    assert policy is not None
    assert len(policy.sensitivity) == 9
    assert min(policy.sensitivity.values()) > 0.0
    assert (counted.backward, counted.forward) == (2, 2), "of two batches; the choice holds at once"
    engine.close()


def risen(job: Job, layout: Layout) -> list[tuple[dict[str, Any], frozenset[str]]]:
    """Changes of each step, and parts in low precision after it; in the second a gradient is not finite."""
    groups = job.groups()
    groups.connect()
    engine = opened(layout, job.rank, groups)
    found = []
    for step in range(1, 8):
        engine.gradients_of(batch(engine.job, layout, layout.coordinates(job.rank).dp, step))
        if step == 2:
            for gradient in engine.gradients():
                if gradient.shard.name == "layers.1.mlp.up.weight":
                    gradient.tensor.fill_(math.inf)
            engine.adaptation.observe([g.tensor for g in engine.gradients()])
            engine.skip_step()
        else:
            engine.optimizer_step(1e-3)
        assert isinstance(engine.adaptation, AdaptivePrecision)
        low = frozenset(engine.adaptation._switches._low)
        found.append((dict(engine.adaptation.changes()), low))
    engine.close()
    groups.close()
    return found


@pytest.mark.parametrize(
    "layout", [Layout(dp=2, zero=2, micro_batch=6), Layout(pp=2, micro_batch=3)], ids=str
)
def test_all_ranks_raise_and_lower_alike_within_a_generation(pool: Pool, layout: Layout) -> None:
    ranks = pool.run(2, risen, layout)
    assert ranks[0] == ranks[1]
    changes, low = zip(*ranks[0], strict=True)
    assert list(changes) == [{}, {}, {"raised": ["layers.1.mlp"]}, {}, {"lowered": ["layers.1.mlp"]}, {}, {}]
    assert [("layers.1.mlp" in parts) for parts in low] == [True, True, False, False, True, True, True]
