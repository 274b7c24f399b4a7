"""Values that a dry run knows without computing: routes of a mixture, spread evenly over its experts.

Shapes behind a router may depend on how many rows each expert gets. Where the host asks for that
(`models.layers.expert_counts`), here every expert gets as many, the first ones one more where they do not
divide, on every rank of the ep group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from picotron_ray.models.layers import expert_counts
from picotron_ray.parallel.expert import expert_parallel


def even_counts(counts: Tensor, total: int) -> list[list[int]]:
    """Stand for `expert_counts.read_counts`: ``total`` in as many parts as there are experts.

    >>> even_counts(torch.empty(2, 3), 7)
    [[3, 2, 2], [3, 2, 2]]
    """
    kinds, experts = counts.shape
    whole, rest = divmod(total, experts)
    return [[whole + (expert < rest) for expert in range(experts)] for _ in range(kinds)]


@contextlib.contextmanager
def routes_are_even() -> Iterator[None]:
    """Enter routes that spread evenly."""
    with (
        patch.object(expert_counts, "read_counts", even_counts),
        patch.object(expert_parallel, "read_counts", even_counts),
    ):
        yield


def known_result(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator that fake tensors are not asked for; None for all others.

    Of one that reads a number: 1, whatever the tensor. Of a product that is added to a wider sum: the sum,
    for which torch has no fake kernel before 2.13, and later one that makes the product first.
    """
    if func is torch.ops.aten.addmm.dtype_out:
        return kwargs["out"]
    if func is not torch.ops.aten._local_scalar_dense.default or not hasattr(args[0], "fake_mode"):
        return None
    tensor = args[0]
    if tensor.constant is not None:
        return tensor.constant.item()
    return 1.0 if tensor.is_floating_point() else 1
