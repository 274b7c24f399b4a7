"""Documents that share a row: a token attends to tokens of its own document alone (``data.document_masks``).

A document ends with its end token, which still belongs to it; what follows is the next one. Only borders
inside a row count: the row's first tokens may be the middle of a document, whose beginning they do not see
with or without masks. The loss is that of every token, an end token's guess of the next document's first
included, so that rows weigh the same with masks as without.

Rotary positions go on counting through the row: attention scores depend on the distance of two tokens, which
an offset common to a document does not change. Positions that are added to the embedding would differ.

Numbers, not masks, go through the model: ``[batch, row]`` of them, of the whole row wherever it is cut, are
all that a mask of any part of it needs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_numbers(tokens: Tensor, end: int) -> Tensor:
    """Which document of its row each token belongs to: how many end tokens stand before it.

    Args:
        tokens: ids ``[..., row]``, whole rows.
        end: the id that ends a document.

    Returns: int32, of the same shape, 0 for the row's first document.
    """
    ends = (tokens == end).to(torch.int32)
    return ends.cumsum(dim=-1, dtype=torch.int32) - ends


def same_document(queries: Tensor, keys: Tensor) -> Tensor:
    """Which keys a query may see: numbers ``[batch, q]`` and ``[batch, k]`` → bool ``[batch, 1, q, k]``."""
    return queries[:, None, :, None] == keys[:, None, None, :]


def causal_within(documents: Tensor) -> Tensor:
    """Which tokens of a row a token sees: numbers ``[batch, row]`` → bool ``[batch, 1, row, row]``."""
    return same_document(documents, documents).tril()
