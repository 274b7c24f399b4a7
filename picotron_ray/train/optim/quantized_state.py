"""Values kept in 8 bits: blocks of 256 in a row, with a scale each (Dettmers et al. 2022).

A value over its block's largest, a number of -1 to 1, is kept as the nearest of 256 numbers that lie closer
together the smaller they are: the dynamic map, which is torchao's (extra ``8bit``). torchao finds the nearest
by a search, slow unless torch.compile makes one kernel of it. Here a table tells of the first 16 bits of a
number the code of the smallest such number, and one comparison whether the next code is nearer; nothing is
compiled, so that no first step waits for it. On a CPU it is faster too, as this prints:
``pytest -s -m slow tests/gloo/train/test_quantized_state.py``.

Snapshots hold the values, not the codes, as another layout has other blocks. Going there and back changes no
bit: a scale has 16 significant bits, so that it is found again from the value of either end of the map. Those
are 1 and -0.993: where a block's largest value is negative, encoding takes 0.7 % off it, as torchao does.

Two things are not torchao's. It makes zero of a second moment below 1.6e-7 of its block's largest, and the
first is divided by next to nothing: within three steps an element of an embedding moved by tens of learning
rates (test_no_step_is_far_too_large). Here only zero becomes zero, other small values the smallest number.
And it takes no scale below 1e-12; here they go down to 1e-30, so that squares of gradients below 1e-6 count.
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
"""Elements that a tensor must have to be kept in 8 bits, and blocks divide it, as in torchao."""
SMALLEST_SCALE = 1e-30


def is_quantizable(tensor: Tensor) -> bool:
    """Whether a tensor is large enough, and whole blocks."""
    return tensor.numel() >= LEAST and tensor.numel() % BLOCK == 0


class Codebook(NamedTuple):
    """The 256 numbers that values are rounded to, in order, and what finds the nearest.

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
    """torchao's dynamic map; raises LayoutError where torchao is missing."""
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
    borders = torch.cat([middles, middles.new_full((1,), math.inf)])
    return Codebook(numbers.to(device), borders.to(device), first.roll(2**15).to(device), signed)


def middles_of(numbers: Tensor) -> Tensor:
    """``[n - 1]`` numbers half way between neighbours of ``[n]``."""
    return ((numbers[1:].double() + numbers[:-1].double()) / 2).float()


def encode(values: Tensor, codebook: Codebook, stored: bool = False) -> tuple[Tensor, Tensor]:
    """Codes ``[n]`` and scales ``[n / 256]`` of values ``[n]``, fp32.

    Args:
        stored: the values are such as `decode` gives: their scales come out as they were.
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
    """Values ``[n]``, fp32."""
    numbers = codebook.numbers.index_select(0, codes.int())
    return numbers.view(-1, BLOCK).mul_(scales.unsqueeze(-1)).view(-1)


class QuantizedTensor:
    """A tensor in 8 bits, or some of its rows; to checkpoints it is one of fp32 (`dcp.Encoded`).

    Args:
        codes: ``[n]``, whole blocks.
        scales: ``[n / 256]``.
        codebook: what the codes mean.
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
        """The codes ``first`` to ``last``, whole blocks, as a tensor; they are shared."""
        scales = self.scales[first // BLOCK : last // BLOCK]
        return QuantizedTensor(self.codes[first:last], scales, self._codebook, shape)

    def values(self) -> Tensor:
        """All that the codes mean, flat, on their device."""
        return decode(self.codes, self.scales, self._codebook)

    def keep(self, values: Tensor, stored: bool = False) -> None:
        """Take over values ``[n]`` of all codes; ``stored`` as in `encode`."""
        codes, scales = encode(values, self._codebook, stored)
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def decoded(self) -> Tensor:
        """The values, in the host's memory; on the device nothing is made."""
        size = math.prod(self.shape)
        low, high = self._start // BLOCK, -(-(self._start + size) // BLOCK)
        codes, scales = self.codes[low * BLOCK : high * BLOCK].cpu(), self.scales[low:high].cpu()
        flat = decode(codes, scales, codebook_of(self._codebook.signed, codes.device))
        return flat[self._start - low * BLOCK :][:size].view(self.shape)

    def encode(self, values: Tensor) -> None:
        """Take over values of the whole tensor from the host's memory, encoded there."""
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
