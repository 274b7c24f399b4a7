"""Routing by hand: what balances, what is dropped, and how rows find their experts on other ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from picotron_ray.config.schema.model import MoeConfig
from picotron_ray.errors import LayoutError
from picotron_ray.models.layers import moe
from picotron_ray.models.layers.moe import Experts, Here, MixtureOfExperts, Router, Routing
from picotron_ray.parallel.expert import expert_parallel
from picotron_ray.parallel.expert.expert_parallel import (
    ExpertTransport,
    SequenceSpread,
    apply_expert_parallel,
)
from tests.support.gloo.group import Group


def router(**options: Any) -> Router:
    """Of two experts; the logits of a token are its first two features."""
    found = Router(MoeConfig(**{"experts": 2, "top_k": 1, "balance": "none", **options}), 3)
    with torch.no_grad():
        found.weight.copy_(torch.eye(2, 3))
        if found.bias is not None:
            found.bias.zero_()
    return found


X = torch.tensor([[[2.0, 0, 0], [0, 1.0, 0], [3.0, 0, 0], [1.0, 0, 0]]] * 2)
LIVE = torch.tensor([1.0, 0.0])


def share(high: float) -> float:
    """Softmax of ``high`` against 0."""
    return 1 / (1 + math.exp(-high))


def test_the_loss_for_balance_by_hand() -> None:
    """One live row: 3 of 4 tokens to expert 0, whose share is 3/4 x 2, and 1 to expert 1."""
    mine = router(balance="loss", loss_coefficient=0.5, z_coefficient=0.25)
    mine.shares = 2
    found = mine(X, LIVE).loss
    likely = [share(2), 1 - share(1), share(3), share(1)]
    even = 1.5 * sum(likely) + 0.5 * (4 - sum(likely))
    z = sum(math.log(math.exp(high) + 1) ** 2 for high in (2, 1, 3, 1))
    assert found.item() == pytest.approx((0.5 * even + 0.25 * z) / 2)
    both = mine(X, None).loss
    assert both.item() == pytest.approx(2 * found.item())
    only_z = router(balance="loss", loss_coefficient=0.0, z_coefficient=0.25)
    assert only_z(X, LIVE).loss.item() == pytest.approx(0.25 * z)
    assert router(balance="none", loss_coefficient=0.5)(X, LIVE).loss is None
    with torch.no_grad():
        assert mine(X, LIVE).loss is None


def test_sigmoid_scores_count_by_their_share() -> None:
    mine = router(balance="loss", loss_coefficient=1.0, router="sigmoid")
    scores = [[share(2), 0.5], [0.5, share(1)], [share(3), 0.5], [share(1), 0.5]]
    likely = [a / (a + b) for a, b in scores]
    assert mine(X, LIVE).loss.item() == pytest.approx(1.5 * sum(likely) + 0.5 * (4 - sum(likely)))


def test_gates_and_choice_by_hand() -> None:
    plain = router(normalize=False)(X[:1], None)
    assert plain.experts.flatten().tolist() == [0, 1, 0, 0]
    assert plain.gates.flatten().tolist() == pytest.approx([share(2), share(1), share(3), share(1)])
    assert router(normalize=True)(X[:1], None).gates.flatten().tolist() == pytest.approx([1.0] * 4)
    biased = router(balance="bias", normalize=False)
    assert biased.bias is not None
    with torch.no_grad():
        biased.bias.copy_(torch.tensor([0.0, 0.9]))
    found = biased(X[:1], None)
    assert found.experts.flatten().tolist() == [1, 1, 0, 1], "a bias moves the choice"
    assert found.gates[0, 0].item() == pytest.approx(1 - share(2)), "and no gate"
    assert found.loss is None


def test_what_is_counted() -> None:
    mine = router(capacity_factor=1.0)  # 4 tokens, 2 experts: 2 each
    found = mine(X, LIVE)
    assert found.kept[0].flatten().tolist() == [True, True, True, False]
    assert not found.kept[1].any()
    assert found.gates[0, 3].item() == 0
    assert mine.load is not None
    assert mine.load.tolist() == [3, 1, 1]
    mine(X, None)
    assert mine.load.tolist() == [9, 3, 3]
    with torch.no_grad():
        mine(X, None)
    mine.counting = False
    mine(X, None)
    assert mine.load.tolist() == [9, 3, 3]


class Ahead(Here):
    """The second quarter of a row, and the last, are here; elsewhere lie as many tokens again."""

    parts, chunks = 2, 2

    def ahead(self, counts: Tensor) -> Tensor:
        assert counts.tolist() == [[[1, 1]], [[2, 0]]]
        return torch.tensor([[[1, 0]], [[1, 2]]])

    def totals(self, counts: Tensor) -> Tensor:
        return 3 * counts


def test_capacity_is_that_of_the_whole_row() -> None:
    mine = router(capacity_factor=0.5, balance="loss")  # of 8 tokens by 2 experts: 2 each
    mine.spread = Ahead()
    found = mine(X[:1], None)
    assert found.kept.flatten().tolist() == [True, True, True, False]
    mine.config = mine.config.model_copy(update={"capacity_factor": 0.6})  # 2.4, rounded up
    assert mine(X[:1], None).kept.all()


def test_assignments_lie_by_expert_in_their_order() -> None:
    experts = torch.tensor([[[2, 0], [1, 2], [0, 2]]])
    kept = torch.tensor([[[True, False], [True, True], [True, True]]])
    chosen, order = moe._by_expert(Routing(experts, kept.float(), kept, None))
    assert chosen.tolist() == [0, 1, 2, 2, 2]
    assert order.tolist() == [4, 2, 0, 3, 5]


def test_the_auxiliary_loss_has_the_gradient_of_its_scale() -> None:
    config = MoeConfig(experts=2, top_k=1, intermediate_size=4, balance="loss", loss_coefficient=0.5)
    slopes = []
    for scale in (0.0, 0.125):
        torch.manual_seed(0)
        mixture = MixtureOfExperts(config, 3)
        for parameter in mixture.parameters():
            nn.init.normal_(parameter)
        assert mixture.scale == 0.0
        assert mixture.shared is None
        mixture.scale = scale
        mixture(X).sum().backward()
        slopes.append(mixture.router.weight.grad)
    mixture.router.weight.grad = None
    mixture.router(X, None).loss.backward()
    torch.testing.assert_close(slopes[1] - slopes[0], 0.125 * mixture.router.weight.grad)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_comes_before_in_a_row_that_is_cut(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Of three ranks' stretches the order is 0 1 2 2 1 0; each has as many as its number in the row."""
    counts = [torch.tensor([[[place + 1]], [[6 - place]]]) for place in range(3)]

    def gather(found: list[Tensor], mine: Tensor, group: Any) -> None:
        assert torch.equal(mine, counts[rank])
        for room, value in zip(found, counts, strict=True):
            room.copy_(value)

    def reduce(total: Tensor, group: Any) -> None:
        total += 5

    monkeypatch.setattr(expert_parallel.dist, "all_gather", gather)
    monkeypatch.setattr(expert_parallel.dist, "all_reduce", reduce)
    spread = SequenceSpread(Group(rank, 3))  # type: ignore[arg-type]
    assert (spread.parts, spread.chunks) == (3, 2)
    first, last = rank + 1, 6 - rank
    expected = [sum(range(first)), sum(range(last))]
    assert spread.ahead(counts[rank]).flatten().tolist() == expected
    given = torch.tensor([[1, 2]])
    assert spread.totals(given).tolist() == [[6, 7]]
    assert given.tolist() == [[1, 2]]


