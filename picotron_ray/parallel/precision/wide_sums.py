"""Products of 16-bit matrices that are added to a wider sum, as the weight's gradient is over chunks.

On CUDA the product's kernel adds to the fp32 sum itself (``torch.addmm`` with ``out_dtype``, torch >= 2.10;
the sum is read and written in place): one pass instead of three over what is as large as the weight, nothing
is rounded to 16 bits between, and no product is held. Elsewhere torch has no such kernel: the product is made
in the type of its factors and then added.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDENING = frozenset({"cuda"})
"""Types of device whose products are added to a wider sum by their own kernel."""


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total`` in place, in the type of ``total``.

    Args:
        total: ``[m, n]``, in the type of the factors or a wider one.
        a: ``[m, k]``; b ``[k, n]`` of the same type.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif _widens(total, a):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _widens(total: Tensor, a: Tensor) -> bool:
    narrow = a.dtype in (torch.bfloat16, torch.float16)
    return a.device.type in WIDENING and narrow and total.dtype == torch.float32
