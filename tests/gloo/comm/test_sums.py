"""Sums: buckets by hand, and threads that stand in for ranks."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from picotron_ray.comm import all_reduce
from picotron_ray.comm.all_reduce import ThreadGroup, all_sum, buckets, sum_


def test_buckets_are_filled_to_their_limit() -> None:
    sizes = [1, 2, 1, 5, 1]  # of 4 bytes each
    tensors = [torch.zeros(size) for size in sizes]
    assert [[t.numel() for t in found] for found in buckets(tensors, 12)] == [[1, 2], [1], [5], [1]]
    assert [[t.numel() for t in found] for found in buckets(tensors, 16)] == [[1, 2, 1], [5], [1]]
    assert [[t.numel() for t in found] for found in buckets(tensors, 24)] == [[1, 2, 1], [5, 1]]
    mixed = [torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(1)]
    assert [len(found) for found in buckets(mixed, 100)] == [2, 1, 1]
    assert list(buckets([], 12)) == []


def test_tensors_become_their_sums_one_collective_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, object]] = []
    waited: list[int] = []

    class Pending:
        def __init__(self, flat: Tensor) -> None:
            self.flat = flat

        def wait(self) -> None:
            waited.append(len(calls))
            self.flat.mul_(3)

    def reduce(flat: Tensor, group: object, async_op: bool = False) -> Pending:
        assert async_op
        calls.append((flat.numel(), group))
        return Pending(flat)

    monkeypatch.setattr(all_reduce.dist, "all_reduce", reduce)
    tensors = [torch.arange(4.0).view(2, 2), torch.arange(3.0), torch.arange(6.0).view(2, 3).T]
    expected = [tensor * 3 for tensor in tensors]
    sum_(tensors, "the group", bucket_bytes=28)  # type: ignore[arg-type]
    assert calls == [(7, "the group"), (6, "the group")]
    assert waited == [2, 2], "all are on the wire before the first is awaited"
    for found, wanted in zip(tensors, expected, strict=True):
        assert torch.equal(found, wanted)
    sum_([torch.zeros(2**20), torch.zeros(7 * 2**20), torch.zeros(1)], None)
    assert [count for count, _ in calls[2:]] == [8 * 2**20, 1], "32 MiB fill a bucket"


def test_a_sum_leaves_its_tensor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(total: Tensor, group: object) -> None:
        assert total.is_contiguous()
        assert group == "the group"
        total += 1

    monkeypatch.setattr(all_reduce.dist, "all_reduce", reduce)
    x = torch.arange(6.0).view(2, 3).T
    assert torch.equal(all_sum(x, "the group"), x + 1)  # type: ignore[arg-type]
    assert x.flatten().tolist() == [0, 3, 1, 4, 2, 5]


def test_threads_meet_before_and_after_they_add() -> None:
    slots = [torch.empty(0), torch.empty(0)]

    class Meeting:
        """Where the other thread puts its own value, and then that of the next sum."""

        calls = 0

        def wait(self) -> None:
            self.calls += 1
            slots[0] = torch.tensor([10.0 if self.calls % 2 else 77.0])

    group = ThreadGroup(1, Meeting(), slots)  # type: ignore[arg-type]
    for number in (1, 2):
        assert all_sum(torch.tensor([float(number)]), group).tolist() == [10.0 + number]
        assert group._barrier.calls == 2 * number  # type: ignore[attr-defined]


def test_threads_know_their_places_and_leave() -> None:
    groups = ThreadGroup.make(3)
    assert [(group.rank(), group.size()) for group in groups] == [(0, 3), (1, 3), (2, 3)]
    assert not groups[0]._barrier.broken
    groups[2].leave()
    assert groups[0]._barrier.broken, "nobody waits for it"
    with pytest.raises(threading.BrokenBarrierError):
        groups[0].sum(torch.zeros(1))
