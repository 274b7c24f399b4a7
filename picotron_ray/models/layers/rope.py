"""Rotary positions (Su et al. 2021), in the half-split form of Llama's weights at Hugging Face.

Frequencies may be stretched for rows longer than those of the first training (`RopeScaling`):

- ``llama3``: slow ones are divided, fast ones stay, with a ramp between (Dubey et al. 2024, section 3.4.2).
- ``linear``: all are divided (Chen et al. 2023, Position Interpolation).
- ``dynamic``: the base grows with the row, once it is longer than the first training's (NTK-aware scaling, as
  Peng et al. 2023, YaRN, section 3.3 and appendix B.2 have it).
- ``yarn``: divided or not by the turns within the first training's length, with a ramp over pairs, and
  attention made sharper by a factor of cosine and sine (Peng et al. 2023, sections 3.2 and 3.4).

Partial rotary (GPT-NeoX, Phi) turns the first part of each head alone, as if the head were that wide.

Tables are computed in fp64 and cached per (positions, device), so that a module built on the meta device
needs nothing but its parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from picotron_ray.config.schema.model import ModelConfig, RopeScaling, rotary_width
from picotron_ray.models.decoder.positions import yarn_mscale
from picotron_ray.models.parameters import SequenceShard


@dataclass(frozen=True)
class Rope:
    """Base and scaling of rotary frequencies.

    Fields:
        theta: the base.
        scaling: how frequencies are stretched.
        part: share of a head that turns, from its beginning (``partial_rotary_factor``).
    """

    theta: float
    scaling: RopeScaling = RopeScaling()  # noqa: RUF009 - frozen
    part: float = 1.0

    def turns(
        self, length: int, parts: int, index: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The table, a constant of a compiled block: torch looks through a cache and would make it anew."""
        return _rotary_table(SequenceShard(length, parts, index), width, self, dtype, device)

    # What torch.compiler.assume_constant_result does, which would import the compiler in every process. Of a
    # method, as torch 2.11 takes no object that it does not know as an argument.
    turns._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=16)
def _one(rope: Rope) -> Rope:
    return rope


def rope_of(theta: float, scaling: RopeScaling, part: float = 1.0) -> Rope:
    """Return the one Rope of these values in this process: compiled code is guarded by its identity."""
    return _one(Rope(theta, scaling, part))


def model_rope(config: ModelConfig) -> Rope:
    """Return the one Rope of a model whose blocks all turn alike."""
    return rope_of(config.rope_theta, config.rope_scaling, config.partial_rotary_factor)


def attention_factor(scaling: RopeScaling) -> float:
    """Return what cosine and sine are multiplied by, so that scores are by its square: YaRN's, else 1."""
    if scaling.type != "yarn":
        return 1.0
    return yarn_mscale(scaling.factor) if scaling.attention_factor is None else scaling.attention_factor


def frequencies(width: int, rope: Rope, length: int = 0) -> Tensor:
    """Radians per token of every pair: ``[width / 2]`` fp64, theta^(-2i/width), then ``rope.scaling``.

    Args:
        width: of the part of a head that turns.
        length: tokens of a whole row, on which dynamic scaling depends.
    """
    scaling, theta = rope.scaling, rope.theta
    if scaling.type == "dynamic" and length > scaling.original_length:
        grown = scaling.factor * length / scaling.original_length - (scaling.factor - 1)
        theta *= grown ** (width / (width - 2))
    plain = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    if scaling.type == "dynamic" or scaling.factor == 1.0:
        return plain
    share = _kept_share(plain, rope)
    return plain * (share + (1.0 - share) / scaling.factor)


def _kept_share(plain: Tensor, rope: Rope) -> Tensor:
    """Share of every frequency that stays as it is; the rest of it is divided."""
    scaling = rope.scaling
    if scaling.type == "linear":
        return torch.zeros_like(plain)
    if scaling.type == "llama3":
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        turns = scaling.original_length * plain / (2 * math.pi)  # within the original length
        return ((turns - low) / (high - low)).clamp(0.0, 1.0)
    width = 2 * len(plain)

    def pair(turns: float) -> float:
        """The pair, not a whole number, that turns so often within the original length."""
        return width * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, width - 1.0)
    if first == last:
        last += 0.001  # a step
    pairs = torch.arange(len(plain), dtype=torch.float64)
    return 1.0 - ((pairs - first) / (last - first)).clamp(0.0, 1.0)


@lru_cache(maxsize=16)
def _rotary_table(
    shard: SequenceShard, width: int, rope: Rope, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x frequency, each ``[local tokens, width / 2]``; computed in fp64."""
    # A table first made while evaluating under inference_mode could never be used in training again.
    with torch.inference_mode(False), torch.device("cpu"):
        positions = torch.tensor(shard.positions(), dtype=torch.float64)
        angles = torch.outer(positions, frequencies(width, rope, shard.length))
        times = attention_factor(rope.scaling)
        return (angles.cos() * times).to(device, dtype), (angles.sin() * times).to(device, dtype)


def rotate(x: Tensor, rope: Rope | None, shard: SequenceShard | None = None) -> Tensor:
    """Rotary positions on ``[batch, heads, seq, head]``: pairs (i, i + width/2) turn by position x frequency.

    The width is that of the part of a head that turns; what is behind it stays.

    Args:
        rope: None: nothing turns.
        shard: which tokens of the row these are; None: all of them.

    fp64 stays fp64; anything else is turned in fp32 and cast back.
    """
    if rope is None:
        return x
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    here = (x.size(-2), 1, 0) if shard is None else (shard.length, shard.parts, shard.index)
    width = rotary_width(x.size(-1), rope.part)
    cos, sin = rope.turns(*here, width, dtype, x.device)
    left, right = x[..., :width].to(dtype).chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
    return turned if width == x.size(-1) else torch.cat((turned, x[..., width:]), dim=-1)
