"""Numbers of a step, by hand: agreement of ranks, loads, margins, loss scale, rates, micro-batches."""

from __future__ import annotations

import math
import timeit
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from picotron_ray.comm.collectives import world_gather
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.optimizer import ScheduleConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.errors import PeerLostError
from picotron_ray.layout.layout import Layout
from picotron_ray.train import expert_balance
from picotron_ray.train.expert_balance import ExpertBalance, ExpertLoad
from picotron_ray.train.micro_batches import MicroBatcher
from picotron_ray.train.optim.lr_schedule import factor
from picotron_ray.train.precision.gradient_variability import GradientVariability, part_of_each
from picotron_ray.train.precision.loss_scaler import GROWTH_STEPS, LossScaler, NoScaling, loss_scaling
from picotron_ray.train.state_copies import HostCopies
from picotron_ray.train.step_sync import SNAPSHOT, STOP, Agreement, Contribution, agree, exchange

CPU = torch.device("cpu")


def said(**changes: Any) -> Contribution:
    given = {
        "loss_sum": 1.5, "grad_norm": 2.5, "rows": (0, 4), "flags": 0, "digest": b"a" * 16,
        "snapshots_apart_s": 0.5, "step_time_s": 0.5, "sealed": 6, "imbalance": 1.25, "dropped": 3,
    }  # fmt: skip
    return Contribution(**{**given, **changes})


def agreed(records: list[Contribution], layout: Layout) -> Agreement:
    return agree(np.concatenate([one.record for one in records]), layout)


def test_ranks_agree_on_sums_maxima_and_minima() -> None:
    records = [
        said(flags=STOP),
        said(rows=(4, 8), digest=b"b" * 16, loss_sum=0.5, grad_norm=9.0, sealed=4, dropped=50),
        said(flags=SNAPSHOT, snapshots_apart_s=2.5, imbalance=1.75, dropped=7),
        said(rows=(4, 8), digest=b"b" * 16, step_time_s=0.75, sealed=9, dropped=50),
    ]
    assert agreed(records, Layout(dp=2, pp=2)) == Agreement(
        loss_sum=5.0,
        grad_norm=2.5,
        rows=((0, 4, "61" * 16), (4, 8, "62" * 16)),
        flags=3,
        sealed=4,
        snapshot_interval=4,  # 1.25 / (0.5 x 0.75), rounded up
        imbalance=1.75,
        dropped=3 + 7,
    )


@pytest.mark.parametrize(
    ("cost", "step", "interval"), [(0.0, 1.0, 1), (1.0, 1.0, 2), (1.1, 1.0, 3), (9.0, 0.0, 1)]
)
def test_snapshots_take_half_of_the_time_at_most(cost: float, step: float, interval: int) -> None:
    records = [said(snapshots_apart_s=HostCopies().apart_s(cost), step_time_s=step)]
    assert agreed(records, Layout()).snapshot_interval == interval


def test_replicas_that_fed_other_tokens_are_told() -> None:
    text = r"^rank 1 fed tokens \(0, 4, '6262.*62'\), its replica fed \(0, 4, '6161.*61'\)$"
    with pytest.raises(RuntimeError, match=text):
        agreed([said(), said(digest=b"b" * 16)], Layout(tp=2))


def test_no_rank_waits_long_for_the_numbers_of_thousands() -> None:
    """By numpy's columns; one object per rank took 70 ms of a core."""
    layout = Layout(dp=64, pp=8, cp=2, tp=4)
    table = np.concatenate([said().record] * layout.world_size)
    at = [layout.coordinates(rank) for rank in range(layout.world_size)]
    table["rows"] = [(4 * one.dp, 4 * one.dp + 4) for one in at]
    table["digest"][:, 0] = [one.dp for one in at]
    found = agree(table, layout)
    assert [first for first, _, _ in found.rows] == list(range(0, 256, 4))
    assert [text[:2] for _, _, text in found.rows] == [f"{dp:02x}" for dp in range(64)]
    seconds = min(timeit.repeat(lambda: agree(table, layout), number=1, repeat=20))
    one_by_one = min(
        timeit.repeat(lambda: [Contribution(*row) for row in table.tolist()], number=1, repeat=5)
    )
    assert seconds < one_by_one
    table["digest"][layout.world_size - 1, 15] += 1
    with pytest.raises(RuntimeError, match=f"^rank {layout.world_size - 1} fed tokens"):
        agree(table, layout)


def test_one_rank_that_is_not_finite_speaks_for_all() -> None:
    lost, norm = agreed([said(), said(loss_sum=math.nan)], Layout(tp=2)), said(grad_norm=math.inf)
    assert (lost.finite, lost.grad_norm) == (False, 2.5)
    found = agreed([said(), norm], Layout(tp=2))
    assert (found.finite, found.grad_norm) == (False, math.inf)


