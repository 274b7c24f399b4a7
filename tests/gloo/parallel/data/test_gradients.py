"""Sums and norms of gradients, by hand: when they start, where gradients lie, who counts what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.data import ddp, grad_norm
from picotron_ray.parallel.data.ddp import DEFAULT, ReplicatedGradients, replicated
from picotron_ray.parallel.data.grad_norm import PartSums, clip_, global_norm, squared_sum
from picotron_ray.parallel.shard_boxes import chunk, counts_in_norm, is_primary, local_box
from tests.support.gloo.group import Group

CPU = torch.device("cpu")
GROUP = Group(0, 2)


class Wire:
    """Doubles what it sums, when it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[int, object]] = []
        monkeypatch.setattr(ddp.dist, "all_reduce", self._reduce)

    def _reduce(self, flat: Tensor, group: object, async_op: bool) -> Any:
        assert async_op
        self.started.append((flat.numel(), group))

        class Work:
            def wait(self) -> None:
                flat.mul_(2)

        return Work()


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in (2, 3, 4)]


def backward(parameter: nn.Parameter, slope: float) -> None:
    (parameter * slope).sum().backward()


def test_sums_start_with_the_last_pass_in_the_order_of_the_backward_pass(wire: Wire) -> None:
    first, second, third = parameters()
    sums = ReplicatedGradients([first, second, third], GROUP, bucket_bytes=16)  # type: ignore[arg-type]
    for _ in range(2):
        wire.started.clear()
        sums.begin(2)
        assert [p.grad.tolist() for p in (first, second, third) if p.grad is not None] == [
            [0] * 2,
            [0] * 3,
            [0] * 4,
        ]
        for parameter in (third, second, first):
            backward(parameter, 1.0)
        assert wire.started == []
        backward(second, 2.0)
        assert wire.started == [], "the bucket before it is not complete"
        backward(third, 3.0)
        assert wire.started == [(4, GROUP), (3, GROUP)]
        sums.finish()
        assert wire.started == [(4, GROUP), (3, GROUP), (2, GROUP)]
        found = [p.grad.tolist() for p in (first, second, third) if p.grad is not None]
        assert found == [[2.0] * 2, [6.0] * 3, [8.0] * 4]
    sums.close()
    backward(third, 1.0)
    assert len(wire.started) == 3
    assert (sums._hooks, sums._bucket, sums._buckets) == ([], {}, [])


def test_sums_may_all_be_under_way_before_the_end(wire: Wire) -> None:
    mine = parameters()
    sums = ReplicatedGradients(mine, GROUP, bucket_bytes=16)  # type: ignore[arg-type]
    sums.begin(1)
    for parameter in reversed(mine):
        backward(parameter, 1.0)
    assert [count for count, _ in wire.started] == [4, 3, 2]
    sums.finish()
    assert len(wire.started) == 3
    assert [p.grad.sum().item() for p in mine if p.grad is not None] == [4.0, 6.0, 8.0]


def test_gradients_that_lie_elsewhere_come_back(wire: Wire) -> None:
    one, other = parameters()[:2]
    sums = ReplicatedGradients([one, other], GROUP)  # type: ignore[arg-type]
    sums.begin(1)
    (bucket,) = sums._buckets
    one.grad = None  # as torch's stages do
    backward(one, 5.0)
    assert bucket._flat.tolist() == [0, 0, 0, 5, 5]
    other.grad = torch.tensor([7.0, 8.0, 9.0])  # and no hook hears of it
    sums.finish()
    assert bucket._flat.tolist() == [14, 16, 18, 10, 10]
    assert other.grad is bucket._views[other]
    sums.begin(1)
    other.grad = None
    sums.finish()
    assert bucket._flat.tolist() == [0] * 5


