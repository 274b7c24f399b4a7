"""Hashes of what passes through the modules of a model, forward and backward, in the order in which it does.

They are made on the device and read at the end. Modules inside of compiled blocks are left out: a hook there
would have the block compiled anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from picotron_ray.train.engine import Engine
from picotron_ray.train.tensor_hash import tensor_hash

Hashed = list[tuple[str, int]]
"""Names and hashes, in order."""
MOST_HASHES = 100_000


class LayerHashes:
    """Hooks on all modules of an engine; ``close`` removes them."""

    def __init__(self, engine: Engine, *, compiled: bool) -> None:
        """``compiled``: blocks are made by torch.compile."""
        self._forward: list[tuple[str, Tensor]] = []
        self._backward: list[tuple[str, Tensor]] = []
        self._hooks = [
            module.register_forward_hook(_OutputNote(self, name))
            for name, module in hooked_modules(engine, compiled)
        ]

    def forward(self, name: str, output: Any) -> None:
        """Note what a module puts out, and later what comes back to it."""
        for at, tensor in enumerate(tensors_in(output)):
            place = name if not at else f"{name}[{at}]"
            _add(self._forward, place, tensor)
            if tensor.requires_grad:
                tensor.register_hook(_GradientNote(self, place))

    def backward(self, name: str, gradient: Tensor) -> None:
        """Note a gradient of a module's output."""
        _add(self._backward, name, gradient)

    def take(self) -> tuple[Hashed, Hashed]:
        """Return what was noted since, forward and backward, and begin anew."""
        found = _read(self._forward), _read(self._backward)
        self._forward.clear()
        self._backward.clear()
        return found

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _OutputNote:
    def __init__(self, hashes: LayerHashes, name: str) -> None:
        self._hashes, self._name = hashes, name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._hashes.forward(self._name, output)


class _GradientNote:
    def __init__(self, hashes: LayerHashes, name: str) -> None:
        self._hashes, self._name = hashes, name

    def __call__(self, gradient: Tensor) -> None:
        self._hashes.backward(self._name, gradient)


def hooked_modules(engine: Engine, compiled: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by name, without those inside of compiled ones; a stage itself is ``model``."""
    inside: list[str] = []
    for name, module in engine.named_modules():
        if any(name.startswith(f"{outer}.") for outer in inside):
            continue
        if compiled and name and "forward" in vars(module):
            inside.append(name)
        yield name or "model", module


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a module's output."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, tuple | list):
        for each in output:
            yield from tensors_in(each)


def _add(noted: list[tuple[str, Tensor]], name: str, tensor: Tensor) -> None:
    if len(noted) < MOST_HASHES:
        noted.append((name, tensor_hash(tensor)))


def _read(noted: list[tuple[str, Tensor]]) -> Hashed:
    if not noted:
        return []
    values = torch.stack([value for _, value in noted]).tolist()
    return [(name, value) for (name, _), value in zip(noted, values, strict=True)]
