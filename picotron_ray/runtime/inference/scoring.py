"""Log-likelihoods of texts under a commit's model, in nats, as harnesses ask for them.

Texts longer than the model's positions lose their beginning. A rolling one is cut into windows, and each
token is scored once, with as much before it as its window has. Sums are fp64, of logits in the weights' type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from picotron_ray.errors import ConfigError
from picotron_ray.runtime.inference.decoding import Sampling, decode, logits_of
from picotron_ray.runtime.inference.text import ModelText

ROWS = 8
"""Texts that are scored at once."""


@dataclass(frozen=True, slots=True)
class CommitScorer:
    """Scores of a model and its text.

    Fields:
        positions: tokens that the model sees at once.
    """

    module: nn.Module
    text: ModelText
    positions: int

    @property
    def begin(self) -> list[int]:
        """Ids that stand before a text without a context: the end of the document before.

        Raises:
            ConfigError: nothing ends a document.
        """
        if self.text.end_id is None:
            raise ConfigError(
                "data.end_token: saw null, but a text without a context follows a document's end"
            )
        return [self.text.end_id]

    def loglikelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Score each continuation after its context; and whether each of its tokens is the likeliest one."""
        asked = []
        for context, continuation in pairs:
            before = self.text.encode(context) or self.begin
            asked.append((before, self.text.encode(continuation)))
        return self.of_ids(asked)

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Score each whole text, from its first token on."""
        found = []
        for text in texts:
            asked = list(windows(self.text.encode(text), self.begin, self.positions))
            found.append(sum(score for score, _ in self.of_ids(asked)))
        return found

    @torch.no_grad()
    def of_ids(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Score ids after ids, of which the first are left out where both are too long for the model.

        Raises:
            ConfigError: a continuation alone is longer than the model's positions.
        """
        found: dict[int, tuple[float, bool]] = {}
        longest = max((len(after) for _, after in pairs), default=0)
        if longest > self.positions:
            raise ConfigError(f"saw {longest} tokens to be scored, expected at most {self.positions}")
        order = sorted(range(len(pairs)), key=lambda at: len(pairs[at][0]) + len(pairs[at][1]))
        for first in range(0, len(order), ROWS):
            places = order[first : first + ROWS]
            rows = [(pairs[at][0] + pairs[at][1])[-self.positions - 1 :] for at in places]
            logits = self._logits([row[:-1] for row in rows])
            for at, row, scored in zip(places, rows, logits, strict=True):
                found[at] = _score(scored[: len(row) - 1], row[1:], len(pairs[at][1]))
        return [found[at] for at in range(len(pairs))]

    def _logits(self, rows: list[list[int]]) -> Tensor:
        """Compute ``[rows, longest, vocab]``; nothing of a row sees what fills it on the right."""
        device, longest = next(self.module.parameters()).device, max(map(len, rows))
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        live = torch.zeros(len(rows), longest, dtype=torch.bool)
        for at, row in enumerate(rows):
            tokens[at, : len(row)], live[at, : len(row)] = torch.tensor(row), True
        return logits_of(self.module, tokens.to(device), live.to(device))

    def go_on(self, context: str, stops: Sequence[str], most: int, sampling: Sampling) -> str:
        """Go on from a context until one of ``stops`` is there, which is left out, or ``most`` tokens are."""
        ids = (self.text.encode(context) or self.begin)[-self.positions :]
        (sample,) = decode(
            self.module,
            ids,
            most=most,
            positions=self.positions,
            vocabulary=self.text.vocabulary,
            sampling=sampling,
            end_id=self.text.end_id,
            stopped=lambda made: any(stop in self.text.decode(made) for stop in stops),
        )
        made = self.text.decode(sample.ids)
        return made[: min((at for stop in stops if (at := made.find(stop)) >= 0), default=len(made))]


def _score(logits: Tensor, targets: list[int], count: int) -> tuple[float, bool]:
    """Sum of the log-probabilities of the last ``count`` targets, and whether all are the likeliest."""
    if not count:
        return 0.0, True
    ids = torch.tensor(targets[-count:])
    chances = logits[-count:].to("cpu", torch.float64).log_softmax(-1)
    return float(chances.gather(-1, ids[:, None]).sum()), bool((chances.argmax(-1) == ids).all())


def windows(ids: list[int], begin: list[int], most: int) -> Iterator[tuple[list[int], list[int]]]:
    """Cut ids into parts to be scored, each with what stands before it, at most ``most`` + 1 ids together."""
    if ids:
        yield begin, ids[:most]
    for at in range(most, len(ids), most):
        end = min(at + most, len(ids))
        yield ids[end - most - 1 : at], ids[at:end]
