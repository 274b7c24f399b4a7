"""What GPT-2 (Radford et al. 2019) has where the Llama-style decoder has something else.

LayerNorm with a bias, a table of learned positions added to the embedding, and an ungated hidden layer under
GELU (tanh); every linear layer has a bias. The rest is `models.llama`'s: pre-norm blocks, attention (of as
many key heads as query heads, not turned by position), the head. Dropout is not modelled: a checkpoint that
was trained with it is taken as it is, and trained on without.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.models.layers.fused_linear import Joint
from picotron_ray.models.layers.rms_norm import RMSNorm
from picotron_ray.models.parameters import SequenceShard


def norm_of(config: ModelConfig) -> nn.LayerNorm | RMSNorm:
    """The norm over the residual stream: LayerNorm (Ba et al. 2016) or RMSNorm."""
    if config.is_gpt2:
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
    return RMSNorm(config.hidden_size, config.norm_eps)


class GeluMlp(nn.Module):
    """``down(gelu(up x))``, the tanh form of GELU (Hendrycks & Gimpel 2016).

    Fields:
        joint: computes ``up``, by other means; None: it computes itself.
    """

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        self.joint: Joint | None = None

    def fuse(self, as_one: bool = False) -> None:
        """Let `joint` compute ``up``, which has nothing to be one product with."""
        self.joint = Joint(self.up, as_one=as_one)

    def forward(self, x: Tensor) -> Tensor:
        (inner,) = (self.up(x),) if self.joint is None else self.joint(x)
        found: Tensor = self.down(F.gelu(inner, approximate="tanh"))
        return found


@lru_cache(maxsize=16)
def _indices(shard: SequenceShard, part: tuple[int, int], device: torch.device) -> Tensor:
    """Positions of one contiguous part of a shard's tokens, ``[tokens]``."""
    index, parts = part
    count = len(shard.positions()) // parts
    with torch.inference_mode(False), torch.device("cpu"):
        return torch.tensor(shard.positions()[index * count : (index + 1) * count]).to(device)


class Positions(nn.Module):
    """A learned row per position of the sequence, ``weight [positions, hidden]``.

    Fields:
        shard: which tokens of the row the context-parallel rank has; None: all of them.
        part: (index, parts): which contiguous part of those is here, where activations are cut over the
            sequence.
    """

    def __init__(self, positions: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions, hidden))
        self.shard: SequenceShard | None = None
        self.part = (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, local tokens, hidden]`` → the same, each token's row added."""
        shard = self.shard or SequenceShard(x.size(1) * self.part[1])
        return x + F.embedding(_indices(shard, self.part, x.device), self.weight)
