"""Point-to-point messages and collectives along the sequence: what is sent to whom, against torch's calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm import p2p, sequence_collectives
from picotron_ray.comm.p2p import SUM_TAG, exchange, sum_with_peer_
from picotron_ray.comm.sequence_collectives import (
    GatherAhead,
    Shift,
    gather_sequence,
    reduce_scatter_sequence,
)
from tests.support.gloo.group import Group


class Pending:
    """Work that does something when it is waited for, once."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end, self.waits = end, 0

    def wait(self) -> None:
        self.waits += 1
        self._end()


class Wire:
    """Records batches of messages; what comes in is ``incoming`` of the peer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, incoming: dict[int, list[float]]) -> None:
        self.sent: list[tuple[int, list[float], object, int]] = []
        self.received: list[tuple[int, int, object, int]] = []
        self.incoming, self.works = incoming, list[Pending]()
        for module in (p2p, sequence_collectives):
            monkeypatch.setattr(module.dist, "P2POp", lambda *arguments, **named: (arguments, named))
            monkeypatch.setattr(module.dist, "batch_isend_irecv", self._batch)

    def _batch(self, operations: list[Any]) -> list[Pending]:
        assert operations
        self.works += [self._begin(*arguments, **named) for arguments, named in operations]
        return self.works

    def _begin(
        self, how: object, x: Tensor, peer: int = -1, *, group: Any = None, group_peer: int = -1, tag: int = 0
    ) -> Pending:
        peer = max(peer, group_peer)
        assert x.is_contiguous()
        if how is p2p.dist.isend:
            self.sent.append((peer, x.flatten().tolist(), group, tag))
            return Pending(lambda: None)
        self.received.append((peer, x.numel(), group, tag))
        return Pending(lambda: x.copy_(torch.tensor(self.incoming[peer]).view(x.shape)))


def test_an_exchange_sends_what_each_peer_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch, {0: [5.0], 3: [6.0, 7.0]})
    like = torch.empty(0, dtype=torch.float64)
    parts = {1: [torch.ones(2)], 2: [torch.arange(4.0).view(2, 2), torch.tensor([9.0])], 3: [torch.zeros(1)]}
    found = exchange(parts, {0: 1, 1: 2, 3: 2}, 1, like)
    assert wire.sent == [(2, [0, 1, 2, 3, 9], None, 0), (3, [0], None, 0)]
    assert wire.received == [(0, 1, None, 0), (3, 2, None, 0)]
    assert {peer: flat.tolist() for peer, flat in found.items()} == {0: [5.0], 1: [1.0, 1.0], 3: [6.0, 7.0]}
    assert {flat.dtype for flat in found.values()} == {torch.float64}
    assert [work.waits for work in wire.works] == [1] * 4


def test_what_stays_in_the_process_needs_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch, {})
    found = exchange({2: [torch.ones(2)]}, {2: 2}, 2, torch.empty(0))
    assert {peer: flat.tolist() for peer, flat in found.items()} == {2: [1.0, 1.0]}
    assert exchange({}, {}, 2, torch.empty(0)) == {}
    assert not wire.works


def test_a_sum_with_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, group = Wire(monkeypatch, {1: [10.0, 20.0, 30.0, 40.0]}), Group(0, 2)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T
    sum_with_peer_(x, 1, group)  # type: ignore[arg-type]
    assert x.tolist() == [[11.0, 23.0], [32.0, 44.0]]
    assert wire.sent == [(1, [1.0, 3.0, 2.0, 4.0], group, SUM_TAG)]
    assert wire.received == [(1, 4, group, SUM_TAG)]
    assert [work.waits for work in wire.works] == [1, 1]


@pytest.mark.parametrize(("rank", "after", "before"), [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_a_shift_goes_once_round_the_ring(
    monkeypatch: pytest.MonkeyPatch, rank: int, after: int, before: int
) -> None:
    wire, group = Wire(monkeypatch, {before: [8.0, 9.0]}), Group(rank, 3)
    shift = Shift(torch.tensor([3.0, 4.0]), group, tag=5)  # type: ignore[arg-type]
    assert [work.waits for work in wire.works] == [0, 0]
    assert shift.wait().tolist() == [8.0, 9.0]
    assert wire.sent == [(after, [3.0, 4.0], group, 5)]
    assert wire.received == [(before, 2, group, 5)]
    assert [work.waits for work in wire.works] == [1, 1]
    Shift(torch.zeros(2), group)  # type: ignore[arg-type]
    assert wire.sent[1] == (after, [0.0, 0.0], group, 0)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_parts_of_a_sequence_come_in_order(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    group, parts = Group(1, 3), [torch.arange(12.0).view(2, 3, 2) + 100 * rank for rank in range(3)]

    def gather(room: Tensor, x: Tensor, group: Group, async_op: bool = False) -> Pending | None:
        assert x.is_contiguous()
        assert torch.equal(x, parts[1])
        assert async_op is ahead
        work = Pending(lambda: room.copy_(torch.cat(parts)))
        return work if ahead else work.wait()

    newest = getattr(dist, "all_gather_single", None)
    assert sequence_collectives.all_gather_single is (newest or dist.all_gather_into_tensor)
    monkeypatch.setattr(sequence_collectives, "all_gather_single", gather)
    mine = parts[1].transpose(0, 1).contiguous().transpose(0, 1)
    if ahead:
        pending = GatherAhead(mine, group)  # type: ignore[arg-type]
        assert pending._work.waits == 0
        found = pending.wait()
    else:
        found = gather_sequence(mine, group)  # type: ignore[arg-type]
    assert torch.equal(found, torch.cat(parts, dim=1))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_each_rank_gets_its_part_of_the_sum(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    group = Group(1, 3)
    x = torch.arange(24.0).view(2, 6, 2)  # this rank's; the others have twice and three times as much
    sums = [x[:, 2 * rank : 2 * rank + 2] * 6 for rank in range(3)]

    def exchanged(received: Tensor, cut: Tensor, group: Group) -> None:
        assert torch.equal(cut, torch.stack([total / 6 for total in sums]))
        received.copy_(torch.stack([sums[1] / 6, sums[1] / 3, sums[1] / 2]))

    def scattered(result: Tensor, flat: Tensor, group: Group) -> None:
        assert torch.equal(flat, torch.cat([total / 6 for total in sums]))
        result.copy_(sums[1])

    def unexpected(*arguments: object, **named: object) -> None:
        raise AssertionError("the other backend's way")

    newest = getattr(dist, "reduce_scatter_single", None)
    assert sequence_collectives.reduce_scatter_single is (newest or dist.reduce_scatter_tensor)
    monkeypatch.setattr(sequence_collectives.dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(
        sequence_collectives.dist, "all_to_all_single", exchanged if backend == "gloo" else unexpected
    )
    monkeypatch.setattr(
        sequence_collectives, "reduce_scatter_single", scattered if backend == "nccl" else unexpected
    )
    assert torch.equal(reduce_scatter_sequence(x, group), sums[1])  # type: ignore[arg-type]


def test_a_rank_alone_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def scattered(result: Tensor, flat: Tensor, group: Group) -> None:
        result.copy_(flat)

    monkeypatch.setattr(sequence_collectives.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(sequence_collectives, "reduce_scatter_single", scattered)
    x = torch.arange(12.0).view(2, 3, 2)
    assert torch.equal(reduce_scatter_sequence(x, Group(0, 1)), x)  # type: ignore[arg-type]
