"""What a process does for the tests of weights that FSDP gathers in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from picotron_ray.comm.wire_bytes import PARAMETERS, SENT
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import Engine, build_engine
from tests.support.gloo.faults import planted
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, Piece, batch, pieces
from tests.support.gloo.pool import Job


@dataclass
class Gathered:
    """One rank's steps."""

    loss: list[float] = field(default_factory=list)
    evaluation: tuple[float, int] = (0.0, 0)
    gradients: list[Piece] = field(default_factory=list)  # of the first step
    state: list[Piece] = field(default_factory=list)
    sent: int = 0  # for parameters, in the last step
    applied: tuple[str, ...] = ()


def round_weights(engine: Engine) -> None:
    """Make every weight a value that bf16 has, so that casting by way of it changes nothing."""
    for item in engine.weights():
        item.tensor.copy_(item.tensor.to(torch.bfloat16))


def fp8_steps(job: Job, config: JobConfig, layout: Layout, steps: int = 1) -> Gathered:
    """Take steps with emulated fp8 from weights that bf16 has, and evaluate in between."""
    groups, undo, found = job.groups(), planted("fp8", job.rank), Gathered()
    groups.connect()
    try:
        engine = build_engine(config, layout, job.rank, groups, CPU)
        engine.initialise(config.seed)
        round_weights(engine)
        found.applied, dp = engine.applied, layout.coordinates(job.rank).dp
        for step in range(1, steps + 1):
            before = SENT.sent(PARAMETERS)
            loss, _ = engine.gradients_of(batch(config, layout, dp, step))
            found.loss.append(float(loss))
            if step == 1:
                found.gradients = pieces(engine.gradients())
            engine.optimizer_step(config.optimizer.learning_rate)
            round_weights(engine)
            found.sent = SENT.sent(PARAMETERS) - before
            if step == 1:
                found.evaluation = engine.evaluate([batch(config, layout, dp, 100)])
        found.state = pieces(engine.state())
        engine.close()
    finally:
        undo()
        groups.close()
    return found
