"""A Llama-style decoder as plain modules: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

With ``model.family=gpt2`` it is GPT-2: `models.gpt2` has what differs.

Nothing here knows of a mesh. What makes it cuttable:

- Layers live in a ``ModuleDict`` keyed by their absolute number, so a pipeline stage's parameters keep
  the canonical names of ``models.plan``.
- Head counts are read off the local projections (views with ``-1``), so ``parallelize_module`` may cut
  the weights by whole heads.
- There are no buffers: rotary tables are computed in fp64 and cached per (positions, device), so a module
  built on the meta device needs nothing but its parameters.
- The attention kernel is a function argument, and attention knows which positions its tokens have. Documents
  of a row are an argument of every forward, not a state of modules: micro-batches overlap in pipelines, and
  recomputation runs a forward again.

Sources: Touvron et al. 2023 (Llama), Su et al. 2021 (RoPE, half-split form as in Llama's HF weights),
Ainslie et al. 2023 (GQA), Jiang et al. 2023 (Mistral's window), Yang et al. 2024 and 2025 (Qwen2, Qwen3),
Shazeer 2020 (SwiGLU), Zhang & Sennrich 2019 (RMSNorm).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_ray.config.schema.model import ModelConfig, RopeScaling
from picotron_ray.models.gpt2 import GeluMlp, Positions, norm_of
from picotron_ray.models.layers.document_mask import seen_in_row
from picotron_ray.models.layers.fused_linear import Joint
from picotron_ray.models.layers.lm_head import Head
from picotron_ray.models.layers.moe import MixtureOfExperts
from picotron_ray.models.layers.pointwise import AddedNorm, added_norm
from picotron_ray.models.layers.rms_norm import RMSNorm, closed_added_norm
from picotron_ray.models.layers.swiglu import SwiGLU
from picotron_ray.models.parameters import SequenceShard

AttentionKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, int | None], Tensor]


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Causal attention by torch's scaled_dot_product_attention.

    Args:
        q: ``[batch, heads, seq, head]``; k, v ``[batch, kv_heads, seq, head]``.
        documents: numbers of the whole row's documents ``[batch, row]`` (``models.documents``), across which
            nothing is seen; None: the row is one.
        window: a query sees the last ``window`` keys alone, its own included (Jiang et al. 2023); None: all.

    Returns: ``[batch, heads, seq, head]``.
    """
    seen = None
    if documents is not None:
        seen = seen_in_row(q.size(-2), documents, window, q.device)
    elif window is not None:
        seen = _window_mask(q.size(-2), window, q.device)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=k.size(1) != q.size(1)
    )


@lru_cache(maxsize=4)
def _window_mask(row: int, window: int, device: torch.device) -> Tensor:
    """One for all layers and steps, also where evaluation asks first."""
    with torch.inference_mode(False):
        return seen_in_row(row, None, window, device)


