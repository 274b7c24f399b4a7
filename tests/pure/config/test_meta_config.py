"""What a config may say of learning from tasks."""

from __future__ import annotations

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.config.resume import verdict
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.fast_path import settled
from picotron_ray.config.support.kernels import attention_backends, norm_kernel
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.candidates import candidates
from picotron_ray.planner.memory import averages

RULES = "meta={strategy: maml, tasks: sequences}"


def job_of(*overrides: str) -> JobConfig:
    return load_job("tiny", [RULES, *overrides])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["meta.inner_steps=0"], "meta.inner_steps: saw 0, expected an integer >= 1"),
        (["meta.support=0"], "meta.support: saw 0, expected an integer >= 1"),
        (["meta.query=0"], "meta.query: saw 0, expected an integer >= 1"),
        (["meta.inner_rate=0"], "meta.inner_rate: saw 0, expected a number > 0"),
        (["meta.tasks=waves"], "meta.tasks: saw 'waves', expected sinusoids, sequences, or an import path"),
        (["meta.tasks=sinusoids"], "meta.tasks: saw sinusoids, which are numbers, with a model of token ids"),
        (["meta.strategy=none"], "meta.tasks: saw sequences with meta.strategy=none, which has no tasks"),
        (["layout.tp=2"], "layout.tp: saw 2 with meta.strategy=maml"),
        (["layout.pp=2"], "layout.pp: saw 2 with meta.strategy=maml"),
        (["layout.cp=2"], "layout.cp: saw 2 with meta.strategy=maml"),
        (["layout.dp=2", "layout.zero=3"], "layout.zero: saw 3 with meta.strategy=maml"),
        (["layout.recompute=full"], "layout.recompute: saw full with meta.strategy=maml"),
        (["layout.offload_activations=true"], "layout.offload_activations: saw true with meta.strategy=maml"),
        (["precision=bf16"], "precision: saw bf16 with meta.strategy=maml, expected fp32, tf32 or fp64"),
        (["kernels.compile=true"], "kernels.compile: saw true with meta.strategy=maml"),
        (["kernels.loss=linear"], "kernels.loss: saw linear with meta.strategy=maml"),
        (["kernels.norm=closed-form"], "kernels.norm: saw closed-form with meta.strategy=maml"),
        (["kernels.attention=flash", "cluster.device=cpu"], "kernels.attention: saw flash, expected auto or"),
        (["model.moe.experts=4"], "model.moe.experts: saw 4 with meta.strategy=maml"),
        (
            ["evaluate.sets=[{name: a, source: text, path: x}]"],
            "evaluate.sets: saw sets with meta.strategy=maml",
        ),
        (
            ["init_from={run: a, optimizer_state: true}", "meta.strategy=metasgd"],
            "init_from.optimizer_state: saw",
        ),
        (["data.batching=packed"], "data.batching: saw 'packed' with meta.strategy=maml"),
        (["data.source=text", "data.path=x"], "data.source: saw 'text' with meta.strategy=maml"),
        (
            ["meta.strategy=metasgd", "optimizer.name=muon"],
            "optimizer.name: saw muon with meta.strategy=meta",
        ),
        (["meta.strategy=metasgd", "optimizer.moments=8bit"], "optimizer.moments: saw 8bit with meta.strat"),
    ],
)
def test_a_mistake_is_one_line(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        job_of(*overrides)
    assert any(line.startswith(said) for line in refused.value.problems), refused.value.problems
    assert all("\n" not in line for line in refused.value.problems)


def test_layouts_spread_tasks_and_cut_nothing() -> None:
    found = list(candidates(job_of("cluster.max_workers=4", "data.global_batch=8"), 4))
    assert {layout.dp for layout in found} == {1, 2, 3, 4}
    assert {(one.tp, one.pp, one.cp, one.ep, one.zero, one.recompute) for one in found} == {
        (1, 1, 1, 1, 0, "none")
    }


def test_kernels_are_those_with_second_derivatives() -> None:
    job = job_of()
    assert attention_backends(job, "cpu") == attention_backends(job, "cuda") == ["math"]
    assert norm_kernel(job, "cpu") == "eager"
    kernels = settled(job, "cuda", Layout()).kernels
    assert (kernels.loss, kernels.projections, kernels.compile) == ("logits", "separate", False)


def test_learned_rates_are_counted() -> None:
    """Of every weight: a rate, its two moments, and with an average of weights one of its own."""
    plain, learned = job_of(), job_of("meta.strategy=metasgd")
    assert (averages(plain), averages(learned)) == (0, 3)
    assert averages(job_of("meta.strategy=metasgd", "optimizer.ema_decay=0.9")) == 1 + 4


def test_tasks_may_not_change_within_a_run() -> None:
    pinned = ("strategy", "tasks", "support", "query")
    assert {verdict(f"meta.{key}") for key in pinned} == {"refuse"}
    assert verdict("meta.inner_steps") == verdict("meta.inner_rate") == "warn"
