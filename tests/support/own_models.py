"""Models as a user would bring them: nothing here knows of picotron_ray.

``encoder`` needs a causal mask, so its builder wraps torch's layers; ``chain`` is a plain ``nn.Sequential``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class EncoderModel(nn.Module):
    """A stack of torch's own encoder layers with learned positions and a causal mask."""

    def __init__(
        self, vocabulary: int, hidden: int, heads: int, inner: int, layers: int, longest: int, dropout: float
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(longest, hidden)
        layer = nn.TransformerEncoderLayer(
            hidden, heads, inner, dropout=dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)
        mask = nn.Transformer.generate_square_subsequent_mask(longest)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.size(1)
        x = self.embed(tokens) + self.positions(torch.arange(length, device=tokens.device))
        x = self.encoder(x, mask=self.mask[:length, :length], is_causal=True)
        return self.head(self.norm(x))


def encoder(
    vocabulary: int = 24, hidden: int = 16, heads: int = 4, inner: int = 24, layers: int = 2,
    longest: int = 32, dropout: float = 0.0,
) -> nn.Module:  # fmt: skip
    """What ``model.builder: own_models:encoder`` builds."""
    return EncoderModel(vocabulary, hidden, heads, inner, layers, longest, dropout)


def focal(logits: Tensor, targets: Tensor) -> Tensor:
    """What ``model.loss: own_models:focal`` computes (Lin et al. 2017): easy tokens weigh less."""
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return ((1 - (-losses).exp()).square() * losses).view(targets.shape)


class InPlace(nn.Module):
    """Adds to what its blocks put out where it lies; theirs are views, as torch's linear layers give them."""

    def __init__(self, vocabulary: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden)) for _ in range(layers)
        )
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            out = block(x)
            out += x
            x = out
        return self.head(x)


def in_place(vocabulary: int = 24, hidden: int = 16, layers: int = 3) -> nn.Module:
    """A model whose forward pass writes into its blocks' outputs."""
    return InPlace(vocabulary, hidden, layers)


class Mix(nn.Module):
    """Tokens mixed with those before them, by separate projections whose heads are read off their width."""

    def __init__(self, hidden: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.v = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.k = nn.Linear(hidden, hidden, bias=False)  # softmax would take no notice of a bias
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Residual(nn.Module):
    """Norm, attention, norm, MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.mix = Mix(hidden, 4)
        self.mlp = nn.Sequential(nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.first(x))
        return x + self.mlp(self.second(x))


def chain(vocabulary: int = 24, hidden: int = 16, inner: int = 24, layers: int = 4) -> nn.Module:
    """A chain that can be cut into pipeline stages."""
    blocks = [Residual(hidden, inner) for _ in range(layers)]
    return nn.Sequential(
        nn.Embedding(vocabulary, hidden), *blocks, nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary)
    )


class Poisoned(nn.Module):
    """A small model whose outputs are NaN wherever one token stands four times in a row."""

    def __init__(self, vocabulary: int, hidden: int, poison: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.inner = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, vocabulary)
        self.poison = poison

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.inner(self.embed(tokens))))
        bad = (tokens.unfold(1, 4, 1) == self.poison).all(-1).any()
        return torch.where(bad, torch.full_like(logits, torch.nan), logits)


def poisoned(vocabulary: int = 24, hidden: int = 16, poison: int = 23) -> nn.Module:
    """A model that one passage of the data makes useless."""
    return Poisoned(vocabulary, hidden, poison)


CHAIN_PLAN = {"tensor": {"*.mlp.0": "colwise", "*.mlp.2": "rowwise"}}
"""A plan by import path: MLPs only, attention whole."""


def gpt2(vocabulary: int = 24, hidden: int = 16, heads: int = 4, layers: int = 2, longest: int = 32) -> Any:
    """A GPT-2 of transformers, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary, n_embd=hidden, n_head=heads, n_layer=layers, n_positions=longest,
            bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )
    )  # fmt: skip


# --- models that must be refused -------------------------------------------------------------------------


class Bag(nn.Module):
    """Every position sees the whole row: not causal."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + x.mean(dim=1, keepdim=True))


def not_causal(vocabulary: int = 24) -> nn.Module:
    return Bag(vocabulary)


class Noisy(nn.Module):
    """Draws new numbers at every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return x + torch.rand_like(x)


def noisy() -> nn.Module:
    return Noisy()


class Normed(nn.Module):
    """Rows see each other through batch statistics, kept in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(24, 24), nn.BatchNorm1d(24)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2)


def batch_norm() -> nn.Module:
    return Normed()


class Softmaxed(nn.Module):
    """A pair of linears that looks like an MLP, with something between that cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).softmax(dim=-1))


def softmaxed() -> nn.Module:
    return nn.Sequential(nn.Embedding(24, 16), Softmaxed(), Softmaxed(), nn.Linear(16, 24))


def broken() -> nn.Module:
    raise RuntimeError("no such luck")


def no_module() -> int:
    return 3
