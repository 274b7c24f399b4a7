"""Peaks that MFU refers to: what a worker's device could do, and who says so. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.planner.model_sizes import flops_per_token

BF16_DENSE_TFLOPS = {
    r"NVIDIA H100 80GB HBM3": 989.0,
    r"NVIDIA H200": 989.0,
    r"NVIDIA A100.*": 312.0,
    r"NVIDIA B200": 2250.0,
}
"""CUDA device name (whole, a regular expression) → peak of dense bf16 matrix products, by its data sheet."""


class Peak(NamedTuple):
    """Operations per second of one worker's device, and where the figure is from."""

    flops: float
    source: str


def rated_precision(job: JobConfig) -> str:
    """Precision whose peak a job's MFU refers to: for fp8 that of bf16, as others quote it."""
    return "bf16" if job.precision == "fp8" else job.precision


def known_peak(device_name: str, precision: str) -> float | None:
    """Look up the FLOP/s of a data sheet; None where the table lacks the device or precision."""
    for pattern, tflops in BF16_DENSE_TFLOPS.items():
        if precision == "bf16" and re.fullmatch(pattern, device_name):
            return tflops * 1e12
    return None


def peak_of_worker(job: JobConfig, device_names: set[str]) -> Peak | None:
    """The peak of a run's workers; None where nobody knows one.

    Args:
        device_names: product names of all devices that they compute on; empty: CPUs, or not known.
    """
    if job.telemetry.peak_tflops is not None:
        return Peak(job.telemetry.peak_tflops * 1e12, "telemetry.peak_tflops")
    if len(device_names) != 1:
        return None
    (name,) = device_names
    flops = known_peak(name, rated_precision(job))
    return None if flops is None else Peak(flops, f"{name}, dense bf16 by its data sheet")


def mfu_ratio(job: JobConfig, tokens_per_s: float, workers: int, peak: Peak) -> float:
    """Model FLOPs utilisation (PaLM, Chowdhery et al. 2022, appendix B): the share of the devices' peak that
    the model's training needs, recomputation not counted.
    """
    flops = flops_per_token(job.model, job.data.sequence_length)
    return tokens_per_s * flops / (max(1, workers) * peak.flops)