class Rope(NamedTuple):
    """What rotary frequencies follow from."""

    theta: float
    scaling: RopeScaling = RopeScaling()


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


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions.

    Fields:
        kernel: attention over the local queries, see :func:`sdpa`.
        shard: which tokens of the row are here; None: all of them.
        joint: computes the projections together; None: each computes itself.
    """

    def __init__(self, config: ModelConfig, kernel: AttentionKernel) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.qkv_bias or config.is_gpt2
        self.head_size = config.head_size
        self.rope = None if config.is_gpt2 else Rope(config.rope_theta, config.rope_scaling)
        self.window = config.sliding_window
        self.kernel = kernel
        self.shard: SequenceShard | None = None
        self.joint: Joint | None = None
        self.wq = nn.Linear(hidden, config.query_width, bias=bias)
        self.wk = nn.Linear(hidden, config.key_width, bias=bias)
        self.wv = nn.Linear(hidden, config.key_width, bias=bias)
        self.wo = nn.Linear(config.query_width, hidden, bias=config.is_gpt2)
        self.q_norm = RMSNorm(self.head_size, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_size, config.norm_eps) if config.qk_norm else None

    def _heads(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """``[batch, seq, local heads x head]`` → ``[batch, local heads, seq, head]``, each head normed."""
        heads = x.view(x.size(0), x.size(1), -1, self.head_size)
        return (heads if norm is None else norm(heads)).transpose(1, 2)

    def fuse(self, as_one: bool = True) -> None:
        """Let `joint` compute the projections, as one product or one by one."""
        self.joint = Joint(self.wq, self.wk, self.wv, as_one=as_one)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        q, k, v = (self.wq(x), self.wk(x), self.wv(x)) if self.joint is None else self.joint(x)
        q = rotate(self._heads(q, self.q_norm), self.rope, self.shard)
        k = rotate(self._heads(k, self.k_norm), self.rope, self.shard)
        v = self._heads(v)
        window = self.window if self.window is not None and self.window < q.size(2) else None
        out = self.kernel(q, k, v, documents, window)
        return self.wo(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One pre-norm decoder block.

    Fields:
        added_norm: adds what attention gave and norms the sum, see `models.pointwise`.
    """

    def __init__(self, config: ModelConfig, kernel: AttentionKernel) -> None:
        super().__init__()
        self.attention_norm = norm_of(config)
        self.attention = Attention(config, kernel)
        self.mlp_norm = norm_of(config)
        self.eps = config.norm_eps
        self.added_norm: AddedNorm = added_norm
        dense = GeluMlp if config.is_gpt2 else SwiGLU
        self.mlp = (
            MixtureOfExperts(config.moe, config.hidden_size)
            if config.moe.experts
            else dense(config.hidden_size, config.intermediate_size)
        )

    def forward(self, x: Tensor, weights: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        found, norm = self.attention(self.attention_norm(x), documents), self.mlp_norm
        x, normed = self.added_norm(x, found, norm.weight, getattr(norm, "bias", None), self.eps)
        return x + (self.mlp(normed) if weights is None else self.mlp(normed, weights))


class Transformer(nn.Module):
    """The whole decoder, or the part of it that one pipeline stage holds.

    Args:
        config: the uncut model.
        first_layer, last_layer: half-open range of absolute layer numbers; None: to the end.
        embed, head: whether this part holds the embedding, and the final norm and head.
        attention: kernel ``(q, k, v, documents, window) → out`` as :func:`sdpa`.

    ``forward`` takes tokens ``[batch, seq]`` (with ``embed``) or hidden ``[batch, seq, hidden]`` and
    returns logits ``[batch, seq, vocab]`` (with ``head``) or hidden; a mixture of experts also takes the
    rows' weights ``[batch]``, because rows of weight 0 go to no expert. With ``documents [batch, row]``
    (``models.documents``) attention stays within a document. With ``targets [batch, seq]`` what
    comes out of the head is their losses ``[batch, seq]`` (``models.head``). Tied embeddings are one
    parameter where both ends are in one part, and ``tie()`` must be called again after anything that replaces
    parameters (``to_empty``, ``parallelize_module``); a part with one end has a copy (``parallel.tied``).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        first_layer: int = 0,
        last_layer: int | None = None,
        embed: bool = True,
        head: bool = True,
        attention: AttentionKernel = sdpa,
    ) -> None:
        super().__init__()
        self.config = config
        last = config.layers if last_layer is None else last_layer
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size) if embed else None
        rows = config.max_positions if embed else None
        self.positions = None if rows is None else Positions(rows, config.hidden_size)
        self.layers = nn.ModuleDict({str(i): Block(config, attention) for i in range(first_layer, last)})
        self.norm = norm_of(config) if head else None
        self.head = Head(config.hidden_size, config.vocab_size) if head else None
        self.tie()

    def tie(self) -> None:
        """Make the head read the embedding's parameter, where the config ties them."""
        if self.config.tie_embeddings and self.head is not None and self.embed is not None:
            self.head.weight = self.embed.weight

    def close_norms(self) -> int:
        """Give every RMSNorm its gradient in closed form (`models.rms_norm`); returns how many there are."""
        for layer in self.layers.values():
            assert isinstance(layer, Block)
            layer.added_norm = closed_added_norm
        norms = [module for module in self.modules() if isinstance(module, RMSNorm)]
        for norm in norms:
            norm.closed = True
        return len(norms)

    def forward(
        self,
        x: Tensor,
        weights: Tensor | None = None,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        if self.positions is not None:
            x = self.positions(x)
        for layer in self.layers.values():
            x = layer(x, weights, documents)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x), targets)
        return x
