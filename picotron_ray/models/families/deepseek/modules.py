"""Modules of DeepSeek-V2 and V3.

Sources: DeepSeek-AI 2024 (DeepSeek-V2, section 2.1 and appendix C: latent attention; V3, section 2.1).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.models.families.deepseek.table import is_mixture
from picotron_ray.models.layers.attention import AttentionKernel
from picotron_ray.models.layers.block import PreNormBlock
from picotron_ray.models.layers.fused_linear import FusedLinear
from picotron_ray.models.layers.moe import MixtureOfExperts
from picotron_ray.models.layers.rms_norm import RMSNorm
from picotron_ray.models.layers.rope import Rope, rope_of, rotate
from picotron_ray.models.layers.swiglu import SwiGLU
from picotron_ray.models.parameters import SequenceShard

LATENT_EPS = 1e-6
"""Epsilon of the latent vectors' norms, whatever that of the others (as in DeepSeek's published code)."""


def score_times(config: ModelConfig) -> float:
    """Factor of attention scores beside 1 / sqrt(head): YaRN's, squared, by a coefficient.

    (0.1 x mscale_all_dim x ln(factor) + 1)², Peng et al. 2023 (YaRN), section 3.4, as DeepSeek has it.
    """
    factor = config.rope_scaling.factor
    return 1.0 if factor <= 1.0 else (0.1 * config.mla.mscale_all_dim * math.log(factor) + 1.0) ** 2


def _normed(norm: RMSNorm, x: Tensor) -> Tensor:
    """Normed in the weight's type: torch has no kernel for autocast's products by wider weights."""
    found: Tensor = norm(x.to(norm.weight.dtype))
    return found


class LatentAttention(nn.Module):
    """Multi-head latent attention, of all heads or of those of a tensor-parallel rank.

    ``wkv_a`` gives a latent vector and one key of x. From the latent vector, normed, ``wkv_b`` makes a part
    of every head's key, and its value. The one key is turned by its position and is the other part of all
    heads' keys. A query head has the same two parts, made of x (``wq``), or of a latent vector (``wq_a``).
    Positions turn halves here. Published checkpoints turn neighbours; their weights are put in our order as
    they are read (``huggingface.py``).

    Value heads are narrower than key heads. Kernels want one width, so zeros are put behind them, whose
    results are dropped: this holds for every kernel, and for keys and values that travel together.

    Args:
        kernel: attention over the local queries, see `models.layers.attention.sdpa`.
        rope: rotary positions of ``model.mla.qk_rope_head_dim`` values.

    Fields:
        kernel: as above; parallelism replaces it.
        shard: which tokens of the row are here; None: all of them.
        fused_linear: computes the projections of x together; None: each computes itself.
    """

    def __init__(self, config: ModelConfig, kernel: AttentionKernel, rope: Rope) -> None:
        super().__init__()
        mla, hidden = config.mla, config.hidden_size
        self.parts = (mla.qk_nope_head_dim, mla.qk_rope_head_dim)
        self.latent, self.value = mla.kv_lora_rank, mla.v_head_dim
        self.rope, self.kernel, self.times = rope, kernel, score_times(config)
        self.shard: SequenceShard | None = None
        self.fused_linear: FusedLinear | None = None
        rank = mla.q_lora_rank
        self.wq_a = None if rank is None else nn.Linear(hidden, rank, bias=False)
        self.q_norm = None if rank is None else RMSNorm(rank, LATENT_EPS)
        self.wq = nn.Linear(rank or hidden, config.query_width, bias=False)
        self.wkv_a = nn.Linear(hidden, self.latent + mla.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(self.latent, LATENT_EPS)
        values = config.heads * (mla.qk_nope_head_dim + self.value)
        self.wkv_b = nn.Linear(self.latent, values, bias=False)
        self.wo = nn.Linear(config.value_width, hidden, bias=False)

    def fuse(self, as_one: bool = True) -> None:
        """Let `fused_linear` compute the two projections of x, as one product or one by one."""
        first = self.wq if self.wq_a is None else self.wq_a
        self.fused_linear = FusedLinear(first, self.wkv_a, as_one=as_one)

    def _heads(self, x: Tensor, *widths: int) -> tuple[Tensor, ...]:
        """``[batch, seq, local heads x widths]`` → ``[batch, local heads, seq, width]`` of each width."""
        return x.unflatten(-1, (-1, sum(widths))).transpose(1, 2).split(widths, dim=-1)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """``[batch, seq, hidden]`` → the same; documents as of `models.layers.attention.sdpa`."""
        if self.fused_linear is not None:
            q, kv = self.fused_linear(x)
        else:
            q, kv = (self.wq if self.wq_a is None else self.wq_a)(x), self.wkv_a(x)
        if self.q_norm is not None:
            q = self.wq(_normed(self.q_norm, q))
        plain, turned = self._heads(q, *self.parts)
        q = torch.cat((plain, rotate(turned, self.rope, self.shard)), dim=-1)
        if self.times != 1.0:
            q = q * self.times
        latent, shared = kv.split((self.latent, self.parts[1]), dim=-1)
        plain, v = self._heads(self.wkv_b(_normed(self.kv_norm, latent)), self.parts[0], self.value)
        shared = rotate(shared.unsqueeze(1), self.rope, self.shard).to(plain.dtype)
        k = torch.cat((plain, shared.expand(-1, plain.size(1), -1, -1)), dim=-1)
        v = F.pad(v, (0, k.size(-1) - self.value))
        out = self.kernel(q, k, v, documents, None)[..., : self.value]
        found: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return found


class DenseFirstBlock(PreNormBlock):
    """A block with a dense hidden layer among mixtures, which has no use for the weights of rows."""

    def forward(self, x: Tensor, weights: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return super().forward(x, None, documents)


def norm(config: ModelConfig) -> RMSNorm:
    """The norm over the residual stream."""
    return RMSNorm(config.hidden_size, config.norm_eps)


def block(config: ModelConfig, kernel: AttentionKernel, layer: int) -> PreNormBlock:
    """The block of an absolute layer number."""
    attention = LatentAttention(config, kernel, rope_of(config.rope_theta, config.rope_scaling))
    if is_mixture(config, layer):
        mixture = MixtureOfExperts(config.moe, config.hidden_size)
        return PreNormBlock(norm(config), attention, norm(config), mixture)
    dense = SwiGLU(config.hidden_size, config.intermediate_size)
    return DenseFirstBlock(norm(config), attention, norm(config), dense)
