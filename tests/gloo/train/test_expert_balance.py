"""Loads of experts and their biases, by hand on mixtures that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from picotron_ray.train import expert_balance
from picotron_ray.train.expert_balance import ExpertBalance, ExpertLoad

LOAD = [4.0, 2.0, 0.0, 5.0]
"""Assignments of three experts, and those over capacity."""


def mixture(*, biased: bool, held: bool = False) -> Any:
    bias = torch.zeros(3, dtype=torch.float64) if biased else None
    config = SimpleNamespace(bias_rate=0.25)
    return SimpleNamespace(scale=0.0, router=SimpleNamespace(load="old", bias=bias, config=config, held=held))


def figures(balance: ExpertBalance) -> tuple[float, float]:
    """The most used expert's load / the mean, the worst of all layers, and assignments over capacity."""
    load = balance.load()
    return float(load.imbalance), float(load.dropped)


def test_biases_move_against_the_load() -> None:
    first, second = mixture(biased=True), mixture(biased=False)
    balance = ExpertBalance([(3, first), (5, second)], None)
    balance.begin(0.5)
    assert [(m.scale, m.router.load) for m in (first, second)] == [(0.5, None)] * 2
    first.router.load, second.router.load = torch.tensor(LOAD), torch.tensor([1.0, 1.0, 4.0, 0.0])
    balance.reduce()
    assert figures(balance) == (2.0, 5.0)
    for moved in ([-0.25, 0.0, 0.25], [-0.5, 0.0, 0.5]):
        balance.step()
        assert first.router.bias.tolist() == moved
    assert second.router.bias is None


def test_a_frozen_bias_stays() -> None:
    one = mixture(biased=True, held=True)
    balance = ExpertBalance([(0, one)], None)
    one.router.load = torch.tensor(LOAD)
    balance.reduce()
    balance.step()
    assert one.router.bias.tolist() == [0.0] * 3
    assert figures(balance) == (2.0, 5.0)


def test_loads_are_those_of_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = object()

    def reduce(loads: torch.Tensor, group: Any) -> None:
        asked.append(group)
        loads += torch.tensor([0.0, 0.0, 6.0, 1.0])

    asked: list[Any] = []
    monkeypatch.setattr(expert_balance.dist, "all_reduce", reduce)
    one = mixture(biased=True)
    balance = ExpertBalance([(0, one)], group)
    one.router.load = torch.tensor(LOAD)
    balance.reduce()
    assert figures(balance) == (1.5, 6.0)
    none = ExpertBalance([], group)
    none.reduce()
    none.step()
    assert none.load() == ExpertLoad(0.0, 0.0)
    assert asked == [group], "a stage without mixtures exchanges nothing"


def test_loads_of_the_last_steps_are_kept_where_asked() -> None:
    first, second = mixture(biased=False), mixture(biased=False)
    balance = ExpertBalance([(3, first), (5, second)], None, keeps=True)
    assert balance.recent() == {}
    for step in range(expert_balance.WINDOW_STEPS + 3):
        first.router.load = torch.tensor([1.0, 2.0, float(step < 3), 7.0])
        second.router.load = torch.tensor([0.0, float(step), 0.0, 0.0])
        balance.reduce()
        balance.step()
        if step == 1:
            assert balance.recent() == {3: (1, 2, 1), 5: (0, 0, 0)}, "the newest step is on its way"
    kept = range(2, 2 + expert_balance.WINDOW_STEPS)
    assert balance.recent() == {3: (len(kept), 2 * len(kept), 1), 5: (0, sum(kept), 0)}
    unasked = ExpertBalance([(3, first)], None)
    unasked.reduce()
    unasked.step()
    unasked.step()
    assert unasked.recent() == {}
