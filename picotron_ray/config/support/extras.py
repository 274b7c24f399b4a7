"""Packages that a job needs and that only an extra installs. Torch-free."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.optimizer import TORCHAO as MOMENTS_TORCHAO
from picotron_ray.config.support.precision import TORCHAO
from picotron_ray.errors import install_extra


class Extra(NamedTuple):
    """Required package: its module and distribution, and the message where it is missing."""

    key: str
    module: str
    distribution: str
    missing: str


def is_there(module: str) -> bool:
    """Whether a module, or what it is part of, is installed."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def needed_extras(job: JobConfig) -> list[Extra]:
    """List the packages of a job; all its nodes must have them, in one version."""
    found = []
    if job.precision == "fp8":
        found.append(Extra("precision", "torchao", "torchao", f"saw fp8, {TORCHAO}"))
    if job.optimizer.moments == "8bit":
        found.append(Extra("optimizer.moments", "torchao", "torchao", f"saw 8bit, {MOMENTS_TORCHAO}"))
    if job.kernels.attention == "flash-attn":
        text = f"saw flash-attn, which is not there; on every node {install_extra('flash')}, or use auto"
        found.append(Extra("kernels.attention", "flash_attn", "flash-attn", text))
    if job.telemetry.otel.endpoint is not None:
        name = "opentelemetry-exporter-otlp-proto-http"
        text = f"saw a collector, but {name} is not there; on every node {install_extra('otel')}"
        found.append(Extra("telemetry.otel.endpoint", "opentelemetry.exporter.otlp.proto.http", name, text))
    return found
