"""Parameter groups by pattern: as torch's own groups, and at every layout as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.evaluate import EvaluateConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.schema.optimizer import OptimizerConfig, ParameterGroupConfig
from picotron_ray.config.validation.optimizer import RULES
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.registry import parameter_table
from picotron_ray.train.engine import build_engine
from picotron_ray.train.optim.optimizer import Optimizer, pace
from tests.gloo.train.test_engine import parameters
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    CPU,
    MIXTURE,
    MODEL,
    Result,
    assemble,
    make_job,
    run_layout,
    train,
)
from tests.support.gloo.parity import TOLERANCE, WEIGHTS_TOLERANCE, reference, thinned, worst
from tests.support.gloo.pool import Pool

GROUPS = (
    ParameterGroupConfig(pattern="embed.*", rate_factor=0.5),
    ParameterGroupConfig(pattern="layers.*.attention.w[qk].weight", rate_factor=2.0, weight_decay=0.3),
    ParameterGroupConfig(pattern="*norm.weight", rate_factor=0.25, weight_decay=0.2),
    ParameterGroupConfig(pattern="layers.[01].mlp.*", weight_decay=0.0),
)
# fmt: off
LAYOUTS = [
    ("adamw", MODEL, Layout(dp=2, tp=2, zero=3, micro_batch=3), 10),
    ("muon", MODEL, Layout(dp=2, pp=2, zero=2, micro_batch=2), 10),
    ("sgd", MODEL, Layout(tp=2, pp=2, micro_batch=3), 12),
    ("muon", MODEL, Layout(dp=3, zero=3, micro_batch=2), 7),
    ("adamw", MODEL, Layout(dp=2, cp=2, zero=1, micro_batch=3), 12),
    ("muon", MIXTURE, Layout(dp=2, tp=2, ep=2, micro_batch=3), 12),
    ("adamw", MIXTURE, Layout(dp=4, ep=2, zero=3, micro_batch=2), 10),
]
# fmt: on


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def grouped(job: JobConfig, **options: Any) -> JobConfig:
    """The job with groups, and an average of the weights that is evaluated."""
    more = {"groups": GROUPS, "ema_decay": 0.6, **options}
    optimizer = job.optimizer.model_copy(update=more)
    return job.model_copy(update={"optimizer": optimizer, "evaluate": EvaluateConfig(weights="ema")})


def differences(found: list[Result], expected: Result) -> list[str]:
    """Everything in which a layout's ranks differ from one process."""
    wrong = []
    for step, loss in enumerate(expected.loss):
        total = sum(rank.loss[step] for rank in found)
        if abs(total / loss - 1) > TOLERANCE:
            wrong.append(f"loss of step {step + 1}: {total} instead of {loss}")
    whole, total = expected.evaluation[0], sum(rank.evaluation[0] for rank in found)
    if whole and abs(total / whole - 1) > 10 * TOLERANCE:
        wrong.append(f"evaluation: {total} instead of {whole}")
    far, name = worst(assemble([rank.state for rank in found]), assemble([expected.state]))
    return [*wrong, *([f"{name}: off by {far:.3g}"] if far > WEIGHTS_TOLERANCE else [])]


@pytest.mark.parametrize(
    ("optimizer", "model", "layout", "global_batch"),
    thinned(LAYOUTS, (0, 1), lambda name, _, layout, __: f"{name}-{layout}"),
)
def test_groups_and_averages_at_a_layout_equal_one_process(
    pool: Pool, optimizer: str, model: ModelConfig, layout: Layout, global_batch: int
) -> None:
    job = grouped(make_job(optimizer, global_batch, model))
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    eager = job.model_copy(update={"kernels": KernelsConfig(norm="eager")})
    expected = train(eager, Layout(micro_batch=global_batch), 0, None)
    assert differences(ranks, expected) == []
    assert all(rank.stable for rank in ranks)
    plain = assemble([reference(optimizer, global_batch, model).state])
    theirs = assemble([expected.state])
    assert worst({n: v for n, v in theirs.items() if not n.startswith("ema/")}, plain)[0] > 1e-3


