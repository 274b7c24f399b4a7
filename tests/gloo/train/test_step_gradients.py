"""Gradients of a step: what is begun, summed, copied and let go, with groups that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.train import gradients as module
from picotron_ray.train.gradients import Gradients, StaticGradients

LAYOUT = Layout(dp=2, tp=2)


class Parts:
    """Sums over replicas and of tied ends; both keep one log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.groups: list[Any] = []
        monkeypatch.setattr(module, "replicated", self.replicated)
        monkeypatch.setattr(module, "TiedEmbeddings", self.tied)
        monkeypatch.setattr(
            module, "sum_", lambda values, group: self.log.append(("sum", len(values), group))
        )

    counts, owed = (1, 1), ()

    def replicated(self, pairs: Any, plan: Any, compressible: Any, copies: Any) -> list[Any]:
        assert not compressible
        assert not copies
        self.groups = [group for _, group in pairs]
        return [self]

    def tied(self, parameters: Any, copies: Any, group: Any, other_end: Any) -> Any:
        self.log.append(("tied", len(parameters), group, other_end))
        return SimpleNamespace(
            follows=lambda parameter: parameter.spec.name == "copy",
            sum_=lambda trained, values: self.log.append(("ends", len(trained), len(values))),
            follow=lambda: self.log.append("follow"),
        )

    def begin(self, count: int, step: int, scale: float) -> None:
        self.log.append(("begin", count, step, scale))

    def commit(self) -> None:
        self.log.append("commit")

    def agree(self) -> None:
        self.log.append("agree")

    def finish(self) -> None:
        self.log.append("finish")

    def close(self) -> None:
        self.log.append("close")


def local(name: str, tp_dim: int | None, **options: Any) -> LocalParameter:
    spec = ParameterSpec(name, (2,), None, "embed", tp_dim, True, 1.0, **options)
    return LocalParameter(spec, Box((0,), (2,)), True, True, nn.Parameter(torch.ones(2)))


def made(kind: type[Gradients]) -> tuple[Gradients, list[LocalParameter]]:
    held = [local("cut", 0), local("norm", None), local("copy", None), local("still", None, trained=False)]
    mesh: Any = SimpleNamespace(
        layout=LAYOUT, at=LAYOUT.coordinates(0), group=lambda name: name, experts=None
    )
    definition: Any = SimpleNamespace(sequence_parallel=True, copies={})
    return kind(held, definition, mesh), held


def test_a_step_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch)
    found, held = made(Gradients)
    assert parts.groups == ["data"] * 3
    assert parts.log == [("tied", 4, "pp", LAYOUT.other_end(0))]
    assert [parameter.spec.name for parameter in found.trained] == ["cut", "norm"]
    parts.log.clear()
    for parameter in held:
        parameter.parameter.grad = torch.ones(2)
    found.clear(3, 7, 2.0)
    assert parts.log == [("begin", 3, 7, 2.0)]
    assert [parameter.parameter.grad for parameter in held] == [None] * 4
    held[1].parameter.grad = torch.full((2,), 5.0)
    parts.log.clear()
    found.reduce()
    assert [value.tolist() for value in found.values] == [[0.0, 0.0], [5.0, 5.0]]
    assert parts.log == ["finish", ("ends", 2, 2), ("sum", 1, "tp")], "a norm has seen its own tokens alone"
    found.update_copies()
    found.commit()
    found.agree_on_owed()
    found.close()
    assert parts.log[-4:] == ["follow", "commit", "agree", "close"]
    assert (found.trained, found.values, found._replicated, found._parameters) == ([], [], [], [])


def test_gradients_that_stay_are_zeroed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch)
    found, held = made(StaticGradients)
    found.clear(3)
    before = [parameter.parameter.grad for parameter in held[:2]]
    for gradient in before:
        assert gradient is not None
        gradient += 7.0
    found.clear(3)
    assert all(parameter.parameter.grad is kept for parameter, kept in zip(held, before, strict=False))
    assert [gradient.tolist() for gradient in before if gradient is not None] == [[0.0, 0.0]] * 2
    ((_, passes, *_), _) = parts.log[1:]
    assert passes > 2**40, "sums begin when they are asked for, not after so many passes"


@pytest.mark.parametrize(
    ("expert", "ep", "zero", "same_experts", "group"),
    [
        (False, 1, 0, False, "data"),
        (True, 1, 0, False, "data"),
        (False, 2, 0, False, "data"),
        (True, 2, 0, False, "edp"),
        (True, 2, 1, False, "copy"),
        (True, 2, 1, True, None),
        (False, 2, 1, False, None),
        (True, 1, 1, False, None),
    ],
)
def test_who_sums_a_gradient(expert: bool, ep: int, zero: int, same_experts: bool, group: str | None) -> None:
    """Under ZeRO torch does, but for experts that no rank of a copy shares."""
    layout, experts = Layout(dp=2, ep=ep, zero=zero), "mesh" if same_experts else None
    mesh: Any = SimpleNamespace(layout=layout, group=lambda name: name, experts=experts)
    assert module._sum_group(local("w", None, expert=expert), mesh) == group
