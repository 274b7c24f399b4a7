"""A layout's ranks against the same model in one process, in fp64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pytest

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.registry import finetuned_table
from picotron_ray.train.dry_run.call_order import order_problems
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    MODEL,
    SEQUENCE,
    STEPS,
    Result,
    assemble,
    documents_job,
    make_job,
    masked_job,
    run_layout,
    train,
)
from tests.support.gloo.pool import Pool

TOLERANCE = 1e-10
WEIGHTS_TOLERANCE = 1e-9
NOTHING = 1e-9  # below it what should be zero is taken for rounding


@functools.cache
def reference(
    optimizer: str,
    global_batch: int,
    model: ModelConfig = MODEL,
    documents: bool = False,
    length: int = SEQUENCE,
    masked: bool = False,
) -> Result:
    """The same job in this process by torch's operators, one micro-batch of the whole global batch."""
    job = (
        documents_job(optimizer, global_batch, model)
        if documents
        else make_job(optimizer, global_batch, model, length=length)
    )
    job = masked_job(optimizer, global_batch, model) if masked else job
    eager = job.model_copy(update={"kernels": KernelsConfig(norm="eager")})
    return train(eager, Layout(micro_batch=global_batch), 0, None)


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative difference in the Euclidean norm."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def worst(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    assert found.keys() == expected.keys()
    return max(
        (distance(found[name], expected[name]), name)
        for name in expected
        if not vanishes(name, found[name], expected[name])
    )


def vanishes(name: str, *values: np.ndarray) -> bool:
    """Whether this is a key bias that nothing moves: without rotary positions (GPT-2) it adds the same to all
    scores of a query, which softmax does not see, and its gradient is zero but for rounding. Or what is
    zero in all places: frozen biases, and the gradient of an adapter's A while its B is zero.
    """
    if not any(value.any() for value in values):
        return True
    return name.endswith("attention.wk.bias") and all(np.linalg.norm(value) < NOTHING for value in values)


def thinned(
    cases: Sequence[tuple[Any, ...]], default: Collection[int], name: Callable[..., str] | None = None
) -> list[Any]:
    """Cases of which the default run takes the numbers in ``default``, and ``-m parity`` all others."""
    return [
        pytest.param(
            *case,
            marks=() if number in default else pytest.mark.parity,
            id=name(*case) if name else "-".join(map(str, case)),
        )
        for number, case in enumerate(cases)
    ]


def compare(job: JobConfig, layout: Layout, ranks: list[Result], expected: Result | None = None) -> list[str]:
    """Everything in which a layout differs from one process, one line each.

    Args:
        expected: what that one process found; None: it is asked.
    """
    data = job.data
    expected = expected or reference(
        job.optimizer.name,
        data.global_batch,
        job.model,
        data.document_masks,
        data.sequence_length,
        data.loss_mask,
    )
    wrong = []
    for step in range(STEPS):
        loss = sum(rank.loss[step] for rank in ranks)
        if abs(loss / expected.loss[step] - 1) > TOLERANCE:
            wrong.append(f"loss of step {step + 1}: {loss} instead of {expected.loss[step]}")
        for rank in ranks:
            if abs(rank.norm[step] / expected.norm[step] - 1) > TOLERANCE:
                wrong.append(f"norm of step {step + 1}: {rank.norm[step]} instead of {expected.norm[step]}")
    total, (whole, tokens) = sum(rank.evaluation[0] for rank in ranks), expected.evaluation
    if tokens and abs(total / whole - 1) > TOLERANCE * 10:
        wrong.append(f"evaluation: {total} instead of {whole}")
    if sum(rank.evaluation[1] for rank in ranks) != tokens:
        wrong.append("tokens of the evaluation")
    far, name = worst(assemble([r.gradients for r in ranks]), assemble([expected.gradients]))
    if far > TOLERANCE:
        wrong.append(f"gradient of {name}: off by {far:.3g}")
    far, name = worst(assemble([r.state for r in ranks]), assemble([expected.state]))
    if far > WEIGHTS_TOLERANCE:
        wrong.append(f"{name} after {STEPS} steps: off by {far:.3g}")
    return wrong


def check(
    pool: Pool,
    layout: Layout,
    global_batch: int,
    model: ModelConfig = MODEL,
    actions: tuple[str, ...] = (),
    kind: str = "cpu",
) -> list[Result]:
    """Compare SGD and AdamW, on devices of a kind, with one process on a CPU; returns AdamW's results."""
    jobs = [make_job(optimizer, global_batch, model, actions=actions) for optimizer in ("sgd", "adamw")]
    per_rank = pool.run(layout.world_size, run_layout, jobs, layout, "", kind)
    for job, ranks in zip(jobs, zip(*per_rank, strict=True), strict=True):
        assert compare(job, layout, list(ranks)) == []
        assert all(rank.stable for rank in ranks), "state() must stay valid for the engine's whole life"
    assert order_problems([results[-1].calls for results in per_rank]) == []
    return [results[-1] for results in per_rank]


def primaries(layout: Layout, ranks: list[Result], model: ModelConfig) -> None:
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
        spec.name for spec in finetuned_table(model)
    }
