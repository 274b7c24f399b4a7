"""What is asked of a loss of the user's own, on logits of a few numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.errors import ConfigError
from picotron_ray.train.custom_model.inspect import inspect
from picotron_ray.train.custom_model.loss_check import check_loss
from picotron_ray.train.custom_model.plan_search import Trial
from tests.support.gloo.parallel_jobs.matrix_jobs import make_job

VOCABULARY = 5
Loss = Callable[[Tensor, Tensor], Any]


def words() -> nn.Module:
    torch.manual_seed(0)
    return nn.Embedding(VOCABULARY, VOCABULARY)


def plain(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def writes(logits: Tensor, targets: Tensor) -> Tensor:
    logits.mul_(2.0)
    return plain(logits, targets)


def numbers(logits: Tensor, targets: Tensor) -> Tensor:
    return plain(logits.detach(), targets)


def flat(logits: Tensor, targets: Tensor) -> Tensor:
    return plain(logits, targets) * 0.0


def fails(logits: Tensor, targets: Tensor) -> Tensor:
    raise ValueError("no such\nthing")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[str]]:
    """Check a loss; return the lines for the user, or the error's."""

    def of(loss: Any, name: str = "loss") -> list[str]:
        mine = ModuleType("mine")
        mine.loss, mine.build = loss, words  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "mine", mine)
        values = {"vocab_size": VOCABULARY, "builder": "mine:build", "loss": f"mine:{name}"}
        job = make_job("sgd", 4, ModelConfig.model_validate(values))
        tokens = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1))
        try:
            return check_loss(job, Trial(words(), tokens))
        except ConfigError as error:
            return error.problems

    return of


ROWS = "losses of a row depend on other rows, which other ranks may hold; divide by no number of rows"
BAD: dict[str, tuple[Any, str]] = {
    "a mean": (lambda x, y: plain(x, y).mean(), "saw [], expected losses [batch, seq] = [2, 6], no mean"),
    "flat": (lambda x, y: plain(x, y).flatten(), "saw [12], expected losses [batch, seq] = [2, 6]"),
    "numbers": (lambda x, y: 1.0, "saw float, expected losses [batch, seq] = [2, 6]"),
    "no function": (3, "mine:loss is a int, expected a function (logits [batch, seq, vocab]"),
    "an error": (fails, "of logits [2, 6, 5] and targets [2, 6] it raises ValueError: no such thing"),
    "another row": (lambda x, y: plain(x, y) + x.mean(), ROWS),
    "a share of the batch": (lambda x, y: plain(x, y) / y.numel(), ROWS),
    "chance": (lambda x, y: plain(x, y) * torch.rand(()), "gives other losses the second time"),
    "written logits": (writes, "it writes its arguments; work on a copy"),
    "written targets": (lambda x, y: plain(x, y.fill_(0)), "it writes its arguments; work on a copy"),
    "cut off": (numbers, "its losses have no gradient of the logits; compute them with torch"),
    "nothing": (flat, "its losses have no gradient of the logits, so that nothing would be trained"),
    "infinity": (lambda x, y: plain(x, y) / 0, "saw a loss that is not finite, of finite logits"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_loss_is_one_line(told: Callable[[Any], list[str]], name: str) -> None:
    loss, words_of_it = BAD[name]
    (line,) = told(loss)
    assert line.startswith("model.loss: ")
    assert "\n" not in line
    assert words_of_it in line, line


def test_a_loss_is_taken(told: Callable[..., list[str]]) -> None:
    (line,) = told(plain)
    assert line.startswith("loss mine:loss: ")
    assert line.endswith(" per token before training")
    assert "but mine has no other" in told(plain, "other")[0]


def test_the_inspection_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ModuleType("mine")
    mine.loss, mine.build = BAD["a mean"][0], words  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    values = {"vocab_size": VOCABULARY, "builder": "mine:build", "loss": "mine:loss"}
    job = make_job("sgd", 4, ModelConfig.model_validate(values))
    with pytest.raises(ConfigError, match=r"model\.loss: saw \[\]"):
        inspect(job)
    mine.loss = plain  # type: ignore[attr-defined]
    assert any(line.startswith("loss mine:loss: ") for line in inspect(job)[1])
