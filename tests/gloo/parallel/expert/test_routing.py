"""Routing by hand: what balances, what is dropped, and how rows find their experts on other ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from picotron_ray.config.schema.model import MoeConfig
from picotron_ray.errors import LayoutError
from picotron_ray.models.layers import expert_rows
from picotron_ray.models.layers.expert_rows import gated_sum, rows_of, sort_routes
from picotron_ray.models.layers.experts import Experts
from picotron_ray.models.layers.moe import Here, MixtureOfExperts, Router
from picotron_ray.models.layers.transport import RouteLimits
from picotron_ray.parallel.expert import expert_parallel
from picotron_ray.parallel.expert.expert_parallel import (
    ExpertExchange,
    ExpertTransport,
    SequenceSpread,
    apply_expert_parallel,
)
from tests.support.gloo.group import Group
from tests.support.gloo.peak import LiveStorage


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
    """Five of six are sent; the spare row is the last of seven."""
    experts = torch.tensor([[[2, 0], [1, 2], [0, 2]]])
    kept = torch.tensor([[[True, False], [True, True], [True, True]]])
    routes = sort_routes(experts, kept, 3)
    assert routes.counts.tolist() == [1, 1, 3]
    assert routes.order[:5].tolist() == [4, 2, 0, 3, 5]
    assert routes.places.tolist() == [2, 6, 1, 3, 0, 4]
    other = sort_routes(experts, kept, 3, torch.tensor([1, 2, 0]))
    assert other.counts.tolist() == [3, 1, 1]
    assert other.order[:5].tolist() == [0, 3, 5, 4, 2]
    none = sort_routes(experts, torch.zeros_like(kept), 3)
    assert none.counts.tolist() == [0, 0, 0]
    assert none.places.tolist() == [6] * 6


def test_weighted_rows_are_made_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows in bf16 the weighted ones are in fp32: as a whole they would be the largest tensor."""
    monkeypatch.setattr(expert_rows, "GATED_PIECE_BYTES", 1 << 10)
    routes = sort_routes(
        torch.arange(8).repeat(32, 1)[None, :, :4], torch.ones(1, 32, 4, dtype=torch.bool), 8
    )
    rows = torch.randn(len(routes.order), 64, dtype=torch.bfloat16, requires_grad=True)
    gates = torch.rand(128, requires_grad=True)
    with LiveStorage() as storage:
        out = gated_sum(rows, gates, routes)
        torch.autograd.grad(out.sum(), (rows, gates))
    wide = 2 * rows.nbytes
    assert storage.peak < out.nbytes + 2 * rows.nbytes + wide // 4, "the rows, their gradient, and pieces"


@pytest.mark.parametrize("piece_bytes", [expert_rows.GATED_PIECE_BYTES, 1, 100])
def test_rows_that_carry_nothing_meet_nothing(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies in them, sums, gates and gradients are those of what is sent, in pieces of any size."""
    monkeypatch.setattr(expert_rows, "GATED_PIECE_BYTES", piece_bytes)
    experts, gates = torch.tensor([[[2, 0], [1, 2], [0, 2]]]), torch.rand(6, dtype=torch.float64)
    kept = torch.tensor([[[True, False], [True, True], [True, True]]])
    routes = sort_routes(experts, kept, 3)
    tokens = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    gates = (gates * kept.flatten()).requires_grad_()

    def spoilt(rows: Tensor) -> Tensor:
        sent = torch.zeros(len(rows), 1, dtype=torch.bool)
        sent[: int(routes.counts.sum())] = True
        return torch.where(sent, rows * rows, float("nan"))

    found = gated_sum(spoilt(rows_of(tokens, routes)), gates, routes)
    by_hand = (tokens.square().unsqueeze(1) * (gates * kept.flatten()).view(3, 2, 1)).sum(dim=1)
    torch.testing.assert_close(found, by_hand)
    weights = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), (tokens, gates)),
        torch.autograd.grad((by_hand * weights).sum(), (tokens, gates)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


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

    def gather(found: Tensor, mine: Tensor, group: Any) -> None:
        assert torch.equal(mine, counts[rank])
        found.copy_(torch.cat(counts))

    def reduce(total: Tensor, group: Any) -> None:
        total += 5

    monkeypatch.setattr(expert_parallel, "all_gather_single", gather)
    monkeypatch.setattr(expert_parallel.dist, "all_reduce", reduce)
    spread = SequenceSpread(Group(rank, 3))  # type: ignore[arg-type]
    assert (spread.parts, spread.chunks) == (3, 2)
    first, last = rank + 1, 6 - rank
    expected = [sum(range(first)), sum(range(last))]
    assert spread.ahead(counts[rank]).flatten().tolist() == expected
    given = torch.tensor([[1, 2]])
    assert spread.totals(given).tolist() == [[6, 7]]
    assert given.tolist() == [[1, 2]]


class Peer:
    """What rank 0 of two, with experts 0 and 1 of 4, exchanges with rank 1: 1, 2, 0, 1 rows for 2 and 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: list[float]) -> None:
        self.sent: list[tuple[list[float], list[int], list[int]]] = []
        self._answers = list(answers)
        monkeypatch.setattr(expert_parallel.dist, "all_to_all_single", self.exchange)

    def exchange(
        self, into: Tensor, rows: Tensor, *sizes: list[int], group: Any, async_op: bool = False
    ) -> Any:
        if not async_op:
            assert rows.tolist() == [[1, 2], [0, 1]]
            return into.copy_(torch.tensor([[1, 2], [2, 1]]))
        incoming, outgoing = sizes
        self.sent.append((rows.flatten().tolist(), incoming, outgoing))
        into.copy_(torch.tensor(self._answers.pop(0)).unsqueeze(-1))
        return Work()


