"""Mixed precision by torch's autocast around a stage's whole forward pass.

Matrix products run in the narrow type. Weights, gradients, reductions and the residual stream keep theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from picotron_ray.parallel.memory.weight_casts import saving_no_casts


def apply_autocast(model: nn.Module, device: torch.device, dtype: torch.dtype, *, gathers: bool) -> None:
    """Run ``model``'s forward pass under autocast, in place.

    Args:
        dtype: the type of matrix products.
        gathers: whether FSDP frees and gathers weights around each use (ZeRO-3). Then no cast of a weight
            outlives its use (`memory.weight_casts`).
    """
    inner = saving_no_casts(model.forward) if gathers else model.forward

    def forward(*inputs: Tensor, **named: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=dtype, cache_enabled=not gathers):
            found: Tensor = inner(*inputs, **named)
            return found

    model.forward = forward
