"""A decoder as plain modules, of the family that its config names.

Nothing here knows of a mesh. These properties make it cuttable:

- Layers live in a ``ModuleDict`` keyed by their absolute number, so a pipeline stage's parameters keep the
  canonical names of the family's table.
- There are no buffers, so a module built on the meta device needs nothing but its parameters.
- Attention cuts by whole heads and takes any kernel, see `models.layers.attention`.

Blocks and norms are those of the family's ``modules.py``, which has two functions:

- ``block(config, kernel, layer)``: a module of hidden states ``[batch, seq, hidden]``, a mixture's weights of
  rows and numbers of documents, with ``attention`` and ``mlp`` inside.
- ``norm(config)``: the norm before the head.
"""

from __future__ import annotations

import importlib
import math
from typing import Protocol, cast

from torch import Tensor, nn

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.models.families.registry import family_of
from picotron_ray.models.layers.attention import AttentionKernel, sdpa, softcapped
from picotron_ray.models.layers.block import PreNormBlock
from picotron_ray.models.layers.lm_head import Head
from picotron_ray.models.layers.positions import Positions
from picotron_ray.models.layers.rms_norm import RMSNorm, closed_added_norm
from picotron_ray.models.layers.sinks import sink_attention


class FamilyModules(Protocol):
    """A family's ``modules.py``."""

    def block(self, config: ModelConfig, kernel: AttentionKernel, layer: int = 0) -> nn.Module: ...

    def norm(self, config: ModelConfig) -> nn.Module: ...


def modules_of(config: ModelConfig) -> FamilyModules:
    """The modules of the family that a config names; found by its folder, as the registry loads no torch."""
    name = f"picotron_ray.models.families.{config.family}.modules"
    return cast(FamilyModules, importlib.import_module(name))


def _default_kernel(config: ModelConfig) -> AttentionKernel:
    if family_of(config).sinks:
        return sink_attention
    cap = config.attention_softcap
    return sdpa if cap is None else softcapped(cap)


class Transformer(nn.Module):
    """The whole decoder, or the part of it that one pipeline stage holds.

    Args:
        config: the uncut model.
        first_layer, last_layer: half-open range of absolute layer numbers; None: to the end.
        embed, head: whether this part holds the embedding, and the final norm and head.
        attention: kernel ``(q, k, v, documents, window) → out`` as :func:`sdpa`; None: that, or one that caps
            scores (``attention_softcap``), or with sinks `sink_attention`.

    ``forward`` takes tokens ``[batch, seq]`` (with ``embed``) or hidden ``[batch, seq, hidden]`` and
    returns logits ``[batch, seq, vocab]`` (with ``head``) or hidden; a mixture of experts also takes the
    weights of rows ``[batch]`` or of tokens ``[batch, seq]``, because those of weight 0 go to no expert.
    With ``documents [batch, row]`` (`models.layers.document_mask`) attention stays within a document, where
    learned positions begin anew. With ``targets [batch, seq]`` what comes out of the head is their losses
    ``[batch, seq]`` (`models.layers.lm_head`). Tied embeddings are one parameter where both ends are in one
    part, and ``tie()`` must be called again after anything that replaces parameters (``to_empty``, tensor
    parallelism); a part with one end has a copy (`parallel.pipeline.tied_embeddings`).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        first_layer: int = 0,
        last_layer: int | None = None,
        embed: bool = True,
        head: bool = True,
        attention: AttentionKernel | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        modules = modules_of(config)
        last = config.layers if last_layer is None else last_layer
        kernel = attention or _default_kernel(config)
        self.embedding_times = math.sqrt(config.hidden_size) if family_of(config).scaled_embedding else 1.0
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size) if embed else None
        rows = config.max_positions if embed else None
        self.positions = None if rows is None else Positions(rows, config.hidden_size)
        self.layers = nn.ModuleDict(
            {str(i): modules.block(config, kernel, i) for i in range(first_layer, last)}
        )
        self.norm = modules.norm(config) if head else None
        self.head = Head(config.hidden_size, config.vocab_size, config.logit_softcap) if head else None
        self.tie()

    def tie(self) -> None:
        """Make the head read the embedding's parameter, where the config ties them."""
        if self.config.tie_embeddings and self.head is not None and self.embed is not None:
            self.head.weight = self.embed.weight

    def close_norms(self) -> int:
        """Give every RMSNorm its gradient in closed form (`layers.rms_norm`); returns their number."""
        for layer in self.layers.values():
            if isinstance(layer, PreNormBlock):
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
            if self.embedding_times != 1.0:
                x = x * self.embedding_times
        if self.positions is not None:
            x = self.positions(x, documents)
        for layer in self.layers.values():
            x = layer(x, weights, documents)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x), targets)
        return x
