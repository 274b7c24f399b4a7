"""Adaptive precision: the bound holds, the sensitive part is the one kept in full, all ranks decide alike."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from picotron_ray.config.schema.compute import AdaptivePrecisionConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box
from picotron_ray.models.families.registry import parameter_table
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.train.engine import Engine, build_engine
from picotron_ray.train.precision import adaptive
from picotron_ray.train.precision.adaptive import PrecisionPolicy, choose, choose_adaptation, parts_of
from picotron_ray.train.precision.gradient_variability import MEMORY_STEPS, GradientVariability
from picotron_ray.train.precision.loss_scaler import NoScaling
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, MIXTURE, MODEL, batch, make_job
from tests.support.gloo.pool import Job, Pool

SMALL = ModelConfig(**{**MODEL.model_dump(), "layers": 2})
PARTS = {"a": 10, "b": 10, "c": 20}


def synthetic(errors: dict[str, float], together: float = 1.0) -> Any:
    """Errors of a model's parts, alone and of several: together by ``together`` times their sum."""

    def error_of(low: frozenset[str]) -> float:
        return sum(errors[part] for part in low) * (together if len(low) > 1 else 1.0)

    return errors, error_of


def test_least_error_per_parameter_first() -> None:
    errors = {"a": 0.004, "b": 0.001, "c": 0.006}
    policy = choose(PARTS, *synthetic(errors), 0.008)
    assert policy.low == {"b", "c"}, "c has twice the parameters of a for less than twice its error"
    assert policy.error == pytest.approx(0.007)
    assert policy.sensitivity == pytest.approx(errors)
    assert choose(PARTS, *synthetic(errors), 0.0005).low == frozenset()
    assert choose(PARTS, *synthetic(errors), 0.02).low == set(PARTS)


def test_what_is_worse_together_is_taken_back() -> None:
    policy = choose(PARTS, *synthetic({"a": 0.004, "b": 0.001, "c": 0.006}, together=3.0), 0.02)
    assert policy.low == {"a", "b"}
    assert policy.error == pytest.approx(0.015)


def test_an_error_of_just_the_bound_is_allowed() -> None:
    """Halves and quarters, which no rounding moves."""
    quarters = {"a": 0.25, "b": 0.25}
    assert choose({"a": 1, "b": 1}, *synthetic(quarters), 0.5).low == {"a", "b"}
    assert choose({"a": 1}, *synthetic(quarters), 0.25).low == {"a"}
    assert choose({"a": 1}, *synthetic(quarters), 0.2499).low == frozenset()
    none = choose({"a": 1}, {"a": 0.0}, lambda low: 0.0, 0.25)
    assert (none.low, none.error) == ({"a"}, 0.0)
    errors = {"a": 0.25, "b": 0.5, "c": 9.0}
    assert adaptive._margin(["a", "b"], errors, {"a": 0.5, "b": 2.0, "c": 9.0}) == 2.5 / 0.75
    assert adaptive._margin(["a"], {"a": 0.0}, {"a": 0.0}) == 1.0


def test_a_step_counts_the_norms_that_were_seen_last() -> None:
    spec = ParameterSpec("a.weight", (2,), 0, "block", None, True, 1.0)
    local = LocalParameter(spec, Box((0,), (2,)), True, True, torch.nn.Parameter(torch.zeros(2)))
    variability = GradientVariability()
    switches: Any = SimpleNamespace(set=lambda low: positions.append(sorted(low)))
    positions: list[list[str]] = []
    found = choose_adaptation(
        job_of(0.1), {"a": 2}, switches, [local], Layout(), CPU, variability, NoScaling()
    )
    for size in (1.0, 8.0):
        found.observe([size * torch.tensor([0.6, 0.8])])
        assert variability.steps == 0, "not before the weights have moved"
        found.step()
    assert variability.steps == 1, "numbers are read a step late"
    found.observe([torch.full((2,), torch.nan)])
    found.step(moved=False)
    found.observe([torch.ones(2)])
    found.step()
    assert variability.steps == 2, "a step that was left out counts for nothing"
    assert positions == [[]], "but its part rises"
    assert found.changes() == {"raised": ["a"]}
    assert found.changes() == {}
    expected = GradientVariability()
    for norm in (1.0, 8.0):
        expected.observe([norm])
    assert variability.margins(1) == pytest.approx(expected.margins(1))
    assert variability.margins(1)[0] > 2.0


def test_nothing_that_is_no_number_is_let_down() -> None:
    policy = choose({"a": 1}, *synthetic({"a": float("nan")}), 0.5)
    assert (policy.low, policy.error) == (frozenset(), 0.0)


