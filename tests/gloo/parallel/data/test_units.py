"""FSDP's units as the order of their collectives shows them, and steps that are equal to one process's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from picotron_ray.config.schema.comm import CommConfig
from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.build import definition_of
from picotron_ray.train.dry_run.run import dry_run
from tests.support.gloo.parallel_jobs.matrix_jobs import MIXTURE, MODEL, make_job, run_layout
from tests.support.gloo.parity import compare, thinned
from tests.support.gloo.pool import Pool

TIED = ModelConfig(**{**MODEL.model_dump(), "tie_embeddings": True})
GPT2 = ModelConfig(**{**MODEL.model_dump(), "family": "gpt2", "max_positions": 10, "kv_heads": 4})
BATCH, MICRO_BATCHES = 12, 2
LINEAR = KernelsConfig(loss="linear", loss_chunk=5)


def names_of(model: ModelConfig, shards: int, stages: int) -> dict[int, str]:
    """Name of a unit by the elements of a rank's shard: embedding, block, head; of both ends root."""
    table, norm = model.vocab_size * model.hidden_size, model.hidden_size
    block = sum(spec.numel for spec in definition_of(model, 0).table if spec.layer == 0)
    ends = {table: "embedding", table + norm: "head"}
    if model.tie_embeddings and stages == 1:
        ends = {table + norm: "root"}
    return {size // shards: name for size, name in {**ends, block: "block"}.items()}


def moved(layout: Layout, model: ModelConfig, rank: int = 0, **options: Any) -> str:
    """What the shards of a rank's step are moved for, in order; a gather is ``+``, a reduce-scatter ``-``."""
    job = make_job("sgd", BATCH, model, **options)
    names, found = names_of(model, layout.shards, layout.stages), []
    for call in dry_run(job, layout, rank).calls:
        sizes = json.loads(call.sizes)
        if call.kind.startswith("_allgather") and sizes[0][0] in names:
            found.append("+" + names[sizes[0][0]])
        elif call.kind.startswith("_reduce_scatter"):
            found.append("-" + names[sizes[0][0] // layout.shards])
    return " ".join(found)


FORWARD, BACKWARD = "+block +block +block +block", "+block -block +block -block +block -block -block"


def steps(*parts: str) -> str:
    return " ".join(parts)


def repeated(*parts: str) -> str:
    return steps(*parts * MICRO_BATCHES)


@pytest.mark.parametrize(
    ("model", "zero", "expected"),
    [
        (MODEL, 3, repeated("+embedding", FORWARD, "+head +block -head", BACKWARD, "-embedding")),
        (TIED, 3, repeated("+root", FORWARD, "+block", BACKWARD, "-root")),
        (MODEL, 2, steps("+embedding", FORWARD, "+head", *["-head", *["-block"] * 4, "-embedding"] * 2)),
        (TIED, 2, steps("+root", FORWARD, *[*["-block"] * 4, "-root"] * 2)),
        (MODEL, 1, steps("+embedding", FORWARD, "+head", "-head", *["-block"] * 4, "-embedding")),
        (TIED, 1, steps("+root", FORWARD, *["-block"] * 4, "-root")),
    ],
    ids=lambda value: "tied" if value is TIED else "untied" if value is MODEL else str(value)[:1],
)
def test_ends_are_units_of_their_own(model: ModelConfig, zero: int, expected: str) -> None:
    """Under ZeRO-3 too the head is gathered once a micro-batch, nothing for the embedding's gradient."""
    assert moved(Layout(dp=2, zero=zero, micro_batch=3), model) == expected


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["untied", "tied"])
def test_the_ends_of_a_pipeline_are_units_of_their_own(model: ModelConfig) -> None:
    """Tied ones too, each stage holding its own copy; the head stays gathered until it is reduced."""
    layout = Layout(dp=2, pp=2, zero=3, micro_batch=3)
    first, last = (moved(layout, model, rank).split() for rank in (0, 2))
    assert first[:3] == ["+embedding", "+block", "+block"]
    assert (first.count("-embedding"), last.count("-head")) == (1, 1)
    assert (first.count("+embedding"), last.count("+head")) == (MICRO_BATCHES, 1)
    assert not {"+head", "-head"} & set(first)
    assert not {"+embedding", "-embedding"} & set(last)


def test_blocks_may_be_gathered_and_reduced_together() -> None:
    """Three, and the one that is left: as elements of a rank's shard they are told apart."""
    layout = Layout(dp=2, zero=3, micro_batch=3)
    job = make_job("sgd", BATCH, MODEL, comm=CommConfig(zero_blocks=3))
    one = next(size for size, name in names_of(MODEL, 2, 1).items() if name == "block")
    gathered, reduced = [], []
    for call in dry_run(job, layout).calls:
        sizes = json.loads(call.sizes)
        if call.kind.startswith("_allgather") and sizes[0][0] % one == 0:
            gathered.append(sizes[0][0] // one)
        elif call.kind.startswith("_reduce_scatter") and sizes[0][0] % (2 * one) == 0:
            reduced.append(sizes[0][0] // (2 * one))
    assert gathered == [3, 1, 1, 3] * MICRO_BATCHES
    assert reduced == [1, 3] * MICRO_BATCHES


GROUPED = [
    (Layout(dp=2, zero=3, micro_batch=2, recompute="full"), MODEL, 3),
    (Layout(dp=2, zero=1, micro_batch=2), MODEL, 2),
    (Layout(dp=2, zero=2, micro_batch=2, recompute="selective"), TIED, 4),
    (Layout(dp=2, zero=3, micro_batch=2, offload_activations=True), MODEL, 2),
    (Layout(dp=2, pp=2, zero=3, micro_batch=2), MODEL, 2),
    (Layout(dp=4, ep=2, zero=3, micro_batch=1), MIXTURE, 2),
]


@pytest.mark.parametrize(
    ("layout", "model", "together"), thinned(GROUPED, (0,), lambda layout, _, count: f"{layout}-{count}")
)
def test_blocks_together_are_equal_to_one_process(
    pool: Pool, layout: Layout, model: ModelConfig, together: int
) -> None:
    comm = CommConfig(zero_blocks=together)
    jobs = [make_job(optimizer, BATCH, model, comm=comm) for optimizer in ("sgd", "adamw")]
    per_rank = pool.run(layout.world_size, run_layout, jobs, layout)
    for job, ranks in zip(jobs, zip(*per_rank, strict=True), strict=True):
        assert compare(job, layout, list(ranks)) == []
        assert f"{together} blocks at a time" in " ".join(ranks[0].applied)


def test_the_linear_loss_gathers_the_head_that_it_reads() -> None:
    layout = Layout(dp=2, zero=3, micro_batch=3)
    assert moved(layout, MODEL, kernels=LINEAR) == moved(layout, MODEL)


@pytest.mark.parametrize(
    ("model", "embed", "head", "expected"),
    [
        (MODEL, True, True, (["embed"], ["norm", "head"])),
        (MODEL, False, False, ([], [])),
        (TIED, True, True, ([], [])),
        (TIED, True, False, (["embed"], [])),
        (TIED, False, True, ([], ["norm", "head"])),
        (GPT2, True, True, (["embed", "positions"], ["norm", "head"])),
    ],
)
def test_the_ends_of_a_decoder(
    model: ModelConfig, embed: bool, head: bool, expected: tuple[list[str], list[str]]
) -> None:
    definition = definition_of(model, 0)
    stage = definition.build(0, 2, embed=embed, head=head)
    names = {module: name for name, module in stage.named_modules()}
    assert tuple([names[module] for module in end] for end in definition.ends(stage)) == expected


LAYOUTS = [
    *[(Layout(dp=2, zero=zero, micro_batch=2), model, LINEAR if zero == 3 else KernelsConfig())
      for model in (MODEL, TIED) for zero in (3, 2, 1)],
    *[(Layout(dp=2, pp=2, zero=zero, micro_batch=2), model, KernelsConfig())
      for model in (MODEL, TIED) for zero in (3, 2, 1)],
    (Layout(dp=2, zero=3, micro_batch=2), GPT2, KernelsConfig()),
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), MODEL, LINEAR),
    (Layout(dp=4, zero=3, replicate=2, micro_batch=1), MODEL, LINEAR),
    (Layout(dp=2, pp=2, zero=2, virtual_stages=2, schedule="zbv", micro_batch=2), MODEL, KernelsConfig()),
    (Layout(dp=2, pp=2, zero=3, virtual_stages=2, schedule="interleaved-1f1b", micro_batch=2), MODEL,
     KernelsConfig()),
]  # fmt: skip


def named(layout: Layout, model: ModelConfig, kernels: KernelsConfig) -> str:
    return f"{layout}-{model.family}-{'tied' if model.tie_embeddings else 'untied'}-{kernels.loss}"


@pytest.mark.parametrize(("layout", "model", "kernels"), thinned(LAYOUTS, (0, 3), named))
def test_steps_are_equal_to_one_process(
    pool: Pool, layout: Layout, model: ModelConfig, kernels: KernelsConfig
) -> None:
    """Losses, gradients and weights in fp64; an evaluation comes between two steps."""
    jobs = [make_job(optimizer, BATCH, model, kernels=kernels) for optimizer in ("sgd", "adamw")]
    per_rank = pool.run(layout.world_size, run_layout, jobs, layout)
    for job, ranks in zip(jobs, zip(*per_rank, strict=True), strict=True):
        assert compare(job, layout, list(ranks)) == []
        assert all(rank.stable for rank in ranks)
