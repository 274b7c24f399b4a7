"""Packages that a job needs and that only an extra installs. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.optimizer import TORCHAO as MOMENTS_TORCHAO
from picotron_ray.config.support.precision import TORCHAO


class Extra(NamedTuple):
    """Required package: its module and distribution, and the message where it is missing."""

    key: str
    module: str
    distribution: str
    missing: str


def needed_extras(job: JobConfig) -> list[Extra]:
    """List the packages of a job; all its nodes must have them, in one version."""
    found = []
    if job.precision == "fp8":
        found.append(Extra("precision", "torchao", "torchao", f"saw fp8, {TORCHAO}"))
    if job.optimizer.moments == "8bit":
        found.append(Extra("optimizer.moments", "torchao", "torchao", f"saw 8bit, {MOMENTS_TORCHAO}"))
    if job.kernels.attention == "flash-attn":
        text = "saw flash-attn, which is not there; install picotron-ray[flash] on every node, or use auto"
        found.append(Extra("kernels.attention", "flash_attn", "flash-attn", text))
    return found
