"""Tensor parallelism on one rank of three that is made up: what is cut, added and looked up there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_ray.errors import LayoutError
from picotron_ray.models.layers.positions import Positions
from picotron_ray.parallel.loss import cross_entropy, linear_cross_entropy
from picotron_ray.parallel.loss.cross_entropy import token_losses, weighted_sum
from picotron_ray.parallel.loss.linear_cross_entropy import LinearCrossEntropy
from picotron_ray.parallel.tensor import ring_overlap, tensor_parallel
from picotron_ray.parallel.tensor.overlap import OverlappedProducts, overlapped_products
from picotron_ray.parallel.tensor.ring_overlap import RingOverlap
from picotron_ray.parallel.tensor.tensor_parallel import apply_tensor_parallel, linear_dims, matches


class Group:
    def __init__(self, rank: int = 1, size: int = 3) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


GROUP: Any = Group()


class Conv1D(nn.Module):
    """As transformers' GPT-2 has it: ``[in, out]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


@pytest.fixture(autouse=True)
def _transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has the same part: gathering repeats it, summing takes it times three."""
    monkeypatch.setattr(tensor_parallel, "gather_sequence", lambda x, group: torch.cat([x] * 3, dim=1))
    monkeypatch.setattr(
        tensor_parallel, "reduce_scatter_sequence", lambda x, group: 3 * x.chunk(3, dim=1)[group.rank()]
    )
    monkeypatch.setattr(tensor_parallel, "all_sum", lambda x, group: 3 * x)


def applied(module: nn.Module, style: str, group: Any = GROUP) -> Any:
    model = nn.ModuleDict({"part": module})
    plan: Any = [("part", style), ("absent", "colwise")]
    assert apply_tensor_parallel(model, group, plan) == (1, 0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize(
    ("style", "weight", "bias"),
    [
        ("colwise", (3, 6), (3,)),
        ("rowwise", (9, 2), (9,)),
        ("inner", (9, 2), (9,)),
        ("vocab_head", (3, 6), (9,)),
        ("copy_colwise", (3, 6), (3,)),
        ("sum_rowwise", (9, 2), (9,)),
        ("sequence", (9, 6), (9,)),
        ("whole", (9, 6), (9,)),
    ],
)
def test_what_is_cut_of_a_linear_layer(style: str, weight: tuple[int, ...], bias: tuple[int, ...]) -> None:
    module = applied(nn.Linear(6, 9), style)
    assert (tuple(module.weight.shape), tuple(module.bias.shape)) == (weight, bias)
    if style != "vocab_head":
        assert applied(nn.Linear(6, 9, bias=False), style).bias is None


def test_what_is_cut_of_other_modules() -> None:
    experts = nn.Module()
    for name, shape in (("gate", (4, 6, 5)), ("up", (4, 6, 5)), ("down", (4, 5, 6))):
        experts.register_parameter(name, nn.Parameter(torch.empty(shape)))
    experts.biased = False
    found = applied(experts, "experts")
    assert [tuple(p.shape) for p in found.parameters()] == [(4, 2, 5), (4, 2, 5), (4, 5, 2)]
    for name, shape in (("gate_bias", (4, 6)), ("up_bias", (4, 6)), ("down_bias", (4, 6))):
        experts.register_parameter(name, nn.Parameter(torch.empty(shape)))
    experts.gate, experts.up = (nn.Parameter(torch.empty(4, 6, 5)) for _ in range(2))
    experts.down, experts.biased = nn.Parameter(torch.empty(4, 5, 6)), True
    found = applied(experts, "experts", Group(1))
    assert [tuple(getattr(found, f"{name}_bias").shape) for name in ("gate", "up", "down")] == [
        (4, 2),
        (4, 2),
        (4, 6),
    ]
    assert not found.adds_bias
    assert applied(Positions(8, 4), "positions").part == (1, 3)
    norm = applied(nn.RMSNorm(6, eps=1e-5), "cut_norm")
    assert norm.weight.shape == (2,)
    uneven = [applied(nn.Embedding(7, 4), "vocab_embed", Group(rank)).weight.size(0) for rank in range(3)]
    assert uneven == [3, 3, 1]
    heads = [applied(nn.Linear(4, 7, bias=False), "vocab_head", Group(rank)) for rank in range(3)]
    assert [head.weight.size(0) for head in heads] == [3, 3, 1]
    conv = applied(Conv1D(4, 6), "copy_colwise")
    assert (conv.weight.shape, conv.bias.shape, conv.nf) == ((4, 2), (2,), 2)
    conv = applied(Conv1D(6, 4), "sum_rowwise")
    assert (conv.weight.shape, conv.bias.shape) == ((2, 4), (4,))


def test_what_each_style_computes() -> None:
    x = torch.randn(2, 6, 6, requires_grad=True)
    head = applied(nn.Linear(6, 9, bias=False), "vocab_head")
    torch.testing.assert_close(head(x), F.linear(torch.cat([x] * 3, dim=1), head.weight))
    row = applied(nn.Linear(6, 9), "rowwise")
    torch.testing.assert_close(row(x[..., :2]), 3 * F.linear(x[:, 2:4, :2], row.weight) + row.bias)
    for summed, weight in (
        (applied(nn.Linear(6, 9), "sum_rowwise"), lambda w: w),
        (applied(Conv1D(6, 9), "sum_rowwise"), lambda w: w.T),
    ):
        torch.testing.assert_close(
            summed(x[..., :2]), 3 * F.linear(x[..., :2], weight(summed.weight)) + summed.bias
        )
    embed = applied(nn.Embedding(7, 4), "vocab_embed")  # ids 3 to 5
    found = embed(torch.tensor([[0, 1, 2, 3, 6, 5], [3, 4, 5, 6, 2, 0]]))
    expected = [[0 * embed.weight[0], embed.weight[0]], [embed.weight[2], 0 * embed.weight[0]]]
    torch.testing.assert_close(found, 3 * torch.stack([torch.stack(rows) for rows in expected]))
    last = applied(nn.Embedding(7, 4), "vocab_embed", Group(2))  # id 6 alone
    torch.testing.assert_close(last(torch.tensor([[0, 5, 6]])), 3 * last.weight.unsqueeze(0))
    copied = applied(nn.Linear(6, 9), "copy_colwise")
    out = copied(x)
    torch.testing.assert_close(out, F.linear(x, copied.weight, copied.bias))
    (slope,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(slope, 3 * copied.weight.sum(dim=0).expand_as(x))
    summed = applied(nn.Linear(18, 9), "sum_rowwise")
    (slope,) = torch.autograd.grad(summed(x).sum(), x)
    torch.testing.assert_close(slope, summed.weight.sum(dim=0).expand_as(x))


class Block(nn.Module):
    """Takes a second input, as mixtures take rows' weights; remembers how it was fused."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.fuses: list[bool] = []
        self.fused_linear = SimpleNamespace(products=None) if fused else None

    def fuse(self, as_one: bool = True) -> None:
        self.fuses.append(as_one)
        self.fused_linear = SimpleNamespace(products=None)

    def forward(self, x: Tensor, more: Tensor, most: Tensor) -> Tensor:
        return 2 * x + more * most


