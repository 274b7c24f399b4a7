"""Hash of a tensor's bits, made where the tensor is: any single bit that differs changes it.

The hash is the sum of words of at most 32 bits, each times an odd number that is up to its place, modulo
2^64. Sums of integers do not depend on their order, so it is the same in every run, on every device. A
difference of one bit changes the sum by a power of two below 2^32 times an odd number, which is never 0.
Others go unnoticed less than once in 2^32 times. It is no protection against somebody who wants to deceive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

CHUNK = 1 << 18
"""Elements that are looked at together: the memory that a hash takes is bounded."""
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, Knuth's multiplier, as a signed integer
_OTHER = -4417276706812531889  # 0xC2B2AE3D27D4EB4F, of xxHash
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_factors: dict[torch.device, Tensor] = {}


def words_of(tensor: Tensor) -> Tensor:
    """Bits of a tensor's local elements, flat, as integers of their width; no copy where it is contiguous."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.is_complex():
        local = torch.view_as_real(local)
    flat = local.detach().reshape(-1)
    return flat.view(_BITS[flat.element_size()])


@torch.no_grad()
def tensor_hash(tensor: Tensor) -> Tensor:
    """Return the hash of a tensor: int64 ``[]`` on its device."""
    words = words_of(tensor)
    if words.dtype == torch.int64:
        words = words.view(torch.int32)  # the upper bits of a product of 64 bits are lost
    factors = _factors_on(words.device)
    total = torch.full((), words.numel(), dtype=torch.int64, device=words.device)
    for number, part in enumerate(words.split(CHUNK)):
        odd = (number * _OTHER + 2**63) % 2**64 - 2**63 | 1
        total = total + (part.to(torch.int64) * factors[: part.numel()]).sum() * odd
    return total


def tensor_hashes(tensors: Sequence[Tensor]) -> list[int]:
    """Return hashes of tensors, of each device in one transfer."""
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    hashed = [tensor_hash(tensor) for tensor in tensors]
    for at, one in enumerate(hashed):
        by_device[one.device].append(at)
    found = [0] * len(hashed)
    for places in by_device.values():
        values = torch.stack([hashed[at] for at in places]).tolist()
        for at, value in zip(places, values, strict=True):
            found[at] = value
    return found


def _factors_on(device: torch.device) -> Tensor:
    """Odd factors by an element's place in its chunk, made once for each device."""
    if device not in _factors:
        _factors[device] = torch.arange(CHUNK, dtype=torch.int64, device=device) * _GOLDEN | 1
    return _factors[device]
