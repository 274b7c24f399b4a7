"""Decoder blocks: each half norms its input, or its input and output, and adds to the residual stream."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from picotron_ray.models.layers.pointwise import AddedNorm, added_norm
from picotron_ray.models.layers.rms_norm import RMSNorm


class PreNormBlock(nn.Module):
    """One pre-norm decoder block.

    Args:
        attention: of hidden states and numbers of documents.
        attention_norm, mlp_norm: norms of the inputs of ``attention`` and ``mlp``.
        mlp: hidden layer; a mixture of experts takes the rows' weights too.

    Fields:
        added_norm: adds what attention gave and norms the sum, see `models.layers.pointwise`.
    """

    def __init__(
        self,
        attention_norm: RMSNorm | nn.LayerNorm,
        attention: nn.Module,
        mlp_norm: RMSNorm | nn.LayerNorm,
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        assert mlp_norm.eps is not None
        self.eps = mlp_norm.eps
        self.added_norm: AddedNorm = added_norm

    def forward(self, x: Tensor, weights: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        found, norm = self.attention(self.attention_norm(x), documents), self.mlp_norm
        x, normed = self.added_norm(x, found, norm.weight, getattr(norm, "bias", None), self.eps)
        return x + (self.mlp(normed) if weights is None else self.mlp(normed, weights))


class BothNormsBlock(nn.Module):
    """One decoder block with norms before and after attention and hidden layer (Gemma 2).

    Args:
        norm: makes a norm over the residual stream.
        attention, mlp: as of `PreNormBlock`.
    """

    def __init__(self, norm: Callable[[], RMSNorm], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.post_attention_norm = norm()
        self.mlp_norm = norm()
        self.mlp = mlp
        self.post_mlp_norm = norm()

    def forward(self, x: Tensor, weights: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """``[batch, seq, hidden]`` → the same; ``weights`` of rows are a mixture's, and of no use here."""
        x = x + self.post_attention_norm(self.attention(self.attention_norm(x), documents))
        total: Tensor = x + self.post_mlp_norm(self.mlp(self.mlp_norm(x)))
        return total
