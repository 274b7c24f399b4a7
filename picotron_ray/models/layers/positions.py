"""Learned positions: a table with a row per position, added to the embedding.

Positions count from the start of a row; where documents are kept apart (``data.document_masks``), from the
start of each document, as if it stood alone.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_ray.models.layers.document_mask import positions_in_documents
from picotron_ray.models.parameters import SequenceShard


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

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """``[batch, local tokens, hidden]`` → the same, each token's row added.

        Args:
            documents: numbers ``[batch, row]``, of whole rows; None: a row is one document.
        """
        shard = self.shard or SequenceShard(x.size(1) * self.part[1])
        here = _indices(shard, self.part, x.device)
        if documents is not None:
            here = positions_in_documents(documents)[:, here]
        return x + F.embedding(here, self.weight)