def test_adapters_have_groups_and_averages_of_their_own(pool: Pool) -> None:
    """Hayou et al. 2024 (LoRA+): B learns faster than A."""
    model = ModelConfig.model_validate({**MODEL.model_dump(), "lora": {"rank": 3}})
    faster = (ParameterGroupConfig(pattern="*.lora_b", rate_factor=4.0),)
    job, layout = grouped(make_job("adamw", 12, model), groups=faster), Layout(tp=2, micro_batch=6)
    assert [problem for rule in RULES for problem in rule(job)] == []
    ranks = [results[0] for results in pool.run(2, run_layout, [job], layout)]
    expected = train(job, Layout(micro_batch=12), 0, None)
    assert differences(ranks, expected) == []
    averaged = {name for name in assemble([expected.state]) if name.startswith("ema/")}
    assert averaged
    assert all(name.endswith(("lora_a", "lora_b")) for name in averaged), "what is frozen has none"
    plain = assemble([train(grouped(job, groups=()), Layout(micro_batch=12), 0, None).state])
    changed = worst({n: v for n, v in assemble([expected.state]).items() if n.endswith("lora_b")},
                    {n: v for n, v in plain.items() if n.endswith("lora_b")})  # fmt: skip
    assert changed[0] > 1e-3


def test_the_first_match_counts() -> None:
    config = OptimizerConfig(
        weight_decay=0.1,
        groups=(
            ParameterGroupConfig(pattern="layers.0.*", rate_factor=3.0),
            ParameterGroupConfig(pattern="layers.*", rate_factor=2.0, weight_decay=0.4),
        ),
    )
    table = {spec.name: pace(spec, config) for spec in parameter_table(MODEL)}
    assert table["embed.weight"] == (1.0, 0.1)
    assert table["layers.0.attention.wq.weight"] == (3.0, 0.1)
    assert table["layers.0.attention_norm.weight"] == (3.0, 0.0), "norms decay only where a group says so"
    assert table["layers.1.attention_norm.weight"] == table["layers.1.mlp.up.weight"] == (2.0, 0.4)


@pytest.mark.parametrize(
    ("name", "fused", "offload"),
    [("adamw", True, False), ("adamw", False, False), ("adamw", True, True), ("sgd", True, False)],
)
def test_groups_equal_torchs(name: str, fused: bool, offload: bool) -> None:
    groups = (
        ParameterGroupConfig(pattern="p1", rate_factor=0.1),
        ParameterGroupConfig(pattern="p[23]", weight_decay=0.2, rate_factor=5.0),
    )
    config = OptimizerConfig(name=name, weight_decay=0.3, groups=groups)
    shapes = ((4, 6), (3, 5), (6,), (2, 2), (5,))
    mine, theirs = parameters(*shapes), parameters(*shapes)
    rates, decays = (1.0, 0.1, 5.0, 5.0, 1.0), (0.3, 0.3, 0.2, 0.2, 0.0)
    optimizer = Optimizer(config, mine, fused=fused, host=(CPU, 1) if offload else None)
    reference: torch.optim.Optimizer = (
        torch.optim.AdamW([{"params": [p.parameter]} for p in theirs], betas=(0.9, 0.95), eps=config.eps)
        if name == "adamw"
        else torch.optim.SGD([{"params": [p.parameter]} for p in theirs])
    )
    for step in range(1, 5):
        gradients = [torch.cos(step * parameter.local + step) for parameter in mine]
        optimizer.step(gradients, 0.1 / step, step)
        for i, group in enumerate(reference.param_groups):
            theirs[i].parameter.grad = gradients[i].clone()
            group["lr"] = rates[i] * 0.1 / step
            group["weight_decay"] = decays[i] if name == "adamw" else 0.0
            if name == "sgd":  # torch's decay is not decoupled
                theirs[i].parameter.data.mul_(1 - group["lr"] * decays[i])
        reference.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.local, b.local, rtol=1e-12, atol=1e-14)


def test_groups_of_moments_in_8_bits() -> None:
    """A group of all parameters is a learning rate and decay of all of them."""
    pytest.importorskip("torchao")
    group = ParameterGroupConfig(pattern="p*", rate_factor=2.0, weight_decay=0.4)
    configs = (
        OptimizerConfig(moments="8bit", weight_decay=0.0, groups=(group,)),
        OptimizerConfig(moments="8bit", weight_decay=0.4),
    )
    found = []
    for config, rate in zip(configs, (0.05, 0.1), strict=True):
        torch.manual_seed(0)
        mine = parameters((64, 128), (8, 4))
        for parameter in mine:
            parameter.parameter.data = parameter.parameter.data.float()
        optimizer = Optimizer(config, mine)
        for step in range(1, 4):
            optimizer.step([torch.randn_like(parameter.local) for parameter in mine], rate, step)
        found.append([parameter.local for parameter in mine])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_was_applied_is_told() -> None:
    engine = build_engine(grouped(make_job("adamw", 4)), Layout(micro_batch=4), 0, None, CPU)
    assert {"4 parameter groups", "moving average of the weights, decay 0.6"} <= set(engine.applied)
    engine.close()
