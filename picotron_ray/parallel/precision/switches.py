"""Switches between low and full precision, one for each part of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn


class PrecisionSwitches:
    """The parts that compute under the surrounding autocast; all do at first.

    Args:
        parts: names of modules, the same on all ranks. None of them lies within another.
        full: the type of parameters, in which the other parts compute.
    """

    def __init__(self, parts: Iterable[str], device: torch.device, full: torch.dtype) -> None:
        self._parts = frozenset(parts)
        self._device, self._full = device, full
        self._low = set(self._parts)

    def set(self, low: Collection[str]) -> None:
        """Let these parts compute in low precision from now on, the others in full."""
        self._low = set(low)

    def install(self, model: nn.Module) -> None:
        """Put a switch into every part of ``model``, in place."""
        for name, module in model.named_modules():
            if name in self._parts:
                self._wrap(name, module)

    def _wrap(self, name: str, module: nn.Module) -> None:
        inner = module.forward

        def forward(*inputs: Tensor | None, **named: Tensor | None) -> Tensor:
            if name in self._low:
                return inner(*inputs, **named)
            with torch.autocast(self._device.type, enabled=False):
                return inner(*map(self._raised, inputs), **{k: self._raised(x) for k, x in named.items()})

        module.forward = forward

    def _raised(self, x: Tensor | None) -> Tensor | None:
        return x.to(self._full) if isinstance(x, Tensor) and x.is_floating_point() else x
