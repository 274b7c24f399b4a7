"""Torch's autocast around a stage's forward pass, for what does not compute in one type by itself.

- Models of the user's own may mix types (buffers, masks and constants in fp32). Weights and what goes from
  one stage to the next are in 16 bits all the same; logits are what the model makes of them.
- Under adaptive precision weights and the residual stream are fp32, and the parts that bear it compute their
  products in 16 bits. The others leave autocast (`precision.switches`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def apply_autocast(
    model: nn.Module, device: torch.device, dtype: torch.dtype, stream: torch.dtype | None, *, gathers: bool
) -> None:
    """Run ``model``'s forward pass under autocast, in place.

    Args:
        dtype: the type of matrix products.
        stream: the type of what the stage returns; None: it is left as it is.
        gathers: whether FSDP frees and gathers weights around each use (ZeRO-3). Then no cast of a weight is
            kept for a second use.
    """
    inner = model.forward

    def forward(*inputs: Tensor, **named: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=dtype, cache_enabled=not gathers):
            found: Tensor = inner(*inputs, **named)
        return found if stream is None else found.to(stream)

    model.forward = forward
