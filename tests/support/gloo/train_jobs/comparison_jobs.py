"""Generations in which one rank is tampered with, and whose tools are asked to find it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationSpec, Outcome
from picotron_ray.runtime.worker import generation
from picotron_ray.train.disturbance import flip_bit
from picotron_ray.train.engine import Engine, build_engine
from tests.support.gloo.pool import Job
from tests.support.gloo.train_jobs import tool_jobs
from tests.support.gloo.train_jobs.remesh_jobs import resources_of

LAYER = "layers.1.mlp"
WEIGHT = "layers.1.attention.wq.weight"


def _parameter(engine: Engine, name: str) -> nn.Parameter:
    for prefix, module in engine.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if f"{prefix}.{own}".lstrip(".") == name:
                return parameter
    raise KeyError(name)


def _module(engine: Engine, name: str) -> nn.Module:
    return dict(engine.named_modules())[name]


def flip(engine: Engine) -> None:
    """A bit of a weight turns over after the second update."""
    plain = engine.optimizer_step

    def step(rate: float) -> None:
        plain(rate)
        if engine.step == 2:
            flip_bit(_parameter(engine, WEIGHT), 3)

    engine.optimizer_step = step  # type: ignore[method-assign]


def wrong(engine: Engine) -> None:
    """A layer computes wrongly, every time in the same way."""
    _module(engine, LAYER).register_forward_hook(lambda module, args, output: output * (1 + 1e-9))


def noise(engine: Engine) -> None:
    """A layer puts out something else at each pass."""
    calls: list[int] = []

    def disturb(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls.append(1)
        return output + 1e-9 * len(calls)

    _module(engine, LAYER).register_forward_hook(disturb)


def backward_noise(engine: Engine) -> None:
    """The backward pass of a layer gives something else each time."""
    calls: list[int] = []

    def back(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient * (1 + 1e-9 * len(calls))

    def disturb(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(back)

    _module(engine, LAYER).register_forward_hook(disturb)


def write(engine: Engine) -> None:
    """The end of the backward pass writes into a gradient whose sum began long before."""
    late, early = _parameter(engine, "head.weight"), _parameter(engine, "embed.weight")

    def accumulate(parameter: Tensor) -> None:
        assert late.grad is not None
        with torch.no_grad():
            late.grad.view(-1)[0] += 1e-6

    early.register_post_accumulate_grad_hook(accumulate)


PLANTS: dict[str, Callable[[Engine], None]] = {
    "flip": flip,
    "wrong": wrong,
    "noise": noise,
    "backward noise": backward_noise,
    "write": write,
}


def _built(plant: str, liar: int, job: JobConfig, layout: Any, rank: int, *words: Any) -> Engine:
    engine = build_engine(job, layout, rank, *words)
    if plant and rank == liar:
        PLANTS[plant](engine)
    return engine


def compared(
    job: Job, config: JobConfig, spec: GenerationSpec, folder: str, kind: str, plant: str, liar: int
) -> tuple[Outcome, dict[str, Any]]:
    """Run a generation, and have all ranks look at one step; the outcome, and what this rank tells."""
    arm = {"what": "arm", "key": "k", "kind": kind, "wait": 0, "warmup": 0, "active": 1}
    go = {"what": "go", "key": "k", "rank": 0, "after_s": 0.1}
    ready = {"what": "state", "key": "k", "until": {"state": "done"}}
    with patch.object(generation, "build_engine", partial(_built, plant, liar)):
        outcome, answers = tool_jobs.ordered(job, config, spec, folder, [arm, go, ready])
    last = answers[-1]
    assert last["state"] == "done", last
    return outcome, json.loads((Path(folder) / last["file"]).read_text())


def checked(job: Job, config: JobConfig, spec: GenerationSpec, folder: str, plant: str, liar: int) -> Outcome:
    """Run a generation to its end."""
    home = resources_of(config, Path(folder))
    with patch.object(generation, "build_engine", partial(_built, plant, liar)):
        return generation.GenerationRun(home, spec, (job.host, job.port)).run()