def test_parameters_of_one_group_are_summed_together() -> None:
    first, second, third = parameters()
    a, b = Group(0, 2), Group(0, 2)
    groups: Any = [(first, a), (second, None), (third, b)]
    found = replicated(groups)
    assert [list(sums._bucket) for sums in found] == [[first], [third]]
    assert [sums._buckets[0]._group for sums in found] == [a, b]
    assert len(replicated([*groups, (second, a)])[0]._bucket) == 2
    assert DEFAULT.bucket_limit == 25 * 2**20


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the other ranks add, and then what was sent."""
    others: list[float] = []

    def reduce(total: Tensor) -> None:
        assert total.dtype == torch.float64
        total += others.pop()

    monkeypatch.setattr(grad_norm.dist, "all_reduce", reduce)
    return others


CUT = [Layout(tp=2), Layout(pp=2), Layout(dp=2, zero=1), Layout(dp=2, ep=2)]
ALIKE = [Layout(), Layout(dp=4, cp=2)]
GRADIENTS = [torch.tensor([3.0]), torch.tensor([[2.0, 4.0]]), torch.tensor([4.0, 4.0])]


@pytest.mark.parametrize("layout", [*ALIKE, *CUT], ids=str)
def test_norms_by_hand(world: list[float], layout: Layout) -> None:
    alike, counted, parts = layout in ALIKE, [True, False, True], [1, 1, -1]
    if not alike:
        world.append(8.0)
    assert global_norm(GRADIENTS, counted, layout, CPU) == pytest.approx((61 if alike else 49) ** 0.5)
    if not alike:
        world.append(7.0)
    found = PartSums(counted, parts, 3, layout, CPU).of(GRADIENTS)
    expected = [0, 29, 0] if alike else [7, 16, 7]
    assert found.flatten().tolist() == pytest.approx(expected)
    assert not world
    if not alike:
        world.append(1.0)
    assert PartSums(counted, [-1] * 3, 1, layout, CPU).of(GRADIENTS).tolist() == [[0.0 if alike else 1.0]]
    assert squared_sum([], CPU).item() == 0.0


def test_the_first_part_has_a_norm_too() -> None:
    assert PartSums([], [0, -1, 0], 1, Layout(), CPU).of(GRADIENTS).tolist() == [[pytest.approx(41)]]


def test_further_sums_are_of_each_parts_elements() -> None:
    def large(x: torch.Tensor) -> torch.Tensor:
        return torch.stack(((x > 3.5).sum(), x.sum())).double()

    found = PartSums([], [0, -1, 0], 2, Layout(), CPU).of(GRADIENTS, large, 2)
    assert found.tolist() == [[pytest.approx(41), 2.0, 11.0], [0.0, 0.0, 0.0]]


def test_sums_of_a_step_copy_nothing_to_the_device() -> None:
    """A tensor of Python's numbers, made in each step, would."""

    class Lifted(TorchDispatchMode):
        seen = False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen |= "lift_fresh" in str(func)
            return func(*args, **(kwargs or {}))

    sums = PartSums([], [0, -1, 0], 2, Layout(), CPU)
    with Lifted() as mode:
        sums.of(GRADIENTS)
    assert not mode.seen
    with Lifted() as mode:
        torch.tensor([1, 2])
    assert mode.seen


@pytest.mark.parametrize(
    ("norm", "largest", "scale"), [(4.0, 2.0, 0.5), (1.0, 2.0, 1.0), (0.5, 1.0, 1.0), (2e-6, 1e-6, 1 / 3)]
)
def test_clipping(norm: float, largest: float, scale: float) -> None:
    gradients = [torch.ones(2), torch.ones(1)]
    clip_(gradients, torch.tensor(norm, dtype=torch.float64), largest)
    clip_([], torch.tensor(norm, dtype=torch.float64), largest)
    assert [x for gradient in gradients for x in gradient.tolist()] == pytest.approx([scale] * 3)


def spec(tp_dim: int | None = 0, **more: Any) -> ParameterSpec:
    return ParameterSpec("x", (6, 10), 0, "block", tp_dim, True, 1.0, **more)


def test_boxes_by_hand() -> None:
    assert [chunk(10, 4, index) for index in range(5)] == [(0, 3), (3, 3), (6, 3), (9, 1), (10, 0)]
    layout = Layout(dp=4, tp=2, zero=2, ep=2)
    rank = layout.rank(layout.coordinates(0)._replace(dp=3, tp=1))
    assert local_box(spec(), layout, rank) == Box(
        (6, 0), (0, 10)
    )  # 3 rows of the second half by 4: 1, 1, 1, 0
    assert local_box(spec(1), layout, rank) == Box((6, 5), (0, 5))
    assert local_box(spec(1), layout, rank - 2) == Box((4, 5), (2, 5))
    assert local_box(spec(None), layout, rank - 2) == Box((4, 0), (2, 10))
    assert local_box(spec(None, trained=False), layout, rank) == Box((0, 0), (6, 10))
    expert = spec(1, expert=True)  # 3 experts by 2: the other ranks with them have 2 and 1
    found = {r: local_box(expert, layout, r) for r in range(1, 8, 2)}
    assert found == {
        1: Box((0, 5), (2, 5)), 3: Box((3, 5), (2, 5)), 5: Box((2, 5), (1, 5)), 7: Box((5, 5), (1, 5))
    }  # fmt: skip
    assert local_box(spec(), Layout(), 0) == Box((0, 0), (6, 10))


def test_one_rank_speaks_for_each_box() -> None:
    def ranks(layout: Layout, what: ParameterSpec, rule: Any) -> list[int]:
        return [rank for rank in range(layout.world_size) if rule(what, layout, rank)]

    plain = Layout(dp=4, tp=2, ep=2)
    for what, primary, counted in (
        (spec(), [0, 1, 4, 5], [0, 1]),
        (spec(None), [0, 4], [0]),
        (spec(expert=True), list(range(8)), [0, 1, 2, 3]),
        (spec(None, trained=False), [0, 4], []),
        (spec(copy=True), [], []),
    ):
        assert ranks(plain, what, is_primary) == primary
        assert ranks(plain, what, counts_in_norm) == counted
    cut_twice = Layout(dp=4, zero=1, replicate=2)
    assert ranks(cut_twice, spec(), is_primary) == [0, 1, 2, 3]
    assert ranks(cut_twice, spec(), counts_in_norm) == [0, 1]
    assert ranks(cut_twice, spec(trained=False), is_primary) == [0, 2]
