"""The precision of a job: parameters, gradients, moments and reductions keep master precision.

bf16 and fp16 run matrix products in their format under autocast, tf32 in the format of NVIDIA's tensor cores.
Weights, gradients, moments, reductions and the residual stream stay fp32: casting the parameters themselves
would lose small updates. fp8 computes the products of linear layers inside blocks (`parallel.precision.fp8`)
and leaves the rest to bf16. fp16 scales its loss (`loss_scaler`).
"""

from __future__ import annotations

import torch

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.precision import precision_problem
from picotron_ray.errors import LayoutError

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def autocast_dtype(job: JobConfig) -> torch.dtype | None:
    """Return the type of matrix products under autocast; None: that of the parameters."""
    return AUTOCAST.get(job.precision)


def master_dtype(job: JobConfig) -> torch.dtype:
    """Return the type of parameters, gradients and optimizer moments."""
    return torch.float64 if job.precision == "fp64" else torch.float32


def check_precision(job: JobConfig, device: torch.device) -> None:
    """Raise LayoutError if this device does not compute in the job's precision, or launch left it open."""
    if job.precision == "auto":
        raise LayoutError("precision: saw auto, which launch settles before workers start; name one")
    cuda = device.type == "cuda"
    problem = precision_problem(job, device.type, [torch.cuda.get_device_capability(device)] if cuda else ())
    if problem:
        raise LayoutError(f"precision: {problem}")


def set_matrix_products(job: JobConfig) -> None:
    """Choose whether fp32 matrix products of this process run in TF32: a setting of the whole process."""
    torch.backends.cuda.matmul.allow_tf32 = job.precision == "tf32"


def orthogonalization_dtype(job: JobConfig, device: torch.device) -> torch.dtype:
    """Return the type of Muon's Newton-Schulz iteration: bfloat16 suffices (Jordan et al. 2024).

    On CPUs, products in bfloat16 are no faster: there it is the master type.
    """
    return torch.bfloat16 if job.precision in ("bf16", "fp8") and device.type == "cuda" else master_dtype(job)
