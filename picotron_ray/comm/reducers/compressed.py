"""Sum of encoded gradients: encoded parts are exchanged, added in fp32 by their owners, and encoded again.

Adding up at an owner keeps scales apart (ranks quantise by scales of their own) and the bytes independent of
the number of ranks: two halves of (R - 1) / R of the encoded buffer, as a ring's. What the first encoding
leaves out stays with the rank that encodes, what the second does with the owner. All of it is in the error
feedback: the errors of all ranks together are the true sum less the result (as Tang et al. 2021, 1-bit Adam).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.reducers.codecs import Codec
from picotron_ray.comm.reducers.exact import padded
from picotron_ray.comm.reducers.feedback import Feedback
from picotron_ray.comm.reducers.reducer import Reduction
from picotron_ray.comm.renamed import all_gather_single
from picotron_ray.comm.wire_bytes import GRADIENTS, SENT


class Compressed:
    """Reducer by a codec. The exchange travels beside the backward pass, the gather after it."""

    overlaps = True
    exact = False

    def __init__(self, group: dist.ProcessGroup, codec: Codec) -> None:
        self._group, self._codec = group, codec

    def start(
        self, flat: Tensor, shapes: Sequence[torch.Size], feedback: Feedback | None, step: int
    ) -> Reduction:
        """Encode what is owed and the gradients, and start the exchange."""
        assert feedback is not None, "what is left out must be kept"
        return _EncodedSum(flat, feedback, self._group, self._codec)


class _EncodedSum:
    def __init__(self, flat: Tensor, feedback: Feedback, group: dist.ProcessGroup, codec: Codec) -> None:
        self._flat, self._feedback, self._group, self._codec = flat, feedback, group, codec
        feedback.add_to_(flat)
        self._ranks = group.size()
        parts = padded(flat, self._ranks).view(self._ranks, -1)
        self._size = parts.size(1)
        sent = codec.encode(parts)
        self._error = parts - codec.decode(sent, self._size)
        self._received = torch.empty_like(sent)
        SENT.add(GRADIENTS, (self._ranks - 1) * sent.size(1))
        self._sent = sent
        self._work = dist.all_to_all_single(self._received, sent, group=group, async_op=True)

    def wait(self) -> None:
        """Add up this rank's part, and gather the encoded sums."""
        self._work.wait()
        total = self._codec.decode(self._received, self._size).sum(dim=0, keepdim=True)
        mine = self._codec.encode(total)
        gathered = mine.new_empty(self._ranks, mine.size(1))
        SENT.add(GRADIENTS, (self._ranks - 1) * mine.size(1))
        all_gather_single(gathered, mine, group=self._group)
        sums = self._codec.decode(gathered, self._size)
        own = self._group.rank()
        self._error[own] += total[0] - sums[own]
        self._feedback.keep(self._error.flatten()[: self._flat.numel()])
        self._flat.copy_(sums.flatten()[: self._flat.numel()])
