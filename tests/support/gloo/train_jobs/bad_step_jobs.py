"""Steps with NaN in them, as the ranks of a layout or of a whole generation take them."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

from picotron_ray.checkpoint.snapshot.ledger_tail import LedgerTail
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationSpec, Outcome
from picotron_ray.data.batch import StepBatch
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import Engine, build_engine
from picotron_ray.train.loop import Loop, Requests
from picotron_ray.train.optim.lr_schedule import learning_rate
from picotron_ray.train.update_policy import UpdatePolicy
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, Piece, batch, pieces
from tests.support.gloo.pool import Job
from tests.support.gloo.train_jobs import remesh_jobs


class Page(SimpleNamespace):
    """Heartbeat page that nobody reads."""

    computing_step = 0

    def phase(self, name: str) -> None:
        self.at = name

    def put(self, **values: float) -> None:
        self.__dict__.update(values)

    def count_bad(self, step: int) -> None:
        self.bad = (*getattr(self, "bad", ()), step)

    def communication(self, figures: Mapping[str, tuple[float, float]]) -> None:
        pass

    def count_step(self, seconds: float) -> None:
        self.steps = getattr(self, "steps", 0) + 1


def spoiled(feed: StepBatch) -> StepBatch:
    """The batch, with NaN for the factor of its loss: a bad sample's gradients."""
    return replace(feed, global_tokens=math.nan)  # type: ignore[arg-type]


def loop_of(config: JobConfig, layout: Layout, rank: int, engine: Engine, feeds: Iterator[StepBatch]) -> Loop:
    """The training loop, without a service around it."""
    snapshots = SimpleNamespace(wait_copied=lambda: None, observe=lambda sealed: None)
    snapshots.apart_s, snapshots.sealed_step, snapshots.waited_s, snapshots.pinned_wait_s = 0.0, -1, 0.0, 0.0
    return Loop(
        job=config,
        layout=layout,
        identity={"term": 1, "n": 1},
        rank=rank,
        device=CPU,
        engine=engine,
        loader=SimpleNamespace(next=lambda: next(feeds)),  # type: ignore[arg-type]
        eval_batches=[],
        snapshots=snapshots,  # type: ignore[arg-type]
        page=Page(),
        requests=Requests(),
        updates=UpdatePolicy(config),
        tail=LedgerTail(),
        start_step=0,
    )


def with_a_bad_step(job: Job, config: JobConfig, layout: Layout, bad: int) -> tuple[list[Piece], list[str]]:
    """Take all steps by the loop; in step ``bad`` the first replica's gradients are NaN.

    Returns:
        This rank's state after them, and the ledger's lines.
    """
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(config.seed)
    dp = layout.coordinates(job.rank).dp
    loop = loop_of(config, layout, job.rank, engine, (batch(config, layout, dp, n) for n in count(1)))
    with _numbers(Bad(gradients=(bad,)), dp == 0):
        for step in range(1, config.steps + 1):
            loop._step(step)
    assert (engine.step, engine.skipped) == (config.steps, 1)
    found = pieces(engine.state())
    engine.close()
    groups.close()
    gc.collect()
    return found, list(loop.tail.lines())


def past_a_rewind(
    job: Job, config: JobConfig, layout: Layout, passed: Sequence[int]
) -> tuple[list[Piece], list[str]]:
    """Take all steps by the loop but ``passed``; this rank's state after them, and the ledger's lines."""
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(config.seed)
    dp = layout.coordinates(job.rank).dp
    fed = (batch(config, layout, dp, n) for n in count(1) if n not in passed)
    loop = loop_of(config, layout, job.rank, engine, fed)
    for step in range(1, config.steps + 1):
        if step in passed:
            loop._pass_over(step)
        else:
            loop._step(step)
    found = pieces(engine.state())
    engine.close()
    groups.close()
    gc.collect()
    return found, list(loop.tail.lines())


def left_out_by_hand(config: JobConfig, *bad: int) -> list[Piece]:
    """One process, and an optimizer that is not called in steps ``bad`` and does not hear of them."""
    engine = build_engine(config, Layout(micro_batch=config.data.global_batch), 0, None, CPU)
    engine.initialise(config.seed)
    for step in range(1, config.steps + 1):
        engine.gradients_of(batch(config, engine.layout, 0, step))
        if step not in bad:
            engine.optimizer_step(learning_rate(config.optimizer, step, config.steps))
    return pieces(engine.state())


@dataclass(frozen=True)
class Bad:
    """What goes wrong in a generation.

    Fields:
        gradients: steps in which gradients of some ranks are NaN.
        weights: step after whose update a weight of all ranks is infinite.
        evaluation: whether the held-out loss is NaN.
    """

    gradients: Sequence[int] = ()
    weights: int = 0
    evaluation: bool = False


def bad_generation(
    job: Job, config: JobConfig, spec: GenerationSpec, folder: str, kill: tuple[int, int, str], bad: Bad
) -> Outcome:
    """Take part in a generation as `remesh_jobs.generation` does, with numbers that are not finite."""
    with _numbers(bad, job.rank == job.world_size - 1):
        return remesh_jobs.generation(job, config, spec, folder, kill, f"{folder}/abort-{spec.id.n}")


@contextmanager
def _numbers(bad: Bad, mine: bool) -> Iterator[None]:
    gradients_of, optimizer_step, evaluate = Engine.gradients_of, Engine.optimizer_step, Engine.evaluate

    def poisoned(self: Engine, feed: StepBatch, *rest: Any) -> tuple[float, float]:
        return gradients_of(self, spoiled(feed) if mine and feed.step in bad.gradients else feed, *rest)

    def infinite(self: Engine, rate: float) -> None:
        optimizer_step(self, rate)
        if self.step == bad.weights:
            weight = self.weights()[0].tensor
            assert isinstance(weight, torch.Tensor)
            weight.view(-1)[-1] = math.inf

    def unknown(self: Engine, batches: Sequence[StepBatch], *rest: Any) -> tuple[float, int]:
        loss, tokens = evaluate(self, batches, *rest)
        return (math.nan if bad.evaluation and mine else loss), tokens

    Engine.gradients_of, Engine.optimizer_step, Engine.evaluate = poisoned, infinite, unknown  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Engine.gradients_of, Engine.optimizer_step = gradients_of, optimizer_step  # type: ignore[method-assign]
        Engine.evaluate = evaluate  # type: ignore[method-assign]
