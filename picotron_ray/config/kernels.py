"""Which attention kernels a device offers, for a precision, a width of heads and a layout. Torch-free."""

from __future__ import annotations

from typing import Literal

from picotron_ray.config.job import JobConfig

Backend = Literal["flash", "efficient", "cudnn", "flash-attn", "math"]


def attention_backends(job: JobConfig, device: str, cp: int) -> list[Backend]:
    """What ``kernels.attention`` may be on a device (``cpu`` or ``cuda``), the one of ``auto`` first.

    With context parallelism only kernels that give their log-sum-exp will do, with document masks only those
    that take a mask, with adaptive precision those that fp32 has too.
    """
    offered = _all_backends(job, device, cp)
    if job.data.document_masks and device != "cpu":
        return [backend for backend in offered if backend in ("efficient", "math")]
    return offered


def _all_backends(job: JobConfig, device: str, cp: int) -> list[Backend]:
    half = job.precision in ("bf16", "fp16", "fp8") and job.adaptive_precision.error_bound is None
    if device == "cpu":
        return ["flash", "math"]
    if not half:
        efficient: list[Backend] = [] if cp > 1 or job.precision == "fp64" else ["efficient"]
        return [*efficient, "math"]
    aligned = job.model.head_size % 8 == 0
    flash: list[Backend] = ["flash"] if aligned else []
    if cp > 1:
        return [*flash, "math"]
    others: list[Backend] = ["cudnn", "flash-attn"] if aligned else []
    return [*flash, *others, "efficient", "math"]


def attention_problem(job: JobConfig, device: str, cp: int) -> str | None:
    """Why ``kernels.attention`` cannot be had there, in words; None where it can."""
    asked = job.kernels.attention
    offered = attention_backends(job, device, cp)
    if asked == "auto" or asked in offered:
        return None
    where = f"{device} with precision {job.precision}" + (" and context parallelism" if cp > 1 else "")
    where += " and document masks" if job.data.document_masks else ""
    return f"saw {asked}, expected auto or one of {', '.join(offered)} on {where}"


def groups_experts(job: JobConfig, device: str) -> bool:
    """Whether the products of experts are grouped on a device."""
    asked = job.kernels.experts
    return asked == "grouped" or (asked == "auto" and device == "cuda" and job.precision != "fp64")
