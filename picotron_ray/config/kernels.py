"""Which attention kernels a device offers, for a precision, a width of heads and a layout. Torch-free."""

from __future__ import annotations

from typing import Literal

from picotron_ray.config.job import JobConfig

Backend = Literal["flash", "efficient", "cudnn", "flash-attn", "math"]


def attention_backends(job: JobConfig, device: str, cp: int) -> list[Backend]:
    """What ``kernels.attention`` may be on a device (``cpu`` or ``cuda``), the one of ``auto`` first.

    With context parallelism only kernels that give their log-sum-exp will do.
    """
    half = job.precision == "bf16"
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
    return f"saw {asked}, expected auto or one of {', '.join(offered)} on {where}"
