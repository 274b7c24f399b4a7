"""The two ends of a tied embedding on one rank, or on this one and another, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from picotron_ray.layout.shards import Box
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.parallel.pipeline import tied_embeddings
from picotron_ray.parallel.pipeline.tied_embeddings import TiedEmbeddings


def local(name: str, value: float, *, copy: bool = False) -> LocalParameter:
    spec = ParameterSpec(name, (2,), None, "embed", None, True, 1.0, copy=copy)
    return LocalParameter(spec, Box((0,), (2,)), True, True, nn.Parameter(torch.full((2,), value)))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def send(gradient: torch.Tensor, peer: int, group: Any) -> None:
        calls.append((peer, group))
        gradient += 10.0

    monkeypatch.setattr(tied_embeddings, "sum_with_peer_", send)
    return calls


def test_both_ends_on_one_rank(sent: list[Any]) -> None:
    table, head, other = local("embed", 1.0), local("embed", 2.0, copy=True), local("w", 3.0)
    group: Any = "group"
    ties = TiedEmbeddings([table, other, head], [head.spec], group, 1)
    assert [ties.follows(parameter) for parameter in (table, other, head)] == [False, False, True]
    for of_head, expected in ((None, 1.0), (4.0, 5.0)):
        head.parameter.grad = None if of_head is None else torch.full((2,), of_head)
        gradients = [torch.ones(2), torch.ones(2)]
        ties.sum_([table, other], gradients)
        assert [gradient.tolist() for gradient in gradients] == [[expected] * 2, [1.0] * 2]
    assert sent == []
    ties.follow()
    assert head.local.tolist() == table.local.tolist() == [1.0, 1.0]
    assert other.local.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("group", "peer", "expected"),
    [("group", 0, [(0, "group")]), ("group", 3, [(3, "group")]), ("group", None, []), (None, 0, [])],
)
@pytest.mark.parametrize("first", [True, False])
def test_ends_on_two_ranks(sent: list[Any], first: bool, group: Any, peer: int | None, expected: Any) -> None:
    end, other = local("embed", 1.0, copy=not first), local("w", 3.0)
    ties = TiedEmbeddings([other, end], [local("embed", 0.0, copy=True).spec], group, peer)
    assert not ties.follows(end)
    gradients = [torch.ones(2), torch.ones(2)]
    ties.sum_([other, end], gradients)
    assert [gradient.tolist() for gradient in gradients] == [[1.0] * 2, [11.0 if expected else 1.0] * 2]
    assert sent == expected
    ties.follow()
    assert end.local.tolist() == [1.0, 1.0]