@pytest.mark.parametrize("style", ["gather_input", "mixture"])
def test_what_stands_around_a_module(style: str) -> None:
    """Rank 1's second of three parts; the gradient goes the way back."""
    x, more = torch.randn(1, 2, 3, requires_grad=True), torch.randn(1, 6, 3)
    out = applied(Block(), style)(x, more, more)
    whole = 2 * torch.cat([x] * 3, dim=1) + more * more
    torch.testing.assert_close(out, whole if style == "gather_input" else 3 * whole[:, 2:4])
    scale = torch.arange(1.0, 1 + out.size(1)).view(1, -1, 1).expand_as(out)
    (slope,) = torch.autograd.grad((out * scale).sum(), x)
    middle = 2 * (scale if style == "gather_input" else torch.cat([scale] * 3, dim=1))
    torch.testing.assert_close(slope, 3 * middle[:, 2:4])


def test_overlap_where_it_is_asked_for() -> None:
    def products(x: Tensor, weights: Any, biases: Any) -> tuple[Tensor, ...]:
        raise AssertionError("not here")

    means = OverlappedProducts(products, lambda x, weight: 5 * F.linear(x, weight))
    plan: Any = [
        ("a", "gather_input"),
        ("b", "gather_input"),
        ("c", "rowwise"),
        ("d", "rowwise"),
        ("e", "whole"),
    ]
    modules = [Block(), Block(fused=True), nn.Linear(6, 9), nn.Linear(6, 9, bias=False), nn.ReLU()]
    model = nn.ModuleDict(dict(zip("abcde", modules, strict=True)))
    assert apply_tensor_parallel(model, GROUP, plan, means) == (5, 4)
    plain, fused, row, bare, _ = modules
    assert (plain.fuses, fused.fuses) == ([False], [])
    for block in (plain, fused):
        assert block.fused_linear.products is products  # type: ignore[union-attr]
        assert not block._forward_pre_hooks
    for linear in (row, bare):
        for parameter in linear.parameters():
            nn.init.normal_(parameter)
        x = torch.randn(1, 2, 2)
        expected = 5 * F.linear(x, linear.weight)  # type: ignore[arg-type]
        torch.testing.assert_close(linear(x), expected if linear is bare else expected + linear.bias)