def test_rows_go_to_their_experts_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two, with experts 0 and 1. It sends 1, 2, 0, 1 rows; the other sends 2 and 1 here."""
    sent: list[tuple[list[float], list[int], list[int]]] = []
    answers = [torch.tensor([[1.0], [2], [3], [7], [8], [9]]), torch.tensor([[10.0], [20], [30], [40]])]

    class Work:
        def wait(self) -> None:
            pass

    def exchange(into: Tensor, rows: Tensor, *sizes: list[int], group: Any, async_op: bool = False) -> Any:
        if not async_op:
            assert rows.tolist() == [[1, 2], [0, 1]]
            return into.copy_(torch.tensor([[1, 2], [2, 1]]))
        incoming, outgoing = sizes
        sent.append((rows.flatten().tolist(), incoming, outgoing))
        into.copy_(answers.pop(0))
        return Work()

    monkeypatch.setattr(expert_parallel.dist, "all_to_all_single", exchange)
    transport = ExpertTransport(Group(0, 2))  # type: ignore[arg-type]
    rows = torch.tensor([[1.0], [2], [3], [4]])
    arrival = transport.send(rows, torch.tensor([1, 2, 0, 1]))
    here, counts = arrival.wait()
    assert here.flatten().tolist() == [1, 7, 8, 2, 3, 9]
    assert counts.tolist() == [3, 3]
    assert arrival.send_back(-here).wait().flatten().tolist() == [10, 20, 30, 40]
    assert sent == [([1, 2, 3, 4], [3, 3], [3, 1]), ([-1, -2, -3, -7, -8, -9], [3, 1], [3, 3])]


def test_experts_are_spread_evenly() -> None:
    mixture = MixtureOfExperts(MoeConfig(experts=4, intermediate_size=5), 3)
    apply_expert_parallel([mixture], None, None, 3)
    assert isinstance(mixture.transport, Here)
    assert isinstance(mixture.router.spread, Here)
    assert mixture.router.shares == 3
    ep: Any = Group(0, 2)
    apply_expert_parallel([mixture], ep, ep, 1)
    assert isinstance(mixture.transport, ExpertTransport)
    assert isinstance(mixture.router.spread, SequenceSpread)
    shapes = [tuple(p.shape) for p in mixture.experts.parameters()]
    assert shapes == [(2, 5, 3), (2, 5, 3), (2, 3, 5)]
    assert not Experts(1, 1, 1).grouped
    with pytest.raises(LayoutError, match=r"^layout.ep: saw 3, which does not divide 2 experts$"):
        apply_expert_parallel([mixture], Group(0, 3), None, 1)  # type: ignore[arg-type]
