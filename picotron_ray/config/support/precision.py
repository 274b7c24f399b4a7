"""Precisions of devices, and the choice behind ``precision: auto``. Torch-free.

``auto`` is settled once, at a run's first launch, from the devices of all nodes that are there: bf16 where
each of them has it in hardware, else fp16 on CUDA, fp32 where workers run on CPUs. It becomes the run's
precision for good (fp16 has a loss scale in its state, the others have none): a later launch goes on with it,
and a node whose devices do not have it may not take part.

On CPUs it is fp32 because products in bf16 are faster only on those with instructions for them (AVX512-BF16,
AMX), which a cluster's nodes need not all have; ``bench mfu --ablate`` measures both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from picotron_ray.config.schema.compute import Precision
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import install_extra

Capability = tuple[int, int]
"""CUDA compute capability of a device: major, minor."""

LEAST_CAPABILITY: dict[Precision, Capability] = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}
"""Where a format needs hardware that not every CUDA device has (CUDA C++ Programming Guide, 5.1)."""

LEAST_MX_CAPABILITY: Capability = (10, 0)
"""Where a product of blocks of 32 values with a scale each is one instruction (Blackwell)."""

COMPUTE_BYTES: dict[Precision, int] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 2,
    "auto": 4,
}
"""Per element of what matrix products take and give; of auto the widest that it may come to."""

TORCHAO = f"which needs torchao; on every node {install_extra('fp8')}, or use bf16"
"""What to do where fp8 cannot be computed for want of it."""

_CHOICES: dict[str, tuple[Precision, ...]] = {
    "cpu": ("fp32",),
    "cuda": ("bf16", "fp16"),
    "auto": ("bf16", "fp16", "fp32"),
}
"""What auto may come to, by ``cluster.device``."""


def chosen(device: str, capabilities: Iterable[Capability]) -> tuple[Precision, str]:
    """Choose what ``precision: auto`` comes to on all of these devices; returns it and the reason.

    Args:
        device: ``cpu`` or ``cuda``.
        capabilities: of every CUDA device, at least one; not looked at for ``cpu``.
    """
    if device == "cpu":
        return "fp32", "workers run on CPUs"
    least = min(capabilities)
    why = f"the least compute capability is {_shown(least)}"
    return ("bf16" if least >= LEAST_CAPABILITY["bf16"] else "fp16"), why


def possible(job: JobConfig) -> tuple[JobConfig, ...]:
    """List the job with each precision that it may come to; itself where that is named."""
    if job.precision != "auto":
        return (job,)
    choices = _CHOICES[job.cluster.device]
    return tuple(job.model_copy(update={"precision": choice}) for choice in choices)


def outlook(job: JobConfig) -> str:
    """Describe what ``precision: auto`` will come to, as far as the config tells; empty where it is named."""
    if job.precision != "auto":
        return ""
    on_cuda = "on CUDA bf16 if every device has compute capability 8.0 or later, else fp16"
    said = {"cpu": "fp32, workers run on CPUs", "cuda": on_cuda, "auto": f"{on_cuda}; on CPUs fp32"}
    return f"precision: auto comes to {said[job.cluster.device]}; a run keeps it"


def precision_problem(job: JobConfig, device: str, capabilities: Sequence[Capability] = ()) -> str | None:
    """Explain why the job's precision cannot be had on a machine; None where it can.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` where it is not known yet.
        capabilities: of the machine's CUDA devices, of which one has to have it; empty: not known.
    """
    if job.precision in ("tf32", "fp8") and device == "cpu":
        return f"saw {job.precision}, which CPUs do not have; use fp32 or bf16"
    least, saw, other = LEAST_CAPABILITY.get(job.precision), str(job.precision), "fp16"
    if job.precision == "fp8":
        mx = job.fp8.scaling == "mxfp8"
        least, saw, other = (LEAST_MX_CAPABILITY, "mxfp8", "rowwise") if mx else (least, saw, "bf16")
    if least is None or device != "cuda" or not capabilities or max(capabilities) >= least:
        return None
    return (
        f"saw {saw}, which needs compute capability {_shown(least)} or later, on devices of"
        f" {_shown(max(capabilities))}; use {other} or {'bf16' if saw == 'mxfp8' else 'fp32'}"
    )


def _shown(capability: Capability) -> str:
    return ".".join(map(str, capability))
