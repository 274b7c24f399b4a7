"""Linear layers of one input as one matrix product, each keeping its own parameters.

Queries, keys and values, or gate and up, are then one kernel launch over a wider matrix, which reads its
input once. Names, gradients, optimizer state and checkpoints stay those of the single layers.

Where nothing gathers weights, they lie one after the other in one storage that the product reads
(`FusedLinear.lay_together`). Where FSDP gathers each by itself, or autocast casts them, they are copied into
one matrix at each use, by the cast itself if there is one. A copy is never older than the forward pass that
uses it.

Layers that stay a product each can be a `FusedLinear` too: tensor parallelism then gathers their input once
for all of them (`parallel.tensor.overlap`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_ray.models.layers.lora import LoraLinear

Products = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor | None]], Sequence[Tensor]]
"""(x ``[..., in]``, weights ``[out, in]``, a bias ``[out]`` or None for each) → ``[..., out]`` of each."""


def products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """One matrix product after the other."""
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


class _Join(torch.autograd.Function):
    """``dtype``, ``laid``, parts ``[..., out, in]`` (or biases ``[out]``) → one tensor of all outputs.

    It is in ``dtype``. ``laid``: what the parts are pieces of, in their order; None: they are copied.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        # Without gradients Dynamo goes by the number of arguments whether there is a ctx: one name for all.
        dtype, laid, first, *rest = given
        parts = (first, *rest)  # all are alike but for the number of their outputs
        ctx.dim, ctx.dtype = _output_dim(first), first.dtype
        ctx.sizes = [part.size(ctx.dim) for part in parts]
        if laid is not None:
            return laid.detach().to(dtype)
        if first.dtype == dtype:
            return torch.cat(parts, dim=ctx.dim)
        shape = list(first.shape)
        shape[ctx.dim] = sum(ctx.sizes)
        whole = first.new_empty(shape, dtype=dtype)
        for piece, part in zip(whole.split(ctx.sizes, dim=ctx.dim), parts, strict=True):
            piece.copy_(part)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pieces = gradients[0].to(ctx.dtype).split(ctx.sizes, dim=ctx.dim)
        return None, None, *pieces


def _output_dim(part: Tensor) -> int:
    return max(0, part.dim() - 2)


def computed_in(part: Tensor) -> torch.dtype:
    """The type in which a matrix product would take a parameter here."""
    kind = part.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else part.dtype


def joined(parts: Sequence[Tensor], dtype: torch.dtype, laid: Tensor | None = None) -> Tensor:
    """Stacked weights ``[..., out, in]`` as one ``[..., sum of outs, in]``, in ``dtype``."""
    found: Tensor = _Join.apply(dtype, laid, *parts)
    return found


class FusedLinear:
    """Several linear layers of one input, computed together.

    It owns no parameters, so that names stay those of the layers.

    Args:
        layers: of one input; all with a bias, or none.
        as_one: whether they are one product; else each is one.

    Fields:
        products: what multiplies; tensor parallelism puts in what gathers ``x`` at the same time.
    """

    def __init__(self, *layers: nn.Linear, as_one: bool = True) -> None:
        self._layers, self._as_one = layers, as_one
        self.products: Products = products
        self._laid: dict[str, Tensor] = {}

    def _parts(self, name: str) -> list[nn.Parameter]:
        found = (getattr(layer, name) for layer in self._layers)
        return [part for part in found if part is not None]

    @torch.no_grad()
    def lay_together(self) -> None:
        """Move the parameters into one storage; they stay the same objects, and keep their values.

        Those of layers that are a product each stay where they are.
        """
        if not self._as_one:
            return
        for name in ("weight", "bias"):
            parts = self._parts(name)
            if parts:
                self._laid[name] = whole = torch.cat([part.detach() for part in parts])
                for part, piece in zip(parts, whole.split([len(part) for part in parts]), strict=True):
                    part.data = piece

    def _joined(self, name: str) -> Tensor | None:
        parts = self._parts(name)
        return joined(parts, computed_in(parts[0]), self._laid.get(name)) if parts else None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """``[..., in]`` → what each layer gives, ``[..., out]``; of one product pieces."""
        adapted = [layer for layer in self._layers if isinstance(layer, LoraLinear)]
        weights, biases = self._multiplied()
        downs = [layer.lora_a for layer in adapted]  # they read the input with the others
        none = [down.new_zeros(len(down)) if biases[0] is not None else None for down in downs]
        given = self.products(x, [*weights, *downs], [*biases, *none])
        found = given[: len(weights)]
        if self._as_one:
            found = found[0].split([len(part) for part in self._parts("weight")], dim=-1)
        if not adapted:
            return tuple(found)
        lows = dict(zip(adapted, given[len(weights) :], strict=True))
        return tuple(
            out + layer.raised(lows[layer]) if isinstance(layer, LoraLinear) else out
            for layer, out in zip(self._layers, found, strict=True)
        )

    def _multiplied(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Weights, and a bias or None for each: one pair where the layers are one product."""
        if not self._as_one:
            return [layer.weight for layer in self._layers], [layer.bias for layer in self._layers]
        weight = self._joined("weight")
        assert weight is not None
        return [weight], [self._joined("bias")]


def lay_together(model: nn.Module) -> None:
    """Do so with the parameters of every `FusedLinear` in ``model``, whose storage must be its own by now."""
    for module in model.modules():
        fused_linear = getattr(module, "fused_linear", None)
        if isinstance(fused_linear, FusedLinear):
            fused_linear.lay_together()