class Alone:
    """An overlap of one rank: what it gathers is what it has."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def gather(self, x: Tensor, factors: Any, keep: bool) -> tuple[list[Tensor], Tensor | None]:
        self.seen.append(("gather", len(factors), keep, x.dtype))
        return [x @ factor for factor in factors], x if keep else None

    def scatter(self, xs: Any, factors: Any, gathered: Tensor | None) -> Any:
        self.seen.append(("scatter", len(xs), gathered is not None, xs[0].dtype))
        total = sum(x @ factor for x, factor in zip(xs, factors, strict=True))
        return lambda: total, gathered


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("low", [True, False])
def test_what_an_overlap_is_asked_for(biased: bool, low: bool) -> None:
    """No pass gathers what it does not need, and nothing is wider than autocast says."""
    alone = Alone()
    means = overlapped_products(alone, compiled=False)
    x, down = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 5, requires_grad=True)
    weights = [torch.randn(5, 4, requires_grad=True) for _ in range(2)]
    biases = [torch.randn(5, requires_grad=True) if biased else None for _ in range(2)]
    inputs = [x, down, *weights, *(bias for bias in biases if bias is not None)]
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        out = means.scattered(sum(means.products(x, weights, biases)), down)  # type: ignore[arg-type]
        wanted = F.linear(sum(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)), down)  # type: ignore[arg-type]
    found, expected = (torch.autograd.grad(y.float().square().sum(), inputs) for y in (out, wanted))
    for a, b in zip((out, *found), (wanted, *expected), strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 0.1, "atol": 2.0} if low else {}))  # type: ignore[arg-type]
    dtype = torch.bfloat16 if low else torch.float32
    asked = [("gather", 2, False), ("scatter", 1, False), ("gather", 1, True), ("scatter", 2, True)]
    assert alone.seen == [(*each, dtype) for each in asked]


def test_names_fit_part_by_part() -> None:
    assert matches("layers.3.mlp", "layers.*.mlp")
    assert not matches("layers.3.mlp.up", "layers.*.mlp")
    assert not matches("layers.mlp", "layers.*.mlp")
    assert not matches("layers.3.mlp", "layers.*.attention")
    alike = nn.ReLU()
    alike.nf = 3  # type: ignore[assignment]
    assert linear_dims(alike) is None
    assert [linear_dims(m) for m in (nn.Linear(1, 1), Conv1D(1, 1), nn.ReLU())] == [(0, 1), (1, 0), None]


def test_what_cannot_be_cut() -> None:
    for module, style in (
        (nn.Linear(6, 8), "colwise"),
        (nn.Linear(8, 6), "rowwise"),
        (nn.ReLU(), "sum_rowwise"),
    ):
        with pytest.raises(LayoutError, match=r"8 rows or columns of a weight do not divide by 3|saw a ReLU"):
            applied(module, style)
    with pytest.raises(LayoutError, match="'odd' of part"):
        applied(nn.ReLU(), "odd")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("first", [0, 3, 6])
def test_a_loss_over_part_of_a_vocabulary(monkeypatch: pytest.MonkeyPatch, chunked: bool, first: int) -> None:
    """The other ranks have what is left of it: their maxima and sums are added by hand."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 4, requires_grad=True), torch.randn(9, 4)
    targets = torch.tensor([[0, 2, 3, 5, 6], [8, 7, 4, 3, 2]])
    logits = (x @ weight.T).detach().flatten(0, 1)
    mine = torch.zeros(9, dtype=torch.bool)
    mine[first : first + 3] = True
    others = logits.masked_fill(mine, -1e30)
    hit = ~mine[targets.flatten()]
    picked = logits.gather(-1, targets.view(-1, 1)).squeeze(-1)
    seen: list[Tensor] = []

    def reduce(value: Tensor, op: Any = None, group: Any = None) -> None:
        assert group is GROUP
        if op is not None:
            assert op == cross_entropy.dist.ReduceOp.MAX
            theirs = others.logsumexp(-1) if chunked else others.max(-1).values
            seen.append(value.copy_(torch.maximum(value, theirs)).clone())
            return
        peak = seen[-1]
        total = (others - peak.unsqueeze(-1)).exp().sum(-1)
        value += torch.stack((total, (picked if chunked else picked - peak) * hit))

    for module in (cross_entropy, linear_cross_entropy):
        monkeypatch.setattr(module.dist, "all_reduce", reduce)
    part = weight[first : first + 3].clone().requires_grad_()
    if chunked:
        found = LinearCrossEntropy(4, GROUP, first)(x, part, targets)
    else:
        found = token_losses(x @ part.T, targets, GROUP, first)
    expected = F.cross_entropy(logits, targets.flatten(), reduction="none").view(2, 5)
    torch.testing.assert_close(found, expected)
    scale = torch.arange(10.0).view(2, 5)
    slope_x, slope_w = torch.autograd.grad((found * scale).sum(), (x, part))
    shares = logits.softmax(-1) - F.one_hot(targets.flatten(), 9)
    shares = (shares * scale.view(-1, 1))[:, first : first + 3]
    torch.testing.assert_close(slope_x, (shares @ part.detach()).view_as(x))
    torch.testing.assert_close(slope_w, shares.T @ x.detach().flatten(0, 1))


