"""Attention of a model whose parts compute in different types: the asked kernel in 16 bits, another in fp32.

FlashAttention knows no fp32. Under adaptive precision the parts in low precision keep it all the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from picotron_ray.parallel.attention.backends import RowAttention

NARROW = frozenset({torch.bfloat16, torch.float16})


def by_type(narrow: RowAttention, wide: RowAttention) -> RowAttention:
    """Return a kernel that is ``narrow`` for queries in 16 bits, and ``wide`` for others."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None = None,
        window: int | None = None,
        *sinks: Tensor,
    ) -> Tensor:
        return (narrow if q.dtype in NARROW else wide)(q, k, v, documents, window, *sinks)

    return attend
