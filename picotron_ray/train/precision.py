"""What "fp64", "fp32" and "bf16" mean: parameters, gradients and moments keep master precision.

bf16 runs matrix products in bfloat16 under autocast; weights, gradients, moments, reductions and the
residual stream stay fp32. Casting the parameters themselves would lose small updates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from picotron_ray.config.job import JobConfig


def master_dtype(job: JobConfig) -> torch.dtype:
    """Type of parameters, gradients and optimizer moments."""
    return torch.float64 if job.precision == "fp64" else torch.float32


def apply_precision(model: nn.Module, job: JobConfig, device: torch.device) -> None:
    """Make ``model``'s forward compute in the job's precision, in place."""
    if job.precision != "bf16":
        return
    inner = model.forward

    def forward(*inputs: Tensor, **named: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return inner(*inputs, **named)

    model.forward = forward
