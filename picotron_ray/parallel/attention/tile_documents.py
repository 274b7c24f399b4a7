"""Documents of a tile: of some queries of a rank, and of the keys that they are compared with.

Kernels that have no masks are told of *sequences* instead: rows are laid end to end, and queries of a
sequence see keys of the same one. There are two kinds of tile.

- Queries among their own keys (causal). A sequence is a document. Those that have no token here are empty,
  so that the number of sequences is that of the batch, which the host knows.
- Queries after all keys. One document of a row may go on from the keys to the queries, and it is that of the
  last key. So the keys of a row are two sequences: those before that document, which nobody reads, and those
  in it, which all queries read. Results of queries of other documents are dropped (``visible``). Read by all,
  the keys end where the tile's keys end and windows are counted alike in every row; a sequence of the
  document's own queries would end elsewhere in every row.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from picotron_ray.models.layers.document_mask import same_document


class TileDocuments:
    """Document numbers of a tile, which no two rows share, ascending (``numbered_through``).

    Args:
        queries: ``[batch, queries]``; keys ``[batch, keys]``.
        count: documents of the whole batch; None where no kernel asks.
    """

    def __init__(self, queries: Tensor, keys: Tensor, count: int | None = None) -> None:
        self.queries, self.keys, self.count = queries, keys, count

    @property
    def _last(self) -> Tensor:
        """Number of the document of the last key, ``[batch, 1]``."""
        return self.keys.narrow(1, self.keys.size(1) - 1, 1)

    @property
    def same(self) -> Tensor:
        """Mask of keys in a query's document, bool ``[batch, 1, queries, keys]``."""
        return same_document(self.queries, self.keys)

    @cached_property
    def starts(self) -> tuple[Tensor, Tensor]:
        """Starts of documents in queries and in keys laid end to end: int32 ``[documents + 1]``."""
        assert self.count is not None, "kernels that ask say so (LseKernel.counts_documents)"
        wanted = torch.arange(self.count + 1, dtype=torch.int32, device=self.queries.device)
        ends_meet = [
            x.clone(memory_format=torch.contiguous_format).flatten() for x in (self.queries, self.keys)
        ]
        queries, keys = (torch.searchsorted(x, wanted, out_int32=True) for x in ends_meet)
        return queries, keys

    @cached_property
    def going_on(self) -> tuple[Tensor, Tensor]:
        """Starts in queries and keys of two sequences a row: nobody's keys, then those that all read."""
        batch, keys = self.keys.shape
        row = torch.arange(batch, device=self.keys.device)
        read = (self.keys == self._last).sum(dim=1)
        of_keys = torch.stack(((row + 1) * keys - read, (row + 1) * keys), dim=1)
        of_queries = torch.stack((row, row + 1), dim=1) * self.queries.size(1)
        first, second = (F.pad(x.flatten(), (1, 0)).to(torch.int32) for x in (of_queries, of_keys))
        return first, second

    @cached_property
    def visible(self) -> Tensor:
        """Mask of the queries in the document of the last key, bool ``[batch, queries]``."""
        return self.queries == self._last
