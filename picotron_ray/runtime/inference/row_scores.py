"""Scores of rows by a commit's model: the loss of each, or the norm of its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_ray.data.samples import SampleSet

Values = npt.NDArray[np.float64]
ROWS = 8
"""Rows whose losses are computed at once."""
SAY_EVERY = 1000


def row_losses(
    module: nn.Module, samples: SampleSet, device: torch.device, say: Callable[[str], None]
) -> Values:
    """Return the mean loss of each sample's tokens that count, in nats; 0 where none does."""
    found = []
    with torch.no_grad():
        for some in _chunks(samples, ROWS, say):
            sums, counts = _loss_sums(module, samples, some, device)
            found.append((sums / counts.clamp(min=1)).cpu().numpy())
    return np.concatenate(found)


def row_gradient_norms(
    module: nn.Module, samples: SampleSet, device: torch.device, say: Callable[[str], None]
) -> Values:
    """Return the L2 norm of the gradient of each sample's mean loss, over all weights."""
    weights = list(module.requires_grad_(True).parameters())
    found = []
    for some in _chunks(samples, 1, say):
        sums, counts = _loss_sums(module, samples, some, device)
        gradients = torch.autograd.grad((sums / counts.clamp(min=1)).sum(), weights, allow_unused=True)
        squares = [gradient.double().square().sum() for gradient in gradients if gradient is not None]
        found.append(float(torch.stack(squares).sum().sqrt()))
    module.requires_grad_(False)
    return np.array(found)


def _loss_sums(
    module: nn.Module, samples: SampleSet, some: npt.NDArray[np.int64], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Sum the losses of each row's tokens that count, in fp64; with how many do."""
    rows = torch.from_numpy(samples.rows(some)).to(device)
    documents, counted = samples.documents(some), samples.counted(some)
    inputs, targets = rows[:, :-1], rows[:, 1:]
    named = {} if documents is None else {"documents": torch.from_numpy(documents).to(device)}
    logits = module(inputs, **named).float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    mask = torch.ones_like(losses) if counted is None else torch.from_numpy(counted).to(losses)
    return (losses * mask).double().sum(dim=1), mask.double().sum(dim=1)


def _chunks(samples: SampleSet, size: int, say: Callable[[str], None]) -> Iterator[npt.NDArray[np.int64]]:
    for first in range(0, samples.samples, size):
        yield np.arange(first, min(samples.samples, first + size))
        if (first + size) // SAY_EVERY > first // SAY_EVERY:
            say(f"{min(first + size, samples.samples)} of {samples.samples} rows")
