"""A model of the user's own that cannot use its tasks is refused before a launch, in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.train.custom_model.inspect import inspect


class Counting(nn.Module):
    """Writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.line(x)


class Detached(nn.Module):
    """Has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).detach() + 0 * self.line.weight.sum()


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 2 * slope


class Kernel(nn.Module):
    """Has a kernel of its own, as a fused attention would."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return _Once.apply(self.line(x))


def counting() -> nn.Module:
    return Counting()


def detached() -> nn.Module:
    return Detached()


def kernel() -> nn.Module:
    return Kernel()


def classes(generator: np.random.Generator, examples: int) -> Any:
    """Points and which of two halves they are in."""
    points = generator.normal(size=(examples, 1))
    return points, (points[:, 0] > generator.normal()).astype(np.int64)


def job_of(
    builder: str = "picotron_ray.models.regressor:build", tasks: str = "sinusoids", **more: Any
) -> JobConfig:
    arguments = more.pop("arguments", {})
    model = {"vocab_size": 2, "builder": builder, "arguments": arguments}
    return parse_job({"model": model, "meta": {"strategy": "maml", "tasks": tasks, **more}})


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (
            job_of(arguments={"outputs": 2}),
            "forward of inputs [5, 1] of sinusoids gives [5, 2], expected [5, 1], as",
        ),
        (job_of(arguments={"inputs": 3}), "forward of inputs [5, 1] of sinusoids raises RuntimeError"),
        (job_of(tasks=f"{__name__}:classes"), "gives [5, 1], expected [5, 2], logits of model.vocab_size"),
        (job_of(f"{__name__}:counting"), "a step of maml raises RuntimeError: During a grad"),
        (job_of(f"{__name__}:detached"), "the loss of a task has no gradient"),
        (
            job_of(f"{__name__}:kernel"),
            "a step of maml raises RuntimeError: In order to use an autograd.Function",
        ),
        (
            job_of(inner_rate=1e30),
            "meta.inner_rate: saw 1e+30, by which 5 inner steps of a task give a loss or",
        ),
    ],
)
def test_one_line(job: JobConfig, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        inspect(job)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_of_classes_is_taken() -> None:
    built, said = inspect(job_of(tasks=f"{__name__}:classes", arguments={"outputs": 2}))
    assert (built.hidden_size, built.blocks, built.tensor_degrees) == (2, (), ())
    assert said[0].endswith(f"tried on a task of {__name__}:classes")
