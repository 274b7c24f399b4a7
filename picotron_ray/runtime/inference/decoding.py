"""Tokens after a prompt, one at a time, and the log-probabilities of given ones.

Each token is computed from the whole text before it, so nothing is kept between two. That is n forward passes
for n tokens, and right for every family. Rows of a batch are of one length, or filled up on the right: what a
causal model says of a token does not depend on what follows it. A choice is drawn from fp64 probabilities on
the CPU, by a generator of its own for each sample, so the device decides nothing but rounding.

Sources: Fan et al. 2018 (top-k), Holtzman et al. 2020 (top-p, "nucleus").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from picotron_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Choice of the next token.

    Fields:
        temperature: divides logits; 0: the most likely token, always.
        top_k: choose among so many most likely tokens; 0: all.
        top_p: choose among the fewest tokens whose probabilities sum to at least this.
        seed: of the draws.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def problems(self) -> list[str]:
        """Mistakes, one line each; none where it can be used."""
        rules = (
            (not 0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 or more"),
            (self.top_k < 0, "top-k", self.top_k, "0 (all tokens) or more"),
            (not 0 < self.top_p <= 1, "top-p", self.top_p, "more than 0, at most 1"),
            (not 0 <= self.seed < 2**63, "seed", self.seed, "0 or more, below 2**63"),
        )
        return [f"--{key}: saw {seen}, expected {wanted}" for bad, key, seen, wanted in rules if bad]


@dataclass(slots=True)
class Decoded:
    """One sample.

    Fields:
        ids: after the prompt, without what ended it.
        finish: ``end`` (of the document), ``stop`` (a text that was asked for) or ``length``.
    """

    ids: list[int] = field(default_factory=list)
    finish: Literal["end", "stop", "length"] = "length"


def logits_of(module: nn.Module, tokens: Tensor, live: Tensor | None = None) -> Tensor:
    """Compute ``[batch, seq, vocab]`` in one pass.

    Args:
        tokens: ``[batch, seq]``.
        live: ``[batch, seq]``, False for what only fills rows, and goes to no expert; None: all count.
    """
    weights = None if live is None or not _has_experts(module) else live.float()
    found: Tensor = module(tokens) if weights is None else module(tokens, weights)
    return found


def _has_experts(module: nn.Module) -> bool:
    from picotron_ray.models.layers.moe import MixtureOfExperts

    return any(isinstance(part, MixtureOfExperts) for part in module.modules())


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Choose one token; ``logits``: ``[vocab]``, fp64 on the CPU."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    ranked, ids = (logits / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        ranked, ids = ranked[: sampling.top_k], ids[: sampling.top_k]
    chances = ranked.softmax(0)
    before = chances.cumsum(0) - chances
    chances = chances * (before < sampling.top_p)
    return int(ids[torch.multinomial(chances, 1, generator=generator)])


@torch.no_grad()
def decode(
    module: nn.Module,
    prompt: Sequence[int],
    *,
    most: int,
    positions: int,
    vocabulary: int,
    sampling: Sampling,
    samples: int = 1,
    end_id: int | None = None,
    stopped: Callable[[list[int]], bool] = lambda ids: False,
) -> list[Decoded]:
    """Go on from a prompt.

    Args:
        prompt: at least one token, at most ``positions``.
        most: tokens of each sample.
        positions: tokens that the model sees; older ones are left out once there are more.
        vocabulary: ids from here on are never chosen; 0: any id of the model is.
        end_id: ends a sample; None: nothing does.
        stopped: whether a sample's ids so far end it.

    Raises:
        ConfigError: logits are NaN.
    """
    device = next(module.parameters()).device
    rows = [list(prompt) for _ in range(samples)]
    found = [Decoded() for _ in range(samples)]
    draws = [torch.Generator().manual_seed((sampling.seed + index) % 2**63) for index in range(samples)]
    going = list(range(samples))
    for _ in range(most):
        if not going:
            break
        tokens = torch.tensor([rows[index][-positions:] for index in going], device=device)
        logits = logits_of(module, tokens)[:, -1].to("cpu", torch.float64)
        if vocabulary:
            logits = logits[:, :vocabulary]
        if not logits.isfinite().all():
            raise ConfigError("weights: saw logits that are not finite; take an earlier commit with --step")
        for index, row in zip(list(going), logits, strict=True):
            token, sample = choose(row, sampling, draws[index]), found[index]
            if token == end_id:
                sample.finish = "end"
                going.remove(index)
                continue
            rows[index].append(token)
            sample.ids.append(token)
            if stopped(sample.ids):
                sample.finish = "stop"
                going.remove(index)
    return found
