"""What a job computes with that only an extra installs. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.optimizer import TORCHAO as MOMENTS_TORCHAO
from picotron_ray.config.support.precision import TORCHAO


class Extra(NamedTuple):
    """A package that has to be there: its module and distribution, and what to say where it is not."""

    key: str
    module: str
    distribution: str
    missing: str


def needed_extras(job: JobConfig) -> list[Extra]:
    """Those of a job, which all its nodes must have, in one version."""
    found = []
    if job.precision == "fp8":
        found.append(Extra("precision", "torchao", "torchao", f"saw fp8, {TORCHAO}"))
    if job.optimizer.moments == "8bit":
        found.append(Extra("optimizer.moments", "torchao", "torchao", f"saw 8bit, {MOMENTS_TORCHAO}"))
    if job.kernels.attention == "flash-attn":
        text = "saw flash-attn, which is not there; install picotron-ray[flash] on every node, or use auto"
        found.append(Extra("kernels.attention", "flash_attn", "flash-attn", text))
    return found
