"""Rotary positions (Su et al. 2021), in the half-split form of Llama's weights at Hugging Face.

Tables are computed in fp64 and cached per (positions, device), so that a module built on the meta device
needs nothing but its parameters.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from picotron_ray.config.schema.model import RopeScaling
from picotron_ray.models.parameters import SequenceShard


class Rope(NamedTuple):
    """Base and scaling of rotary frequencies."""

    theta: float
    scaling: RopeScaling = RopeScaling()


@lru_cache(maxsize=16)
def rope_of(theta: float, scaling: RopeScaling) -> Rope:
    """Return the one Rope of a base and scaling in this process: compiled code is guarded by its identity."""
    return Rope(theta, scaling)


def frequencies(head: int, rope: Rope) -> Tensor:
    """Radians per token of every pair: ``[head / 2]`` fp64, theta^(-2i/head), then ``rope.scaling``."""
    plain = rope.theta ** -(torch.arange(0, head, 2, dtype=torch.float64) / head)
    scaling = rope.scaling
    if scaling.factor == 1.0:
        return plain
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_length * plain / (2 * math.pi)  # within the original length
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # of the frequency that stays as it is
    return plain * (share + (1.0 - share) / scaling.factor)


@lru_cache(maxsize=16)
def _rotary_table(
    shard: SequenceShard, head: int, rope: Rope, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x frequency, each ``[local tokens, head / 2]``; computed in fp64."""
    # A table first made while evaluating under inference_mode could never be used in training again.
    with torch.inference_mode(False), torch.device("cpu"):
        positions = torch.tensor(shard.positions(), dtype=torch.float64)
        angles = torch.outer(positions, frequencies(head, rope))
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _turns(
    length: int, parts: int, index: int, head: int, rope: Rope, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The table, as a constant of a compiled block: torch looks through a cache and would make it anew."""
    return _rotary_table(SequenceShard(length, parts, index), head, rope, dtype, device)


# What torch.compiler.assume_constant_result does, which would import the compiler in every process.
_turns._dynamo_marked_constant = True  # type: ignore[attr-defined]


def rotate(x: Tensor, rope: Rope | None, shard: SequenceShard | None = None) -> Tensor:
    """Rotary positions on ``[batch, heads, seq, head]``: pairs (i, i + head/2) turn by position x frequency.

    Args:
        rope: None: nothing turns.
        shard: which tokens of the row these are; None: all of them.

    fp64 stays fp64; anything else is turned in fp32 and cast back.
    """
    if rope is None:
        return x
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    here = (x.size(-2), 1, 0) if shard is None else (shard.length, shard.parts, shard.index)
    cos, sin = _turns(*here, x.size(-1), rope, dtype, x.device)
    left, right = x.to(dtype).chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
