"""Tensor and sequence parallelism, from the plan that the model gives as data (``models.parameters``).

Activations between blocks are cut over the sequence (Korthikanti et al. 2022). So every rank norms and adds
1/tp of the tokens, and the two all-reduces per block become all-gather plus reduce-scatter. Modules pass each
other plain local tensors ``[batch, seq / tp, hidden]``, which pipeline stages send as they are. The head
leaves logits cut over the vocabulary (``[batch, seq, vocab / tp]``), for ``parallel.loss``.

This is own code on plain tensors and not ``parallelize_module``, for three reasons. DTensor's Python dispatch
took 60 ms per micro-batch where the model itself takes 3 ms, measured with torch 2.13 on CPU (4 layers, tp
2). It makes the whole vocabulary's gradient on every rank for the cut embedding. Its caches hold meshes of
generations that are gone. Here a cut parameter is a smaller ``nn.Parameter`` and the collectives sit in
module hooks.

Modules of the user's own know nothing of a cut sequence. For them (``copy_colwise``, ``sum_rowwise``)
activations stay whole between the cut linears, with an all-reduce at each border (Shoeybi et al. 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_ray.comm.all_reduce import Group, all_sum
from picotron_ray.comm.sequence_collectives import gather_sequence, reduce_scatter_sequence
from picotron_ray.errors import LayoutError
from picotron_ray.models.parameters import Style
from picotron_ray.parallel.shard_boxes import chunk
from picotron_ray.parallel.tensor.cut_norm import cut_rms_norm
from picotron_ray.parallel.tensor.overlap import OverlappedProducts


class _Gather(torch.autograd.Function):
    """Sequence all-gather; the gradient is summed over ranks, because each uses the result differently."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_sequence(gradients[0].contiguous(), ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    """Sum over ranks, cut over the sequence; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_sequence(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gather_sequence(gradients[0], ctx.group), None


class _Copy(torch.autograd.Function):
    """Identity of an input that every rank has; its gradient is summed over ranks (Megatron-LM's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_sum(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """Sum over ranks, whole on each; the gradient is the same for all (Megatron-LM's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_sum(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def linear_dims(module: nn.Module) -> tuple[int, int] | None:
    """Dimensions of a linear module's weight, (outputs, inputs); None for any other module.

    torch's Linear keeps ``[out, in]``; the Conv1D of transformers' GPT-2 is a linear map kept ``[in, out]``.
    """
    if isinstance(module, nn.Linear):
        return 0, 1
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return 1, 0
    return None


class TensorParallel:
    """Tensor-parallel styles, applied to modules for one rank of a tp group.

    Args:
        overlap: operations that hide the communication of blocks behind products; None: no overlap.
    """

    def __init__(self, group: Group, overlap: OverlappedProducts | None = None) -> None:
        self.group: Any
        self.group, self.parts, self.index = group, group.size(), group.rank()
        self.overlap, self.overlapped = overlap, 0
        self.styles: dict[Style, Callable[[Any], None]] = {
            "vocab_embed": self.vocab_embed,
            "positions": self.positions,
            "sequence": self.sequence,
            "gather_input": self.gather_input,
            "sinks": self.sinks,
            "colwise": self.colwise,
            "rowwise": self.rowwise,
            "vocab_head": self.vocab_head,
            "copy_colwise": self.copy_colwise,
            "sum_rowwise": self.sum_rowwise,
            "mixture": self.mixture,
            "experts": self.experts,
            "inner": self.inner,
            "whole": self.sequence,
            "cut_norm": self.cut_norm,
        }

    def _cut(self, module: Any, dim: int, name: str = "weight", *, even: bool = True) -> None:
        """Replace one of the module's parameters by this rank's part of it (without values).

        Args:
            even: whether all parts must be of one size; a vocabulary's need not (`shard_boxes.chunk`).
        """
        whole = getattr(module, name)
        shape = list(whole.shape)
        if even and shape[dim] % self.parts:
            raise LayoutError(
                f"layout.tp: {shape[dim]} rows or columns of a weight do not divide by {self.parts}"
            )
        _, shape[dim] = chunk(shape[dim], self.parts, self.index)
        part = nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad)
        setattr(module, name, part)

    def sequence(self, module: Any) -> None:
        """Leave a norm as it is; its gradient is partial (`local_shards.local_gradient`)."""

    def cut_norm(self, module: Any) -> None:
        """A norm over all heads together, of which each rank has some for all tokens: no partial gradient."""
        width = module.weight.size(0)
        self._cut(module, 0)
        module.forward = lambda x: cut_rms_norm(x, module.weight, module.eps, width, self.group)

    def positions(self, module: Any) -> None:
        """Look up the positions of this rank's tokens; as with a norm the gradient is partial."""
        module.part = (self.index, self.parts)

    def gather_input(self, module: Any) -> None:
        """Gather a module's input over the sequence, overlapped with its first products where asked."""
        if self.overlap is None:
            self._gather_before(module)
            return
        if module.fused_linear is None:
            module.fuse(as_one=False)
        module.fused_linear.products = self.overlap.products
        self.overlapped += 1

    def _gather_before(self, module: Any) -> None:
        module.register_forward_pre_hook(
            lambda _, inputs: (_Gather.apply(inputs[0], self.group), *inputs[1:])
        )

    def sinks(self, module: Any) -> None:
        """Cut the logits of an attention's sinks, one a head."""
        self._cut(module, 0, "sinks")

    def colwise(self, module: Any) -> None:
        """Cut the outputs; of an adapter what it raises to them, while its first half is whole."""
        self._cut(module, 0)
        if module.bias is not None:
            self._cut(module, 0, "bias")
        if hasattr(module, "lora_b"):
            self._cut(module, 0, "lora_b")

    def rowwise(self, module: Any) -> None:
        """Cut the inputs; each rank adds the bias to the sums of its own tokens.

        An adapter's first half is cut too. Its second one is linear, and each rank applies it to its part.
        """
        self._cut_inputs(module)
        product = getattr(module, "product", None) or (lambda x: F.linear(x, module.weight))
        overlap = self.overlap
        self.overlapped += overlap is not None

        def forward(x: Tensor) -> Tensor:
            if overlap is None:
                total = _ReduceScatter.apply(product(x), self.group)
            else:
                total = overlap.scattered(x, module.weight)
                if hasattr(module, "lora_a"):  # a narrow sum, which nothing would hide
                    low = _ReduceScatter.apply(F.linear(x, module.lora_a), self.group)
                    total = total + module.raised(low)
            return total if module.bias is None else total + module.bias.to(total.dtype)

        module.forward = forward

    def mixture(self, module: Any) -> None:
        """Route all tokens alike on every rank, which holds a part of every expert's width."""
        self._gather_before(module)
        module.register_forward_hook(lambda _, inputs, output: _ReduceScatter.apply(output, self.group))

    def experts(self, module: Any) -> None:
        """Cut the width of every expert; biases of results, which are whole, are added by the first rank."""
        inner = ("gate_bias", "up_bias") if module.biased else ()
        for name, dim in (("gate", 1), ("up", 1), ("down", 2), *((name, 1) for name in inner)):
            self._cut(module, dim, name)
        module.adds_bias = self.index == 0

    def inner(self, module: Any) -> None:
        """Cut the inputs of a module whose sum another one takes."""
        self._cut_inputs(module)

    def _cut_inputs(self, module: Any) -> None:
        self._cut(module, 1)
        if hasattr(module, "lora_a"):
            self._cut(module, 1, "lora_a")

    def vocab_head(self, module: Any) -> None:
        """Cut the head over the vocabulary; the gradient and the logits follow."""
        self._cut(module, 0, even=False)
        self._gather_before(module)

    def vocab_embed(self, module: Any) -> None:
        """Cut the embedding over the vocabulary and its output over the sequence."""
        first, count = chunk(module.weight.size(0), self.parts, self.index)
        self._cut(module, 0, even=False)

        def forward(tokens: Tensor) -> Tensor:
            local = tokens - first
            inside = (local >= 0) & (local < count)
            rows = F.embedding(torch.where(inside, local, 0), module.weight)
            return _ReduceScatter.apply(rows * inside.unsqueeze(-1), self.group)

        module.forward = forward

    def copy_colwise(self, module: Any) -> None:
        """Cut the outputs, with whole activations in: Megatron-LM's first linear, for modules of the user."""
        output, _ = self._dims(module)
        self._cut(module, output)
        if module.bias is not None:
            self._cut(module, 0, "bias")
        if hasattr(module, "nf"):
            module.nf //= self.parts
        module.register_forward_pre_hook(lambda _, inputs: _Copy.apply(*inputs, self.group))

    def sum_rowwise(self, module: Any) -> None:
        """Cut the inputs, with whole activations out; the bias is added once, to the sum."""
        output, inputs = self._dims(module)
        self._cut(module, inputs)

        def forward(x: Tensor) -> Tensor:
            weight = module.weight if output == 0 else module.weight.T
            total = _Sum.apply(F.linear(x, weight), self.group)
            return total if module.bias is None else total + module.bias

        module.forward = forward

    def _dims(self, module: nn.Module) -> tuple[int, int]:
        dims = linear_dims(module)
        if dims is None:
            raise LayoutError(f"tensor parallelism cuts linear modules only, saw a {type(module).__name__}")
        return dims


def matches(name: str, glob: str) -> bool:
    """Whether a dotted module name fits, ``*`` standing for exactly one part of it."""
    parts, wanted = name.split("."), glob.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def named_modules(model: nn.Module, globs: Sequence[str]) -> list[Any]:
    """The modules that the globs name, in order."""
    return [module for name, module in model.named_modules() if any(matches(name, glob) for glob in globs)]


def apply_tensor_parallel(
    model: nn.Module,
    group: Group,
    plan: Sequence[tuple[str, Style]],
    overlap: OverlappedProducts | None = None,
) -> tuple[int, int]:
    """Cut ``model`` (on the meta device) in place over ``group``.

    Returns: the number of modules changed, and of those whose communication ``overlap`` hides.

    Raises LayoutError for an unknown style or a weight that does not divide. ``local_shards`` checks that
    every parameter has the shape that the plan says.
    """
    parallel, touched = TensorParallel(group, overlap), 0
    for name, module in list(model.named_modules()):
        for glob, style in plan:
            if matches(name, glob):
                if style not in parallel.styles:
                    raise LayoutError(
                        f"tensor-parallel style {style!r} of {name}: expected {[*parallel.styles]}"
                    )
                parallel.styles[style](module)
                touched += 1
    return touched, parallel.overlapped
