"""Documents that share a row: a token attends to tokens of its own document alone (``data.document_masks``).

A document ends with its end token, which still belongs to it; what follows is the next one. Only borders
inside a row count: the row's first tokens may be the middle of a document, whose beginning they do not see
with or without masks. The loss is that of every token, an end token's guess of the next document's first
included, so that rows weigh the same with masks as without.

Rotary positions go on counting through the row: attention scores depend on the distance of two tokens, which
an offset common to a document does not change. Learned positions (GPT-2) are added to the embedding, where an
offset would show: they begin anew with each document (`positions_in_documents`).

Numbers, not masks, go through the model: ``[batch, row]`` of them, of the whole row wherever it is cut, are
all that a mask of any part of it needs, or where its documents start.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def document_numbers(tokens: Tensor, end: int) -> Tensor:
    """Number of each token's document within its row: the end tokens before it.

    Args:
        tokens: ids ``[..., row]``, whole rows.
        end: the id that ends a document.

    Returns: int32, of the same shape, 0 for the row's first document.
    """
    ends = (tokens == end).to(torch.int32)
    return ends.cumsum(dim=-1, dtype=torch.int32) - ends


def same_document(queries: Tensor, keys: Tensor) -> Tensor:
    """Mask of keys in a query's document.

    Numbers of documents ``[batch, q]`` and ``[batch, k]`` → bool ``[batch, 1, q, k]``.
    """
    return queries.unsqueeze(1).unsqueeze(3) == keys.unsqueeze(1).unsqueeze(1)


def seen_in_row(row: int, documents: Tensor | None, window: int | None, device: torch.device) -> Tensor:
    """Mask of the tokens that a token sees: none after it, of another document, or before its window.

    Args:
        row: tokens of it.
        documents: numbers ``[batch, row]``; None: the row is one document.
        window: how many tokens it sees at most, itself and the last ones before it; None: all.

    Returns: bool ``[batch or 1, 1, row, row]``.
    """
    seen = torch.ones(row, row, dtype=torch.bool, device=device).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    return seen[None, None] if documents is None else seen & same_document(documents, documents)


def _first_tokens(documents: Tensor) -> Tensor:
    """Mask of tokens with which a document starts; a row starts one, whatever the row before ends with."""
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return first


def positions_in_documents(documents: Tensor) -> Tensor:
    """Position of each token in its document, as far as the row holds it: the first one there has 0.

    Args:
        documents: numbers ``[batch, row]``.

    Returns: int64, of the same shape.

    Example:
        >>> positions_in_documents(torch.tensor([[0, 0, 0, 1, 2, 2]]))
        tensor([[0, 1, 2, 0, 0, 1]])
    """
    at = torch.arange(documents.size(1), device=documents.device)
    starts = torch.where(_first_tokens(documents), at, 0)
    return at - starts.cummax(dim=1).values


def numbered_through(documents: Tensor) -> Tensor:
    """Number documents through the batch, from 0: no two rows have the same number.

    Args:
        documents: numbers ``[batch, row]``.

    Returns: int32, of the same shape.
    """
    first = _first_tokens(documents).flatten()
    return (first.cumsum(dim=0, dtype=torch.int32) - 1).view_as(documents)


def document_starts(documents: Tensor) -> Tensor:
    """Starts of documents in rows laid end to end, as kernels for sequences of varied length take them.

    A row starts a document, whatever the row before it ends with.

    Args:
        documents: numbers ``[batch, row]``.

    Returns: int32 ``[documents + 1]``, the last being ``batch x row``. How many there are is in the data: the
        host waits for a GPU to say it.
    """
    first = _first_tokens(documents)
    return F.pad(first.flatten().nonzero().flatten(), (0, 1), value=first.numel()).to(torch.int32)
