"""Parameters among the tensors that autograd saves for the backward pass."""

from __future__ import annotations

from typing import Any

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