def test_parts_are_attentions_hidden_layers_and_the_head() -> None:
    names = {f"layers.{layer}.{part}" for layer in (0, 1) for part in ("attention", "mlp")}
    assert set(parts_of(parameter_table(SMALL))) == {*names, "head"}
    assert sum(parts_of(parameter_table(SMALL)).values()) == sum(
        spec.numel for spec in parameter_table(SMALL) if len(spec.shape) > 1 and spec.name != "embed.weight"
    )


def test_a_part_within_another_is_none_of_its_own() -> None:
    """Its switch would say nothing while the other is in full precision."""
    parts = parts_of(parameter_table(MIXTURE))
    assert not [part for part in parts for other in parts if part.startswith(f"{other}.")]
    assert sum(parts.values()) == sum(
        spec.numel for spec in parameter_table(MIXTURE) if len(spec.shape) > 1 and not spec.embedding
    )


def test_what_has_swung_in_training_counts_for_more() -> None:
    known, margins = synthetic({"a": 0.004, "b": 0.001, "c": 0.006}), {"a": 1.0, "b": 1.0, "c": 1.5}
    assert choose(PARTS, *known, 0.008).low == {"b", "c"}
    policy = choose(PARTS, *known, 0.008, margins)
    assert policy.low == {"a", "b"}, "c would count for 0.009"
    assert policy.margins == margins
    together = choose(PARTS, *synthetic({"a": 0.004, "b": 0.001, "c": 0.006}, together=1.5), 0.012, margins)
    assert together.low == {"a", "b"}, "c with b: 1.5 x 0.007 measured, 1.43 times that with its margin"


def test_swings_are_deviations_of_logarithms() -> None:
    variability, random = GradientVariability(), np.random.default_rng(0)
    assert variability.margins(2) == [1.0, 1.0]
    logs = random.normal(size=(MEMORY_STEPS, 2)) * [0.01, 0.5]
    for row in logs:
        variability.observe(np.exp(row).tolist())
    assert variability.margins(2) == pytest.approx(np.exp(logs.std(axis=0)), rel=0.02)
    variability.observe([float("inf"), 0.0])
    assert all(np.isfinite(variability.margins(2)))
    for _ in range(10 * MEMORY_STEPS):
        variability.observe([1.0, 1.0])
    assert variability.margins(2) == pytest.approx([1.0, 1.0], abs=1e-2), "the past fades"


def job_of(bound: float | None, model: ModelConfig = SMALL) -> JobConfig:
    precision = "fp32" if bound is None else "bf16"
    return make_job(
        "adamw", 12, model, precision=precision, adaptive_precision=AdaptivePrecisionConfig(error_bound=bound)
    )


def opened(config: JobConfig, layout: Layout, rank: int, groups: Any) -> Engine:
    """An engine whose loss feels low precision."""
    engine = build_engine(config, layout, rank, groups, CPU)
    engine.initialise(3)
    for item in engine.weights():
        if item.shard.name == "head.weight":
            item.tensor.mul_(100.0)  # large logits, whose errors are large too
    return engine


def adapted(job: Job, config: JobConfig, layout: Layout) -> tuple[PrecisionPolicy, float]:
    """What a rank decides, and its share of the loss afterwards."""
    groups = job.groups()
    groups.connect()
    engine = opened(config, layout, job.rank, groups)
    feeds = [batch(config, layout, layout.coordinates(job.rank).dp, step) for step in (7, 8)]
    policy = engine.adapt(feeds)
    assert policy is not None
    found = policy, engine.evaluate(feeds[:1])[0]
    engine.gradients_of(feeds[0])
    engine.close()
    groups.close()
    gc.collect()
    return found


def alone(bound: float | None, model: ModelConfig = SMALL) -> tuple[PrecisionPolicy | None, list[float]]:
    config, layout = job_of(bound, model), Layout(micro_batch=12)
    engine = opened(config, layout, 0, None)
    feeds = [batch(config, layout, 0, step) for step in (7, 8)]
    policy = engine.adapt(feeds)
    losses = [engine.evaluate([feed])[0] for feed in feeds]
    engine.close()
    return policy, losses


def seen(config: JobConfig, layout: Layout, rank: int, groups: Any) -> list[float]:
    """What a process has seen of the parts' gradients after a few steps, as margins."""
    variability = GradientVariability()
    engine = build_engine(config, layout, rank, groups, CPU, variability)
    engine.initialise(3)
    for step in range(1, 6):
        engine.gradients_of(batch(config, layout, layout.coordinates(rank).dp, step))
        engine.optimizer_step(0.05)
    engine.close()
    return variability.margins(0)