def test_requests_are_told_apart() -> None:
    assert [agreed([said(flags=flags)], Layout()).flags for flags in (0, STOP, SNAPSHOT)] == [0, 1, 2]


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What arrives from three ranks; None arrives: an aborted collective that raised nothing."""
    arrives: list[torch.Tensor] = []

    def gather(found: torch.Tensor, mine: torch.Tensor, group: object) -> None:
        assert group == "the group"
        for part in arrives or found.chunk(3):
            part.copy_(mine)

    monkeypatch.setattr(world_gather, "all_gather_single", gather)
    return arrives


def test_all_ranks_are_heard(gathers: list[torch.Tensor]) -> None:
    mine = said(flags=2, sealed=-1, step=7)
    assert exchange(mine, Layout(tp=3), CPU, "the group") == agreed([mine] * 3, Layout(tp=3))


def test_numbers_that_never_arrived_are_no_agreement(gathers: list[torch.Tensor]) -> None:
    """A kernel of NCCL that is aborted may end without an error."""
    gathers.append(torch.empty(said().record.nbytes // 8, dtype=torch.int64))
    with pytest.raises(PeerLostError, match=r"step 7 has rank 0's numbers of step -1"):
        exchange(said(step=7), Layout(tp=3), CPU, "the group")


def test_numbers_of_another_step_are_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(found: torch.Tensor, mine: torch.Tensor, group: object) -> None:
        old = torch.frombuffer(bytearray(said(step=6).record.tobytes()), dtype=torch.int64)
        for part, numbers in zip(found.chunk(2), (mine, old), strict=True):
            part.copy_(numbers)

    monkeypatch.setattr(world_gather, "all_gather_single", gather)
    with pytest.raises(PeerLostError, match=r"step 7 has rank 1's numbers of step 6"):
        exchange(said(step=7), Layout(tp=2), CPU)


def test_one_rank_agrees_with_itself() -> None:
    mine = said(flags=2, sealed=-1)
    assert exchange(mine, Layout(), CPU) == agreed([mine], Layout())


def mixtures(rate: float) -> list[tuple[int, Any]]:
    """Of a biased and an unbiased layer."""
    config = SimpleNamespace(bias_rate=rate)
    return [
        (
            number,
            SimpleNamespace(
                scale=0.0, router=SimpleNamespace(bias=bias, config=config, load=None, held=False)
            ),
        )
        for number, bias in ((3, torch.tensor([0.0, 1.0, 2.0])), (5, None))
    ]


def test_biases_move_against_the_load_of_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    found = mixtures(0.5)
    balance = ExpertBalance(found, "the group")  # type: ignore[arg-type]
    sums: list[object] = []

    def reduce(loads: torch.Tensor, group: object) -> None:
        sums.append(group)
        loads *= 2

    monkeypatch.setattr(expert_balance.dist, "all_reduce", reduce)
    balance.begin(0.125)
    assert [(mixture.scale, mixture.router.load) for _, mixture in found] == [(0.125, None)] * 2
    found[0][1].router.load = torch.tensor([6.0, 4.0, 2.0, 1.0])
    found[1][1].router.load = torch.tensor([1.0, 1.0, 4.0, 0.0])
    balance.reduce()
    balance.step()
    assert sums == ["the group"]
    assert found[0][1].router.bias.tolist() == [-0.5, 1.0, 2.5]
    assert (float(balance.load().imbalance), float(balance.load().dropped)) == (2.0, 2.0)
    balance.begin(0.5)
    assert found[0][1].router.load is None


def test_without_mixtures_or_replicas_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_balance.dist, "all_reduce", None)
    nothing = ExpertBalance([], "the group")  # type: ignore[arg-type]
    nothing.reduce()
    nothing.step()
    assert nothing.load() == ExpertLoad(0.0, 0.0)
    found = mixtures(1.0)[1:]
    found[0][1].router.load = torch.tensor([1.0, 3.0, 5.0])
    alone = ExpertBalance(found, None)
    alone.reduce()
    assert (float(alone.load().imbalance), float(alone.load().dropped)) == (1.5, 5.0)


def test_margins_follow_the_logarithm_of_norms() -> None:
    seen = GradientVariability()
    assert seen.margins(2) == [1.0, 1.0]
    seen.observe([math.e, math.inf])
    assert seen.margins(2) == [1.0, 1.0]
    seen.observe([math.e**3, 0.0])  # share 1/2: moved 2, mean 2, variance (0 + 2) / 2
    assert seen._mean[0] == pytest.approx(2.0)
    assert seen.margins(2) == [pytest.approx(math.e), 1.0]
    seen.observe([math.e**5, math.e])  # share 1/3: moved 3, mean 3, variance 2/3 x (1 + 3)
    assert seen._mean == [pytest.approx(3.0), pytest.approx(1.0)]
    assert seen._variance == [pytest.approx(8 / 3), 0.0]
    seen._steps = 70
    seen.observe([math.e**8, math.nan])  # share 1/50: moved 5
    assert seen._mean[0] == pytest.approx(3.1)
    assert seen._variance[0] == pytest.approx(0.98 * (8 / 3 + 0.02 * 25))


def test_parameters_belong_to_the_longest_part_that_names_them() -> None:
    parts = ["layers.1", "layers.10", "layers.1.mlp", "head"]
    names = ["layers.1.wq", "layers.10.wq", "layers.1.mlp.up", "head", "embed.weight", "layers.1"]
    assert part_of_each(names, parts) == [0, 1, 2, 3, -1, 0]


def test_the_loss_scale_halves_and_doubles() -> None:
    scaler = LossScaler(CPU)
    assert math.isnan(scaler.scale)
    scaler.initialise()
    scaler.begin()
    assert scaler.scale == 65536.0
    assert not scaler.fits(math.inf)
    assert scaler.scale == 32768.0
    assert scaler.fits(1.0)
    scaler.step()
    assert scaler.state.tolist() == [32768.0, 1.0]
    for steps, expected in ((GROWTH_STEPS - 2, [8.0, GROWTH_STEPS - 1.0]), (GROWTH_STEPS - 1, [16.0, 0.0])):
        scaler.state.copy_(torch.tensor([8.0, float(steps)]))
        scaler.begin()
        assert scaler.fits(1.0)
        scaler.step()
        assert scaler.state.tolist() == expected
    scaler.state.copy_(torch.tensor([2.0, 5.0]))
    scaler.begin()
    gradients = [torch.tensor([4.0, 6.0]), torch.tensor([1.0])]
    scaler.unscale_(gradients)
    scaler.unscale_([])
    assert [gradient.tolist() for gradient in gradients] == [[2.0, 3.0], [0.5]]
    assert not scaler.fits(math.nan)
    assert scaler.fits(math.nan), "at a scale of 1 the training overflows, not the format"
    assert GROWTH_STEPS == 2000


def test_formats_without_a_scale() -> None:
    assert [type(loss_scaling(name, CPU)) for name in ("fp16", "bf16")] == [LossScaler, NoScaling]
    none = NoScaling()
    gradients = [torch.ones(2)]
    none.unscale_(gradients)
    assert none.fits(math.inf)
    assert (none.scale, none.tensors(), gradients[0].tolist()) == (1.0, (), [1.0, 1.0])


def test_rates_at_the_borders() -> None:
    def at(step: int, steps: int = 10, **options: Any) -> float:
        return factor(ScheduleConfig(**options), step, steps)

    cosine = {"kind": "cosine", "warmup_steps": 2, "final_ratio": 0.2}
    assert [at(step, **cosine) for step in (1, 2, 6, 10, 14)] == pytest.approx([0.5, 1.0, 0.6, 0.2, 0.2])
    assert at(3, steps=2, kind="cosine", warmup_steps=5, final_ratio=0.2) == pytest.approx(0.2)
    wsd = {"kind": "wsd", "warmup_steps": 2, "decay_steps": 4, "final_ratio": 0.2}
    assert [at(step, **wsd) for step in (2, 6, 7, 9, 10)] == pytest.approx([1.0, 1.0, 0.8, 0.4, 0.2])
    assert at(4, steps=6, **{**wsd, "decay_steps": 9}) == pytest.approx(0.6), "no more steps than are left"
    assert [at(step, kind="constant", warmup_steps=4) for step in (1, 4, 9)] == [0.25, 1.0, 1.0]


def test_micro_batches_of_a_rank_that_shares_rows() -> None:
    data = {"source": "memmap", "sequence_length": 8, "document_masks": True, "end_token": 3}
    job = JobConfig.model_validate({"data": data, "kernels": {"loss": "linear"}})
    tokens = np.array([[[1, 3, 2, 2, 3, 4, 5, 6, 7]], [[9, 8, 7, 3, 5, 4, 3, 2, 1]]], dtype=np.int64)
    weights = np.array([[1.0], [0.0]])
    batch: Any = SimpleNamespace(tokens=tokens, weights=weights, counted=None, documents=None)
    assert {"tokens", "weights", "counted", "documents"} <= StepBatch.__annotations__.keys()
    batcher = MicroBatcher(job, Layout(cp=2), 1, CPU, weighted=True)
    (inputs, targets, live, named), second = batcher.micro_batches(batch)
    assert inputs.tolist() == [[2, 2, 3, 4]]
    assert targets.tolist() == [[2, 3, 4, 5]]
    assert live.tolist() == [1.0]
    assert live.dtype == torch.float32
    assert named.keys() == {"weights", "documents", "targets"}
    assert named["documents"].tolist() == [[0, 0, 1, 1, 1, 2, 2, 2]]
    assert torch.equal(named["targets"], targets)
    assert torch.equal(named["weights"], live)
    assert second[0].tolist() == [[7, 3, 5, 4]]
    assert second[3]["weights"].tolist() == [0.0]
    plain = JobConfig.model_validate({"data": {"sequence_length": 8}})
    (whole, after, _, none), _ = MicroBatcher(plain, Layout(), 0, CPU, weighted=False).micro_batches(batch)
    assert whole.tolist() == [[1, 3, 2, 2, 3, 4, 5, 6]]
    assert after.tolist() == [[3, 2, 2, 3, 4, 5, 6, 7]]
    assert none == {}
