"""Trial of ``model.loss`` on the logits of the user's module, before a run starts.

A step divides the sum of token losses over the whole global batch once, by its number of tokens, however rows
are spread over micro-batches and replicas. So a loss must be one number per token, and must not see which
other rows are there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from picotron_ray.config.import_path import import_object, one_line
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.models.custom import logits_of
from picotron_ray.train.custom_model.plan_search import Trial

KEY = "model.loss"
EXPECTED = "expected a function (logits [batch, seq, vocab], targets [batch, seq]) -> losses [batch, seq]"


def check_loss(job: JobConfig, trial: Trial) -> list[str]:
    """Try the job's loss, if it names one; return a line for the user.

    Raises:
        ConfigError: it cannot be imported, or fails; its losses have another shape, no gradient, other values
            the second time, or depend on other rows.
    """
    if job.model.loss is None:
        return []
    loss = import_object(KEY, job.model.loss)
    if not callable(loss):
        raise ConfigError(f"{KEY}: {job.model.loss} is a {type(loss).__name__}, {EXPECTED}")
    with torch.no_grad():
        logits = logits_of(trial.module(trial.tokens)).detach()
    targets = trial.tokens.roll(-1, dims=1)
    losses, gradient = _run(loss, logits, targets)
    again, _ = _run(loss, logits, targets)
    if not torch.equal(losses, again):
        raise ConfigError(f"{KEY}: gives other losses the second time; make it free of randomness")
    _check_rows(trial, loss, logits, targets, losses)
    if not gradient.isfinite().all() or not gradient.any():
        kind = "no gradient" if gradient.isfinite().all() else "a gradient that is not finite"
        raise ConfigError(f"{KEY}: its losses have {kind} of the logits, so that nothing would be trained")
    return [f"loss {job.model.loss}: {float(losses.mean()):.4g} per token before training"]


def _run(loss: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses ``[batch, seq]``, and the gradient that their sum has for the logits."""
    leaf, before = logits.clone().requires_grad_(), targets.clone()
    given = leaf * 1.0  # writing a leaf in place would raise an error of its own
    try:
        losses = loss(given, targets)
    except Exception as error:
        raise ConfigError(
            f"{KEY}: of logits {list(logits.shape)} and targets {list(targets.shape)} it raises"
            f" {one_line(error)}; {EXPECTED}"
        ) from error
    if not isinstance(losses, Tensor) or losses.shape != targets.shape:
        seen = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ConfigError(f"{KEY}: saw {seen}, expected losses [batch, seq] = {list(targets.shape)}, no mean")
    if not torch.equal(targets, before) or not torch.equal(given.detach(), logits):
        raise ConfigError(f"{KEY}: it writes its arguments; work on a copy")
    if not losses.requires_grad:
        raise ConfigError(f"{KEY}: its losses have no gradient of the logits; compute them with torch")
    if not losses.isfinite().all():
        raise ConfigError(f"{KEY}: saw a loss that is not finite, of finite logits")
    (gradient,) = torch.autograd.grad(losses.sum(), leaf, allow_unused=True)
    return losses.detach(), torch.zeros_like(leaf) if gradient is None else gradient


def _check_rows(trial: Trial, loss: Any, logits: Tensor, targets: Tensor, losses: Tensor) -> None:
    """Refuse losses of a row that change with the other rows, or with their number."""
    other_logits, other_targets = logits.clone(), targets.clone()
    other_logits[1] += torch.linspace(-1, 1, logits.size(-1), dtype=logits.dtype)
    other_targets[1] = (other_targets[1] + 1) % logits.size(-1)
    changed, _ = _run(loss, other_logits, other_targets)
    alone, _ = _run(loss, logits[:1], targets[:1])
    if not trial.close(changed[0], losses[0]) or not trial.close(alone[0], losses[0]):
        raise ConfigError(
            f"{KEY}: losses of a row depend on other rows, which other ranks may hold; divide by no number of"
            " rows or tokens: the sum is divided by the batch's tokens afterwards"
        )
