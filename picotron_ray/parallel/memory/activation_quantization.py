"""Saved activations in 8 bits: what a block keeps for its backward pass, as codes and scales of 128 values.

The forward pass is exact. The backward pass computes with values that are off by at most half a step, 1/254
of the largest of their 128 (as Dettmers et al. 2022 on a linear map; Chen et al. 2021, ActNN). So gradients
are close and no longer exact: ``tests/gloo/parallel/memory/test_int8_activations.py`` holds the bound.

Autograd hands every tensor that it saves in a block to a hook, which packs it. Some stay as they are:

- parameters, and views or casts of them,
- what a block is given besides hidden states (rotary tables, masks): other blocks save it too,
- integers, and what is small against the hidden states: statistics of rows (norms, log-sum-exp), whose error
  would grow.

Tensors over the same memory are packed once in each pass. It replaces ``forward`` and wraps no module, so
that names stay canonical.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from picotron_ray.layout.recompute_policy import RecomputeKind
from picotron_ray.parallel.memory.saved_parameters import of_a_parameter

BLOCK = 128
"""Values that share a scale."""
MOST = 127
SMALL = 32
"""A tensor with at most 1/32 of the hidden states' values stays."""


class PackedMemory:
    """Codes and scales of a stretch of memory.

    Args:
        flat: ``[n]`` floating-point values.
    """

    __slots__ = ("_back", "_codes", "_dtype", "_scales", "_size")

    def __init__(self, flat: Tensor) -> None:
        self._dtype, self._size = flat.dtype, flat.numel()
        self._codes, self._scales = quantize(flat)
        self._back: weakref.ref[Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self._codes.nbytes + self._scales.nbytes

    def unpack(self) -> Tensor:
        """Return ``[n]`` values; the same tensor while somebody still has it."""
        back = None if self._back is None else self._back()
        if back is None:
            back = dequantize(self._codes, self._scales, self._size, self._dtype)
            self._back = weakref.ref(back)
        return back


def quantize(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[ceil(n / 128), 128]`` int8 and scales ``[ceil(n / 128)]`` fp32 of ``[n]`` values.

    A stretch with NaN or infinity comes back as neither finite nor silent.
    """
    short = -flat.numel() % BLOCK
    blocks = (nn.functional.pad(flat, (0, short)) if short else flat).view(-1, BLOCK)
    scales = torch.linalg.vector_norm(blocks, torch.inf, dim=-1, dtype=torch.float32).div_(MOST)
    tiny = torch.finfo(torch.float32).tiny
    inverse = torch.where(scales > tiny, scales.reciprocal(), 0.0)
    return (blocks * inverse.unsqueeze(-1)).round_().to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Codes times scales, ``[size]``."""
    return (codes * scales.unsqueeze(-1)).view(-1)[:size].to(dtype)


class PackedView:
    """A saved tensor: packed memory, and its shape over it."""

    __slots__ = ("_packed", "_size", "_stride")

    def __init__(self, packed: PackedMemory, tensor: Tensor, stride: tuple[int, ...]) -> None:
        self._packed, self._size, self._stride = packed, tensor.size(), stride

    def unpack(self) -> Tensor:
        """Return the tensor, its values rounded."""
        return self._packed.unpack().as_strided(self._size, self._stride)


class BlockPacker:
    """Hook on what one block saves in one forward pass.

    Args:
        hidden: the hidden states that it is given.
        shared: what else it is given.
    """

    def __init__(self, hidden: Tensor, shared: Sequence[Tensor]) -> None:
        self._small = hidden.numel() // SMALL
        self._shared = {tensor.untyped_storage()._cdata for tensor in shared}
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, PackedMemory]] = {}

    def pack(self, tensor: Tensor) -> Tensor | PackedView:
        """Return what is saved in place of a tensor."""
        if self._stays(tensor):
            return tensor
        source = tensor.detach()
        if not _is_dense(source):
            source = source.contiguous()
        return PackedView(self._packed(source), source, source.stride())

    def _packed(self, source: Tensor) -> PackedMemory:
        """Pack memory, or find it packed: a saved tensor may be a view of another one."""
        storage = source.untyped_storage()
        key = (storage._cdata, source.storage_offset(), source.dtype, source.numel(), source._version)
        known = self._known.get(key)
        if known is None or known[0].expired() or known[0] != StorageWeakRef(storage):
            known = StorageWeakRef(storage), PackedMemory(source.as_strided((source.numel(),), (1,)))
            self._known[key] = known
        return known[1]

    def _stays(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor or hasattr(tensor, "fake_mode")  # a dry run's have no addresses
        if not plain or not tensor.is_floating_point() or tensor.numel() <= self._small:
            return True
        storage = tensor.untyped_storage()
        return storage.nbytes() < tensor.nbytes or storage._cdata in self._shared or of_a_parameter(tensor)


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its stretch of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _unpack(saved: Tensor | PackedView) -> Tensor:
    return saved.unpack() if isinstance(saved, PackedView) else saved


def _packing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def packing(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        shared = [leaf for leaf in tree_leaves((inputs[1:], named)) if isinstance(leaf, Tensor)]
        packer = BlockPacker(inputs[0], shared)
        with torch.autograd.graph.saved_tensors_hooks(packer.pack, _unpack):
            return forward(*inputs, **named)

    return packing


def apply_activation_quantization(blocks: Sequence[nn.Module], kinds: Sequence[RecomputeKind]) -> int:
    """Let the blocks of kind ``int8`` keep their activations in 8 bits, in place; return their number.

    Args:
        blocks: of one stage, in order.
        kinds: of treatment, for each block.
    """
    chosen = [block for block, kind in zip(blocks, kinds, strict=True) if kind == "int8"]
    for block in chosen:
        block.forward = _packing(block.forward)
    return len(chosen)
