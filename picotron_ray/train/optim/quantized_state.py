"""Block-wise 8-bit quantization of optimizer state (Dettmers et al. 2022).

256 consecutive values share a scale, the largest of their magnitudes. Each value is divided by it and kept as
the nearest of 256 numbers between -1 and 1, which lie closer together near zero: torchao's dynamic map (extra
``8bit``). torchao finds the nearest by a search, slow unless torch.compile makes one kernel of it. Here a
table maps the first 16 bits of a number to the code of the smallest such number, and one comparison decides
whether the next code is nearer. Nothing is compiled, so that the first step does not wait. It is faster on a
CPU too, as this prints: ``pytest -s -m slow tests/gloo/train/test_quantized_state.py``.

Snapshots hold the values, not the codes, as another layout has other blocks. Decoding and encoding again
changes no bit: a scale has 16 significant bits, so that the value at either end of the map gives it back. The
ends are 1 and -0.993: if a block's largest value is negative, encoding takes 0.7 % off it, as torchao does.

Two things differ from torchao:

- torchao rounds a second moment below 1.6e-7 of its block's largest to zero, and the first moment is then
  divided by almost nothing. Within three steps an element of an embedding moved by tens of learning rates
  (test_no_step_is_far_too_large). Here only zero becomes zero; other small values become the smallest number.
- torchao's scales end at 1e-12. Here they go down to 1e-30, so that squares of gradients below 1e-6 count.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from picotron_ray.config.schema.optimizer import TORCHAO
from picotron_ray.errors import LayoutError

BLOCK = 256
LEAST = 4096
"""Fewest elements of a quantized tensor. Blocks must divide it too, as in torchao."""
SMALLEST_SCALE = 1e-30


def is_quantizable(tensor: Tensor) -> bool:
    """Return whether a tensor is large enough, and consists of whole blocks."""
    return tensor.numel() >= LEAST and tensor.numel() % BLOCK == 0


class Codebook(NamedTuple):
    """The 256 numbers that values are rounded to, in order, and tables to find the nearest.

    Fields:
        numbers: ``[256]``.
        borders: ``[256]``; from ``borders[i]`` on, ``numbers[i + 1]`` is taken and not ``numbers[i]``.
        first: ``[65536]`` codes of the smallest number that begins with these 16 bits.
        signed: whether there are numbers below zero.
    """

    numbers: Tensor
    borders: Tensor
    first: Tensor
    signed: bool


@functools.cache
def codebook_of(signed: bool, device: torch.device) -> Codebook:
    """Return torchao's dynamic map; LayoutError if torchao is missing."""
    try:
        from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned
    except ImportError as error:
        raise LayoutError(f"optimizer.moments: saw 8bit, {TORCHAO}") from error
    numbers = torch.tensor(get_qmap_signed() if signed else get_qmap_unsigned(), device="cpu")
    middles = middles_of(numbers)
    if not signed:
        middles[0] = torch.finfo(torch.float32).tiny  # not zero, as a divisor
    heads = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu") << 16
    smallest = torch.minimum(heads.view(torch.float32), (heads + 0xFFFF).view(torch.float32))
    first = torch.bucketize(smallest.nan_to_num(0.0), middles, right=True).to(torch.uint8)
    borders = torch.cat([middles, middles.new_tensor([math.inf])])
    return Codebook(numbers.to(device), borders.to(device), first.roll(2**15).to(device), signed)


def middles_of(numbers: Tensor) -> Tensor:
    """Return the ``[n - 1]`` midpoints between neighbours of ``[n]``."""
    return ((numbers[1:].double() + numbers[:-1].double()) / 2).float()


def encode(values: Tensor, codebook: Codebook, stored: bool = False) -> tuple[Tensor, Tensor]:
    """Return codes ``[n]`` and scales ``[n / 256]`` of values ``[n]``, fp32.

    Args:
        stored: the values come from `decode`: their scales come out as they were.
    """
    blocks = values.view(-1, BLOCK)
    low, high = torch.aminmax(blocks, dim=-1)
    scales = torch.maximum(high, -low)
    if stored and codebook.signed:
        scales = torch.where(-low >= high, low / codebook.numbers[0], high)
    scales.clamp_(min=SMALLEST_SCALE)
    scaled = (blocks / scales.unsqueeze(-1)).view(-1)
    head = (scaled.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
    codes = codebook.first.index_select(0, head)
    codes += scaled >= codebook.borders.index_select(0, codes.int())
    return codes, ((scales.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)


def decode(codes: Tensor, scales: Tensor, codebook: Codebook) -> Tensor:
    """Return values ``[n]``, fp32."""
    numbers = codebook.numbers.index_select(0, codes.int())
    return numbers.view(-1, BLOCK).mul_(scales.unsqueeze(-1)).view(-1)


class QuantizedTensor:
    """Tensor in 8 bits, or some of its rows. Checkpoints see one of fp32 (`torch_state.Encoded`).

    Args:
        codes: ``[n]``, whole blocks.
        scales: ``[n / 256]``.
        codebook: meaning of the codes.
        shape: of the tensor.
        start: its first element among the codes.
    """

    dtype = torch.float32

    def __init__(
        self, codes: Tensor, scales: Tensor, codebook: Codebook, shape: tuple[int, ...], start: int = 0
    ) -> None:
        self.codes, self.scales, self.shape = codes, scales, shape
        self._codebook, self._start = codebook, start

    def __getitem__(self, rows: slice) -> QuantizedTensor:
        first, last, _ = rows.indices(self.shape[0])
        start = self._start + first * math.prod(self.shape[1:])
        return QuantizedTensor(
            self.codes, self.scales, self._codebook, (last - first, *self.shape[1:]), start
        )

    def part(self, first: int, last: int, shape: tuple[int, ...]) -> QuantizedTensor:
        """Return the codes ``first`` to ``last``, whole blocks, as a tensor that shares them."""
        scales = self.scales[first // BLOCK : last // BLOCK]
        return QuantizedTensor(self.codes[first:last], scales, self._codebook, shape)

    def values(self) -> Tensor:
        """Decode all codes, flat, on their device."""
        return decode(self.codes, self.scales, self._codebook)

    def keep(self, values: Tensor, stored: bool = False) -> None:
        """Encode values ``[n]`` of all codes; ``stored`` as in `encode`."""
        codes, scales = encode(values, self._codebook, stored)
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def decoded(self) -> Tensor:
        """Decode the values in host memory; nothing is allocated on the device."""
        size = math.prod(self.shape)
        low, high = self._start // BLOCK, -(-(self._start + size) // BLOCK)
        codes, scales = self.codes[low * BLOCK : high * BLOCK].cpu(), self.scales[low:high].cpu()
        flat = decode(codes, scales, codebook_of(self._codebook.signed, codes.device))
        return flat[self._start - low * BLOCK :][:size].view(self.shape)

    def encode(self, values: Tensor) -> None:
        """Encode values of the whole tensor, in host memory."""
        assert values.numel() == self.codes.numel(), "rows of a tensor are not written"
        codes, scales = encode(
            values.view(-1), codebook_of(self._codebook.signed, values.device), stored=True
        )
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def zero_(self) -> None:
        """Make all values zero."""
        codes, scales = encode(self.scales.new_zeros(BLOCK), self._codebook)
        self.codes.copy_(codes[0].expand_as(self.codes))
        self.scales.copy_(scales.expand_as(self.scales))