def seen_by_rank(job: Job, config: JobConfig, layout: Layout) -> list[float]:
    groups = job.groups()
    groups.connect()
    found = seen(config, layout, job.rank, groups)
    groups.close()
    gc.collect()
    return found


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (Layout(dp=2, zero=3, micro_batch=6), SMALL),
        (Layout(pp=2, micro_batch=3), SMALL),
        (Layout(dp=2, tp=2, ep=2, micro_batch=6), MIXTURE),
    ],
    ids=["dp2-zero3", "pp2", "tp2-experts"],
)
def test_every_rank_sees_the_same_variability(pool: Pool, layout: Layout, model: ModelConfig) -> None:
    config = job_of(0.5, model)
    alone = seen(config, Layout(micro_batch=12), 0, None)
    assert len(alone) == len(parts_of(parameter_table(model)))
    assert min(alone) > 1.0
    ranks = pool.run(layout.world_size, seen_by_rank, config, layout)
    assert all(found == ranks[0] for found in ranks)
    assert ranks[0] == pytest.approx(alone, rel=0.15), "but for bf16, which routes some tokens otherwise"


def decided_knowing(job: Job, config: JobConfig, layout: Layout, swung: str) -> PrecisionPolicy | None:
    """As `adapted`, where rank 1 alone has seen a part's gradients swing."""
    groups, variability = job.groups(), GradientVariability()
    groups.connect()
    if job.rank == 1:
        norms = [1.0] * len(parts_of(parameter_table(SMALL)))
        place = list(parts_of(parameter_table(SMALL))).index(swung)
        for number in range(20):
            norms[place] = 1e3 if number % 2 else 1e-3
            variability.observe(norms)
    engine = build_engine(config, layout, job.rank, groups, CPU, variability)
    engine.initialise(3)
    policy = engine.adapt([batch(config, layout, job.rank, step) for step in (7, 8)])
    engine.close()
    groups.close()
    gc.collect()
    return policy


def test_what_one_rank_has_seen_counts_for_all(pool: Pool) -> None:
    layout = Layout(dp=2, micro_batch=6)
    before = pool.run(2, decided_knowing, job_of(0.5), layout, "head")[0]
    assert before is not None
    bound = 2.0 * sum(before.sensitivity.values())
    assert before.sensitivity["head"] * before.margins["head"] > bound
    first, second = pool.run(2, decided_knowing, job_of(bound), layout, "head")
    assert first == second
    assert first is not None
    assert first.low == set(first.sensitivity) - {"head"}


def test_the_bound_holds_and_the_sensitive_part_stays_in_full() -> None:
    _, exact = alone(None)
    loose, _ = alone(0.5)
    assert loose is not None
    sensitive = max(loose.sensitivity, key=lambda part: loose.sensitivity[part])
    bound = loose.sensitivity[sensitive] * 0.8
    policy, losses = alone(bound)
    assert policy is not None
    assert sensitive not in policy.low
    assert len(policy.low) >= 2
    errors = [abs(a / b - 1.0) for a, b in zip(losses, exact, strict=True)]
    assert max(errors) == pytest.approx(policy.error, rel=0.05, abs=1e-7)
    assert max(errors) <= bound
    nothing, losses = alone(1e-9)
    assert nothing is not None
    assert nothing.low == frozenset()
    assert losses == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (Layout(dp=2, tp=2, zero=3, micro_batch=6), SMALL),
        (Layout(pp=2, micro_batch=3), SMALL),
        (Layout(dp=2, ep=2, micro_batch=6), MIXTURE),
    ],
    ids=["dp2-tp2-zero3", "pp2", "ep2-experts"],
)
def test_every_rank_decides_as_one_process_does(pool: Pool, layout: Layout, model: ModelConfig) -> None:
    loose, _ = alone(0.5, model)
    assert loose is not None
    sensitive = max(loose.sensitivity, key=lambda part: loose.sensitivity[part])
    bound = loose.sensitivity[sensitive] * 0.8
    ranks = pool.run(layout.world_size, adapted, job_of(bound, model), layout)
    policies = [policy for policy, _ in ranks]
    assert all(policy == policies[0] for policy in policies)
    assert sensitive not in policies[0].low
    assert policies[0].low
    assert policies[0].error <= bound
    assert torch.isfinite(torch.tensor([loss for _, loss in ranks])).all()
