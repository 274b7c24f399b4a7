"""Training that is cut off, and what the process does next."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import build_engine
from picotron_ray.train.step_sync import Contribution, exchange
from tests.support.gloo.devices import group_options, own_device
from tests.support.gloo.parallel_jobs.group_jobs import open_files
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, batch
from tests.support.gloo.pool import Job

FAULT_STEP = 3


def until_lost(
    job: Job,
    config: JobConfig,
    layout: Layout,
    victim: int,
    how: int,
    told: str,
    at: str = "reduce",
) -> dict[str, Any]:
    """Train until a peer is gone. The victim signals itself in the middle of a step, as phase ``at`` begins.

    ``told`` is a file that stands for the coordinator's order to abort: its appearance ends waits for
    peers that are stopped, or that wait themselves.
    """
    before = open_files()
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(config.seed)
    watch(groups, Path(told))

    def on_phase(phase: str) -> None:
        if job.rank == victim and engine.step == FAULT_STEP and phase == at:
            os.kill(os.getpid(), how)

    kind, steps = "", 0
    try:
        for step in range(1, 1000):
            engine.forward_backward(batch(config, layout, layout.coordinates(job.rank).dp, step), on_phase)
            engine.reduce(on_phase)
            engine.clip(on_phase)
            engine.optimizer_step(0.01)
            groups.all_gather(_one())
            steps = step
    except Exception as error:  # noqa: BLE001 - judged here as the runtime judges it
        kind = FailureKind.PEER_LOST if groups.lost_peer(error) else f"{type(error).__name__}: {error}"
        error.__traceback__ = None
    ended = time.monotonic()
    groups.abort()
    engine.close()
    groups.close()
    gc.collect()
    given_up = groups.given_up
    return {"kind": kind, "steps": steps, "ended": ended, "sockets": 0 if given_up else open_files() - before}


def _one() -> Any:
    import torch

    return torch.ones(1)


def watch(groups: Any, told: Path) -> None:
    """Abort from another thread once ``told`` exists."""

    def run() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not groups.aborted:
            if told.exists():
                groups.abort()
            time.sleep(0.01)

    threading.Thread(target=run, daemon=True).start()


SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def aborted_at_random(
    job: Job, config: JobConfig, layout: Layout, rounds: int, kind: str = "cpu"
) -> list[tuple[float, float]]:
    """Per round: when the abort was ordered, and when this rank had left its step."""
    moments, device = [], own_device(kind)
    for number in range(rounds):
        again = Job(job.host, job.port, f"{job.prefix}/{number}", job.rank, job.world_size)
        groups = again.groups(**group_options(device))
        groups.connect()
        engine = build_engine(config, layout, job.rank, groups, device)
        engine.initialise(config.seed)
        feed = batch(config, layout, layout.coordinates(job.rank).dp, 1)
        ordered: list[float] = []

        def order(groups: Any = groups, ordered: list[float] = ordered) -> None:
            ordered.append(time.monotonic())
            groups.abort()

        timer = threading.Timer(random.Random(f"{config.seed}/{layout}/{number}").uniform(0.02, 0.2), order)
        timer.start()
        try:
            while True:
                engine.forward_backward(feed)
                engine.reduce()
                exchange(Contribution(0.0, engine.clip()), layout, device)  # which the host waits for
                groups.check()  # as the loop does: one rank alone has no operation that an abort ends
                engine.optimizer_step(0.01)
        except Exception as error:
            if not groups.lost_peer(error):
                raise
            error.__traceback__ = None
        left = time.monotonic()
        timer.join()
        moments.append((ordered[0], left))
        engine.close()
        groups.close()
        gc.collect()
    return moments
