"""Casts of weights that autocast makes: recognized among saved tensors, and recomputed under ZeRO-3.

Autograd saves autocast's results for the backward pass. For every weight that is a second, whole copy in the
narrow type, from its forward to its backward pass. ZeRO-3 keeps a block's weights only while it computes, so
those copies would put all of a large model on every rank. Under ZeRO-3 the parameter itself is saved instead:
FSDP frees its storage and fills it again, and the backward pass repeats the cast. Autocast's own cache is
off, as each cast has a single use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_SAME_VALUES = frozenset(
    f"{name}Backward0"
    for name in ("ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "Unsqueeze", "Select", "Slice")
)
"""Graph nodes that return a parameter in another type or shape."""
_OF_SEVERAL = frozenset({"_JoinBackward"})
"""Graph nodes that return several parameters as one (`models.layers.fused_linear`)."""
_PARAMETER = "torch::autograd::AccumulateGrad"


def of_a_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter, or a cast or view of one or of several."""
    node = tensor.grad_fn
    return isinstance(tensor, nn.Parameter) if node is None else _of_parameters(node)


def _of_parameters(node: Any) -> bool:
    if node.name() == _PARAMETER:
        return True
    behind = [before for before, _ in node.next_functions if before is not None]
    return node.name() in _SAME_VALUES | _OF_SEVERAL and bool(behind) and all(map(_of_parameters, behind))


class Recast(NamedTuple):
    """Recipe of a parameter's cast, or of a view of it."""

    parameter: Tensor
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def made(self) -> Tensor:
        """Repeat the cast."""
        parameter = self.parameter.detach()
        offset = parameter.storage_offset() + self.offset
        return parameter.as_strided(self.size, self.stride, offset).to(self.dtype)


def recast(tensor: Tensor) -> Tensor | Recast:
    """Return a `Recast` to save in place of a parameter's cast; any other tensor as it is."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _SAME_VALUES:
        node = node.next_functions[0][0]
    if node is None or node.name() != _PARAMETER:
        return tensor
    parameter = node.variable
    if parameter.dtype == tensor.dtype or not parameter.is_contiguous():
        return tensor
    offset = int(tensor.storage_offset())
    return Recast(parameter, tensor.dtype, tuple(tensor.size()), tensor.stride(), offset)


def made(saved: Tensor | Recast) -> Tensor:
    """Return the tensor that `recast` was given."""
    return saved.made() if isinstance(saved, Recast) else saved


def saving_no_casts(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward`` so that it saves parameters in place of their casts."""

    def saving(*inputs: Any, **named: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(recast, made):
            return forward(*inputs, **named)

    return saving
