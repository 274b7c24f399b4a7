"""Meta-learning written down plainly: explicit weights, `torch.autograd`, one task after the other.

Nothing here uses `torch.func` or the package's strategies: it is what these are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Task = tuple[Tensor, Tensor, Tensor, Tensor]
"""Inputs and targets of the support set, then of the query set."""


def network(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """A multilayer perceptron with tanh, from its weights and biases in turn."""
    for at in range(0, len(weights), 2):
        x = x @ weights[at].T + weights[at + 1]
        if at + 2 < len(weights):
            x = torch.tanh(x)
    return x


def squares(weights: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error."""
    return ((network(weights, x) - y) ** 2).mean()


def adapted(
    weights: Sequence[Tensor], rates: Sequence[Tensor], x: Tensor, y: Tensor, steps: int, graph: bool
) -> list[Tensor]:
    """Weights after the inner steps; with their graph if asked."""
    now = list(weights)
    for _ in range(steps):
        slopes = torch.autograd.grad(squares(now, x, y), now, create_graph=graph)
        now = [w - a * g for w, a, g in zip(now, rates, slopes, strict=True)]
    return now


def meta_gradients(
    strategy: str, weights: Sequence[Tensor], rates: Sequence[Tensor], tasks: Sequence[Task], steps: int
) -> tuple[list[Tensor], list[Tensor], float]:
    """Mean meta-gradients of weights and of rates over tasks, and the mean loss after adaptation."""
    of_weights = [torch.zeros_like(w) for w in weights]
    of_rates = [torch.zeros_like(w) for w in weights]
    total = 0.0
    for x, y, x_query, y_query in tasks:
        leaves = [w.detach().clone().requires_grad_() for w in weights]
        alphas = [a.detach().clone().requires_grad_() for a in rates]
        if strategy in ("maml", "metasgd"):
            loss = squares(adapted(leaves, alphas, x, y, steps, True), x_query, y_query)
            found = torch.autograd.grad(loss, [*leaves, *alphas])
        else:
            now = [w.detach().requires_grad_() for w in adapted(leaves, alphas, x, y, steps, False)]
            loss = squares(now, x_query, y_query)
            if strategy == "fomaml":
                found = torch.autograd.grad(loss, now)
            else:
                found = tuple((w - n).detach() / a for w, n, a in zip(weights, now, rates, strict=True))
        for sums, part in ((of_weights, found[: len(weights)]), (of_rates, found[len(weights) :])):
            for total_slope, slope in zip(sums, part, strict=False):
                total_slope += slope.detach() / len(tasks)
        total += float(loss.detach()) / len(tasks)
    return of_weights, of_rates, total
