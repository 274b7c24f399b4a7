"""Micro-batches of tasks: words of rows (`data.tasks.task_samples`) as tensors on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from picotron_ray.data.batch import StepBatch
from picotron_ray.data.tasks.task_samples import TaskPart, TaskShape
from picotron_ray.train.meta.strategies import Examples


class TaskBatcher:
    """Cuts the batches of one rank into micro-batches of tasks.

    Args:
        dtype: of values that are no token ids, and of weights.
    """

    def __init__(self, shape: TaskShape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self._device, self._dtype = shape, device, dtype

    def micro_batches(self, batch: StepBatch) -> Iterator[tuple[Examples, Examples, Tensor]]:
        """Yield support and query examples ``[tasks, examples, ...]``, and weights of tasks ``[tasks]``."""
        for rows, weights in zip(batch.tokens, batch.weights, strict=True):
            support, query = self.examples(torch.from_numpy(rows).to(self._device))
            yield support, query, torch.from_numpy(weights).to(self._device, self._dtype)

    def examples(self, rows: Tensor) -> tuple[Examples, Examples]:
        """Return support and query examples of rows, int64 ``[tasks, words]``."""
        shape = self.shape
        words = rows.view(len(rows), shape.examples, -1)
        inputs, targets = words.split([shape.inputs.words, shape.targets.words], dim=2)
        made = self._values(inputs, shape.inputs), self._values(targets, shape.targets)
        (first, then), (wanted, judged) = (part.split([shape.support, shape.query], dim=1) for part in made)
        return Examples(first, wanted), Examples(then, judged)

    def _values(self, words: Tensor, part: TaskPart) -> Tensor:
        """Return the values of words, ``[tasks, examples, ...]``; a float's bits become the float."""
        shaped = words.reshape(*words.shape[:2], *part.shape)
        if part.tokens:
            return shaped
        return shaped.to(torch.int32).view(torch.float32).to(self._dtype)  # int32 keeps the low 32 bits
