"""Codecs of compressed gradients: rows of fp32 values to bytes of a fixed number, and back.

A row is what goes to one rank. Sizes depend on shapes alone, so that both ends know them. NaN and infinity
come out as NaN or infinity.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256
"""Values that share a scale."""
MASK_BITS = 1 / 32
"""Size of a mask relative to the fp32 values that it chooses from."""


class Codec(Protocol):
    """Encodes ``[rows, m]`` fp32 as ``[rows, bytes]``."""

    def encode(self, rows: Tensor) -> Tensor:
        """Return the bytes."""
        ...

    def decode(self, wire: Tensor, size: int) -> Tensor:
        """Return ``[rows, size]`` fp32, the same bits wherever it runs on the same bytes."""
        ...


class Bf16:
    """bfloat16: half the bytes, relative error of a value at most 2^-8."""

    def encode(self, rows: Tensor) -> Tensor:
        """Round to the nearest."""
        return rows.to(torch.bfloat16).view(torch.uint8)

    def decode(self, wire: Tensor, size: int) -> Tensor:
        """Widen."""
        return wire.view(torch.bfloat16).float()


class Quantized:
    """Integers of 8 or 4 bits with a scale for each 256 values (as Dettmers et al. 2022, on a linear map).

    The error of a value is at most half a step: 1/254 (8 bits) or 1/14 (4 bits) of its block's largest.
    """

    def __init__(self, bits: int) -> None:
        self._bits, self._most = bits, 2 ** (bits - 1) - 1

    def encode(self, rows: Tensor) -> Tensor:
        """Codes of all values, then the scales."""
        count, size = rows.shape
        blocks = torch.nn.functional.pad(rows, (0, -size % BLOCK)).view(count, -1, BLOCK)
        # multiplied, as CUDA divides by a number: the bytes are the same on every device
        scales = blocks.abs().amax(dim=-1) * (1.0 / self._most)
        divisor = torch.where(scales > 0, scales, 1.0)
        codes = (blocks / divisor.unsqueeze(-1)).round_().nan_to_num_(0.0).clamp_(-self._most, self._most)
        packed = codes.to(torch.int8).view(count, -1).view(torch.uint8)
        if self._bits == 4:
            low, high = packed.view(count, -1, 2).unbind(-1)
            packed = (low & 15) | (high << 4)
        return torch.cat([packed, scales.view(torch.uint8)], dim=1)

    def decode(self, wire: Tensor, size: int) -> Tensor:
        """Codes times scales."""
        count, blocks = wire.size(0), -(-size // BLOCK)
        packed = wire[:, : -4 * blocks]
        scales = wire[:, -4 * blocks :].contiguous().view(torch.float32)
        if self._bits == 4:
            packed = torch.stack([packed & 15, packed >> 4], dim=-1)
            codes = ((packed ^ 8).to(torch.int8) - 8).view(count, blocks, BLOCK)
        else:
            codes = packed.contiguous().view(torch.int8).view(count, blocks, BLOCK)
        return (codes.float() * scales.unsqueeze(-1)).view(count, -1)[:, :size]


class TopK:
    """The largest values by magnitude in bfloat16, and where they are (Aji & Heafield 2017).

    ``ratio`` is bytes sent over bytes of all values. A mask of one bit per value says where, or a number of
    32 bits for each value kept: whichever keeps more. Values of half the bytes are twice as many. That
    counts for more than their precision: Adam's steps shrink for what comes seldom.
    """

    def __init__(self, ratio: float) -> None:
        self._by_mask, self._by_place = 2 * (ratio - MASK_BITS), ratio * 2 / 3
        self._masked = self._by_mask > self._by_place

    def kept(self, size: int) -> int:
        """Values kept of ``size``: at least one.

        >>> TopK(0.5).kept(3200), TopK(0.03).kept(3200)
        (3000, 64)
        """
        share = self._by_mask if self._masked else self._by_place
        return min(size, max(1, int(size * share + 1e-6)))

    def encode(self, rows: Tensor) -> Tensor:
        """Signed values in the order of their places, then the mask or the places."""
        count, size = rows.shape
        places = rows.abs().topk(self.kept(size), dim=1, sorted=False).indices.sort(dim=1).values
        values = rows.gather(1, places).to(torch.bfloat16)  # masked_select would wait for a GPU
        if not self._masked:
            return torch.cat([values.view(torch.uint8), places.int().view(torch.uint8)], dim=1)
        mask = torch.zeros(count, size + -size % 8, dtype=torch.bool, device=rows.device)
        mask.scatter_(1, places, True)
        return torch.cat([values.view(torch.uint8), _packed(mask)], dim=1)

    def decode(self, wire: Tensor, size: int) -> Tensor:
        """Zeros with the values at their places."""
        cut = 2 * self.kept(size)
        values = wire[:, :cut].contiguous().view(torch.bfloat16).float()
        rows = values.new_zeros(wire.size(0), size)
        if self._masked:
            return rows.masked_scatter_(_unpacked(wire[:, cut:])[:, :size], values)
        return rows.scatter_(1, wire[:, cut:].contiguous().view(torch.int32).long(), values)


def _weights(device: torch.device) -> Tensor:
    """1, 2, 4 ... 128, made on the device: nothing is copied there."""
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)


def _packed(mask: Tensor) -> Tensor:
    """Bits ``[rows, 8 n]`` → bytes ``[rows, n]``."""
    bits = mask.view(mask.size(0), -1, 8).to(torch.uint8)
    return (bits * _weights(mask.device)).sum(dim=-1, dtype=torch.uint8)


def _unpacked(wire: Tensor) -> Tensor:
    """Bytes ``[rows, n]`` → bits ``[rows, 8 n]``."""
    return (wire.unsqueeze(-1) & _weights(wire.device)).bool().flatten(1)
