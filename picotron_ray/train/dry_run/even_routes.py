"""Values that a dry run knows without computing: routes of a mixture, spread evenly over its experts.

Shapes behind a router depend on how many rows each expert gets. Here every expert gets as many (the first
ones one more where they do not divide), on every rank of the ep group. Fake tensors carry small constants
along; here they carry these counts, and all that is computed from them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch._subclasses.fake_tensor as fake_tensors
from torch import Tensor

MOST = 2**31
"""Elements of a constant; torch's own limit is one."""


@contextlib.contextmanager
def counts_are_carried() -> Iterator[None]:
    """Enter fake tensors whose constants may have any number of elements."""
    with patch.object(fake_tensors, "CONSTANT_NUMEL_LIMIT", MOST):
        yield


def known_result(func: Any, args: Any) -> Any:
    """The result of an operator whose value decides on shapes; None for all others.

    What the host reads is a constant's value where there is one, else 1. No assignment of a token is dropped
    (``count_nonzero``), and experts get as many as each other (``bincount``).
    """
    if func not in KNOWN or not hasattr(args[0], "fake_mode"):
        return None
    return KNOWN[func](*args)


def _read(tensor: Any) -> float | int:
    if tensor.constant is not None:
        value: float | int = tensor.constant.item()
        return value
    return 1.0 if tensor.is_floating_point() else 1


def _none_dropped(tensor: Any) -> Any:
    with fake_tensors.unset_fake_temporarily():
        found = torch.zeros((), dtype=torch.int64)
    return _constant(tensor.fake_mode, found)


def _even_counts(experts: Any, weights: None, number: int) -> Any:
    """Counts ``[number]`` of so many assignments, as even as they go."""
    whole, rest = divmod(experts.numel(), number)
    with fake_tensors.unset_fake_temporarily():
        counts = torch.full((number,), whole, dtype=torch.int64)
        counts[:rest] += 1
    return _constant(experts.fake_mode, counts)


KNOWN: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._local_scalar_dense.default: _read,
    torch.ops.aten.count_nonzero.default: _none_dropped,
    torch.ops.aten.bincount.default: _even_counts,
}


def exchanged(func: Any, args: Any) -> Any:
    """Counts that an all-to-all will bring: as many as are sent, since every rank routes alike.

    Forgets what is received into: torch would exchange constants for real.

    Returns:
        The constant to give to the received tensor afterwards; None where nothing is known.
    """
    if func is not torch.ops.c10d.alltoall_base_.default or getattr(args[1], "constant", None) is None:
        return None
    args[0].constant = None
    with fake_tensors.unset_fake_temporarily():
        return args[1].constant.clone()


def _constant(mode: Any, values: Tensor) -> Any:
    return mode.fake_tensor_converter.from_real_tensor(mode, values, make_constant=True)