class Work:
    def wait(self) -> None:
        pass


def shipped(exchange: ExpertExchange) -> tuple[Any, Tensor]:
    """Shipment of 4 rows of 1 token each, which are 10 times the expert's number plus its own, and rows."""
    transport = ExpertTransport(Group(0, 2), 4, exchange=exchange)  # type: ignore[arg-type]
    experts = torch.tensor([[[1], [0], [1], [3]]])
    slots = transport.slots(torch.device("cpu"))
    routes = sort_routes(experts, torch.ones_like(experts, dtype=torch.bool), 4, slots)
    shipment = transport.plan(routes, RouteLimits(length=4, per_expert=3))
    return shipment, rows_of(torch.tensor([[11.0], [2], [13], [34]]), shipment.routes)


def test_rows_go_to_their_experts_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(monkeypatch, [2, 11, 13, 7, 8, 19], [20, 110, 130, 340])
    shipment, rows = shipped(ExpertExchange())
    buffers = shipment.send(rows)
    assert [len(buffer) for buffer in buffers] == [6]
    here, counts = shipment.arrive(0, buffers[0])
    assert here.flatten().tolist() == [2, 7, 8, 11, 13, 19]
    assert counts.on_device.tolist() == [3, 3]
    assert counts.lengths(6) == [3, 3, 0]
    back = shipment.collect([shipment.send_back(0, -here)])
    assert back[:4].flatten().tolist() == [20, 110, 130, 340]
    gated = gated_sum(back, torch.ones(4), shipment.routes)
    assert gated.flatten().tolist() == [110, 20, 130, 340]
    assert peer.sent == [
        ([2, 11, 13, 34], [3, 3], [3, 1]),
        ([-2, -11, -13, -7, -8, -19], [3, 1], [3, 3]),
    ]


def test_padded_rows_go_without_anybody_counting_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 rows for each rank, one by one of its experts: 3 of each at most, and 4 of both."""
    monkeypatch.setattr(expert_parallel, "read_counts", None)
    nan = float("nan")
    peer = Peer(monkeypatch, [2, 11, 13, nan, 7, 8, 19, nan], [20, 110, 130, nan, 340, nan, nan, nan])
    shipment, rows = shipped(ExpertExchange(padded=True))
    buffers = shipment.send(rows)
    here, counts = shipment.arrive(0, buffers[0])
    assert here[:6].flatten().tolist() == [2, 7, 8, 11, 13, 19]
    assert counts.on_device.tolist() == [3, 3]
    back = shipment.collect([shipment.send_back(0, -here)])
    gated = gated_sum(back, torch.ones(4), shipment.routes)
    assert gated.flatten().tolist() == [110, 20, 130, 340]
    (out, *sizes), (returned, *others) = peer.sent
    assert (out[:3], out[4]) == ([2, 11, 13], 34)
    assert (returned[:3], returned[4:7]) == ([-2, -11, -13], [-7, -8, -19])
    assert sizes == others == [[4, 4], [4, 4]]


@pytest.mark.parametrize("padded", [False, True])
def test_chunks_are_for_some_experts_each(monkeypatch: pytest.MonkeyPatch, padded: bool) -> None:
    """Expert 0 here and 2 there first, then 1 and 3; all set off before the first is waited for."""
    nan = float("nan")
    there = [[2, nan, nan, 7, 8, nan], [11, 13, nan, 19, nan, nan]] if padded else [[2, 7, 8], [11, 13, 19]]
    home = [[20, nan, nan] + [nan] * 3, [110, 130, nan, 340, nan, nan]] if padded else [[20], [110, 130, 340]]
    peer = Peer(monkeypatch, *there, *home)
    shipment, rows = shipped(ExpertExchange(padded=padded, chunks=2))
    assert shipment.experts == [1, 1]
    buffers = shipment.send(rows)
    assert len(peer.sent) == 2
    parts = []
    for number, expected in enumerate(([2, 7, 8], [11, 13, 19])):
        here, counts = shipment.arrive(number, buffers[number])
        assert here[:3].flatten().tolist() == expected
        assert counts.on_device.tolist() == [3]
        parts.append(shipment.send_back(number, -here))
    gated = gated_sum(shipment.collect(parts), torch.ones(4), shipment.routes)
    assert gated.flatten().tolist() == [110, 20, 130, 340]


def test_experts_may_live_anywhere() -> None:
    group: Any = Group(0, 2)
    cpu = torch.device("cpu")
    assert ExpertTransport(group, 4).slots(cpu) is None
    slots = ExpertTransport(group, 4, order=(1, 2, 3, 0)).slots(cpu)
    assert slots is not None
    assert slots.tolist() == [3, 0, 1, 2]
    slots = ExpertTransport(group, 6, exchange=ExpertExchange(chunks=2)).slots(cpu)
    assert slots is not None
    assert slots.tolist() == [0, 1, 4, 2, 3, 5], "experts 0 and 1 here, 3 and 4 there; then 2 and 5"


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
