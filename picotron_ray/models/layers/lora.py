"""Linear layers with low-rank adapters (Hu et al. 2021, LoRA): ``W x + b + alpha / rank · B (A x)``."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LoraLinear(nn.Linear):
    """A linear layer and its adapter: ``lora_a [rank, in]``, ``lora_b [out, rank]``.

    The matrices are parameters of this module, so that the weight keeps its name.

    Fields:
        scale: alpha / rank.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, rank: int, alpha: float) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, inputs))
        self.lora_b = nn.Parameter(torch.empty(outputs, rank))

    def raised(self, low: Tensor) -> Tensor:
        """Multiply ``A x`` by B and the scale: ``[..., rank]`` → ``[..., out]``."""
        return F.linear(low, self.lora_b) * self.scale

    def product(self, x: Tensor) -> Tensor:
        """``[..., in]`` → ``[..., out]``, without the bias."""
        return F.linear(x, self.weight) + self.raised(F.linear(x, self.lora_a))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.raised(F.linear(x, self.lora_a))


def add_adapters(model: nn.Module, chosen: Collection[str], rank: int, alpha: float) -> int:
    """Replace linear layers by ones with adapters, in place and on the meta device; returns their number.

    Args:
        chosen: names of the layers; those that this stage lacks are another's.
    """
    found = [(name, module) for name, module in model.named_modules() if name in chosen]
    for name, module in found:
        assert isinstance(module, nn.Linear), f"{name} is a {type(module).__name__}, no linear layer"
        owner, _, leaf = name.rpartition(".")
        biased = module.bias is not None
        with torch.device("meta"):
            adapted = LoraLinear(module.in_features, module.out_features, biased, rank, alpha)
        setattr(model.get_submodule(owner), leaf, adapted)
    return len(found)
