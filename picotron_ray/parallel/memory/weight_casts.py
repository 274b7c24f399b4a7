"""Casts of weights for matrix products: told apart from activations, and made again under ZeRO-3.

Autograd saves what autocast makes for the backward pass. That is a second copy of every weight in the narrow
type, whole, from its forward to its backward pass: under ZeRO-3, which keeps a block's weights no longer than
it computes, it would be all of a large model on every rank. There what is saved is the parameter itself,
whose storage FSDP frees and fills again, and the backward pass casts it once more. Autocast keeps no casts
for a second use, of which there is none.
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
"""Nodes of the graph that give a parameter in another type or shape."""
_OF_SEVERAL = frozenset({"_JoinBackward"})
"""Those that give several as one (models.joint)."""
_PARAMETER = "torch::autograd::AccumulateGrad"


def of_a_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or a cast or view of one or of several."""
    node = tensor.grad_fn
    return isinstance(tensor, nn.Parameter) if node is None else _of_parameters(node)


def _of_parameters(node: Any) -> bool:
    if node.name() == _PARAMETER:
        return True
    behind = [before for before, _ in node.next_functions if before is not None]
    return node.name() in _SAME_VALUES | _OF_SEVERAL and bool(behind) and all(map(_of_parameters, behind))


class Recast(NamedTuple):
    """A cast of a parameter, or a view of that, which is made again when it is wanted."""

    parameter: Tensor
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def made(self) -> Tensor:
        parameter = self.parameter.detach()
        offset = parameter.storage_offset() + self.offset
        return parameter.as_strided(self.size, self.stride, offset).to(self.dtype)


def recast(tensor: Tensor) -> Tensor | Recast:
    """What to save in place of a tensor: a `Recast` where it is a parameter's cast, else itself."""
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
    """The tensor that `recast` was given."""
    return saved.made() if isinstance(saved, Recast) else saved


def saving_no_casts(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, which saves parameters where it would save their casts."""

    def saving(*inputs: Any, **named: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(recast, made):
            return forward(*inputs, **named)

    return saving