def test_losses_of_rows_are_weighed() -> None:
    losses = torch.tensor([[1.0, 2.0], [4.0, 8.0]], dtype=torch.float64)
    assert weighted_sum(losses, torch.tensor([1.0, 0.5])).item() == 9.0
    low = torch.zeros(1, 2, 4, dtype=torch.bfloat16)
    found = token_losses(low, torch.tensor([[1, 3]]), None)
    assert found.dtype == torch.float32
    assert found.tolist() == [[pytest.approx(4.0**0 * 1.3862944)] * 2]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_products_on_a_ring_by_hand(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Ranks' parts are told by their numbers; what arrives is what the rank before would send."""
    parts = [torch.full((2, 1, 2), float(10**number)) for number in range(3)]
    arrivals: list[tuple[int, Tensor]] = []
    incoming: list[Tensor] = []

    class Shift:
        def __init__(self, x: Tensor, group: object, tag: int = 0) -> None:
            arrivals.append((tag, x.clone()))
            self.found = incoming.pop(0).clone()

        def wait(self) -> Tensor:
            return self.found

    monkeypatch.setattr(ring_overlap, "Shift", Shift)
    ring = RingOverlap(Group(rank))  # type: ignore[arg-type]
    factors = [torch.eye(2), 2 * torch.eye(2)]
    for keep in (True, False):
        incoming[:] = [parts[(rank - 1) % 3], parts[(rank - 2) % 3]]
        (once, twice), whole = ring.gather(parts[rank], factors, keep)
        assert torch.equal(once, torch.cat(parts, dim=1))
        assert torch.equal(twice, 2 * once)
        assert whole is None if not keep else whole is not None and torch.equal(whole, once)
    assert {tag for tag, _ in arrivals} == {0}
    arrivals.clear()
    xs = [torch.cat(parts, dim=1), torch.cat(parts, dim=1)]
    incoming[:] = [torch.full((2, 1, 2), 0.25), torch.full((2, 1, 2), 0.5)]
    last, none = ring.scatter(xs, factors, None)
    assert none is None
    assert torch.equal(last(), 3 * parts[rank] + 0.5)
    assert [tag for tag, _ in arrivals] == [1, 1]
    assert torch.equal(arrivals[0][1], 3 * parts[(rank - 1) % 3]), "of the next rank's neighbour first"
    assert torch.equal(arrivals[1][1], 3 * parts[(rank - 2) % 3] + 0.25)
    incoming[:] = [torch.zeros(2, 1, 2)] * 2
    assert torch.equal(ring.scatter(xs[:1], factors[1:], None)[0](), 2 * parts[rank])
