"""Micro-batches of a step: its tokens on the device, and the other arguments of ``forward``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.data.samples import PADDING
from picotron_ray.layout.layout import Layout
from picotron_ray.models.layers.document_mask import document_numbers
from picotron_ray.models.parameters import SequenceShard
from picotron_ray.train.precision.precision import master_dtype

MicroBatch = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]
"""Inputs, targets, weights of rows, and the other arguments of ``forward`` by name."""
UNCOUNTED = -1
"""A target whose loss does not count."""


class MicroBatcher:
    """Cuts the batches of one rank into micro-batches.

    Args:
        cp_index: index of the rank among those that share every row.
        weighted: whether the model takes the weights of rows (routers count tokens by them).
    """

    def __init__(
        self, job: JobConfig, layout: Layout, cp_index: int, device: torch.device, *, weighted: bool
    ) -> None:
        self._device, self._dtype = device, master_dtype(job)
        self._weighted, self._with_targets = weighted, job.kernels.loss == "linear"
        self._document_end = job.data.document_end if job.data.document_masks else None
        self._kept: Tensor | None = None  # positions of a row that this rank computes; None: all
        if layout.cp > 1:
            shard = SequenceShard(job.data.sequence_length, layout.cp, cp_index)
            self._kept = torch.tensor(shard.positions(), device=device)

    def whole(self, batch: StepBatch) -> MicroBatch:
        """Return all micro-batches at once.

        Inputs, targets and named arguments are ``[micro_batches, micro_batch, local tokens]``. Weights are
        ``[micro_batches, micro_batch]``; routers also take one of each token, where rows hold padding.
        Documents are numbered over whole rows, before cp cuts them.
        """
        tokens, weights = self._sent(batch.tokens), self._sent(batch.weights).to(self._dtype)
        inputs, targets = tokens[..., :-1], tokens[..., 1:]
        if batch.counted is not None:
            counted = self._sent(batch.counted)
            targets = torch.where(counted, targets, UNCOUNTED)
        named = {"weights": weights} if self._weighted else {}
        if batch.documents is not None:
            named["documents"] = documents = self._sent(batch.documents)
            if self._weighted:
                named["weights"] = weights[..., None] * (documents != PADDING)
        elif self._document_end is not None:
            named["documents"] = document_numbers(inputs, self._document_end)
        if self._kept is not None:
            inputs, targets = inputs[..., self._kept], targets[..., self._kept]
            if named.get("weights", weights).dim() > weights.dim():
                named["weights"] = named["weights"][..., self._kept]
        if self._with_targets:
            named["targets"] = targets if batch.counted is None else targets.clamp(min=0)
        return inputs, targets, weights, named

    def _sent(self, array: np.ndarray) -> Tensor:
        """Copy to the device. For a copy of pageable memory CUDA may have the host wait for its stream."""
        held = torch.from_numpy(array)
        if self._device.type == "cuda" and torch.cuda.is_available():
            held = held.pin_memory()
        return held.to(self._device, non_blocking=True)

    def micro_batches(self, batch: StepBatch) -> Iterator[MicroBatch]:
        """Yield one micro-batch after the other."""
        inputs, targets, weights, named = self.whole(batch)
        for number in range(len(inputs)):
            mine = {name: values[number] for name, values in named.items()}
            yield inputs[number], targets[number], weights[number], mine
