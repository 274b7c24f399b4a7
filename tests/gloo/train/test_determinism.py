"""Determinism: two runs of a layout have the same bits, and a mixture adds in no order but one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.models.layers.expert_rows import gated_sum, rows_of, sort_routes
from picotron_ray.parallel.attention.backends import attention_kernel
from picotron_ray.train.determinism import CUBLAS, choose_algorithms, prepare_cublas
from picotron_ray.train.engine import build_engine
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    CPU,
    MIXTURE,
    MODEL,
    Result,
    batch,
    documents_job,
    make_job,
    run_layout,
)
from tests.support.gloo.pool import Pool

DETERMINISTIC = KernelsConfig(deterministic=True)
DROPPING = MIXTURE.model_copy(update={"moe": MIXTURE.moe.model_copy(update={"capacity_factor": 0.75})})

BIASED = MIXTURE.model_copy(
    update={"moe": MIXTURE.moe.model_copy(update={"balance": "bias", "loss_coefficient": 0.01})}
)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    choose_algorithms(JobConfig())


def job_of(model: ModelConfig, rows: int) -> JobConfig:
    job = make_job("adamw", rows, model, precision="fp32")
    return job.model_copy(update={"kernels": DETERMINISTIC})


def same_bits(first: Result, second: Result) -> bool:
    values = ([piece[-1] for piece in (*found.gradients, *found.state)] for found in (first, second))
    figures = [(found.loss, found.norm, found.evaluation) for found in (first, second)]
    pairs = zip(*values, strict=True)
    return figures[0] == figures[1] and all(a.tobytes() == b.tobytes() for a, b in pairs)


@pytest.mark.parametrize(
    ("model", "layout", "rows"),
    [
        (MIXTURE, Layout(dp=2, tp=2, ep=2, zero=1, micro_batch=3), 12),
        (DROPPING, Layout(dp=2, ep=2, zero=3, micro_batch=2), 8),
    ],
    ids=["mixture", "dropping"],
)
def test_two_runs_of_a_layout_have_the_same_bits(
    pool: Pool, model: ModelConfig, layout: Layout, rows: int
) -> None:
    job = job_of(model, rows)
    first = pool.run(layout.world_size, run_layout, [job, job], layout)
    second = pool.run(layout.world_size, run_layout, [job], layout)
    for (one, again), (later,) in zip(first, second, strict=True):
        assert "deterministic algorithms" in one.applied
        assert same_bits(one, again)
        assert same_bits(one, later)


class Unordered(TorchDispatchMode):
    """Operators that add several values into one place, in the order in which threads arrive on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        if name in ("index_add", "scatter_add"):
            if bool((args[2].sort(dim=args[1]).values.diff(dim=args[1]) == 0).any()):
                self.found.append(name)
        elif name == "index_put" and len(args) > 3 and args[3]:
            places = torch.stack([index.flatten() for index in args[1] if index is not None])
            if places.unique(dim=1).size(1) < places.size(1):
                self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_a_mixture_adds_into_no_shared_place() -> None:
    """Forward and backward; what scatters writes each place once."""
    engine = build_engine(job_of(DROPPING, 4), Layout(micro_batch=4), 0, None, CPU)
    assert torch.are_deterministic_algorithms_enabled()
    engine.initialise(0)
    with Unordered() as seen:
        engine.forward_backward(batch(engine.job, engine.layout, 0, 1))
    engine.close()
    assert seen.found == []
    x, twice = torch.zeros(2, requires_grad=True), torch.tensor([0, 0])
    with Unordered() as seen:
        torch.zeros(2).index_add(0, twice, torch.ones(2))
        torch.zeros(2).scatter_add(0, twice, torch.ones(2))
        x[twice].sum().backward()
    assert seen.found == ["index_add", "scatter_add", "index_put"]
    build_engine(make_job("adamw", 4), Layout(micro_batch=4), 0, None, CPU).close()
    assert not torch.are_deterministic_algorithms_enabled(), "another job of the process does not ask for it"


@pytest.mark.parametrize(
    "job",
    [
        documents_job("muon", 4),
        make_job("sgd", 4, MODEL.model_copy(update={"sliding_window": 3}), precision="bf16"),
        make_job("adamw", 4, MODEL.model_copy(update={"tie_embeddings": True}), precision="fp32"),
        make_job("adamw", 4, BIASED, precision="bf16"),
        make_job("adamw", 4, MODEL.model_copy(update={"family": "olmo2"})),
    ],
    ids=["documents", "window", "tied", "bias", "olmo2"],
)
@pytest.mark.parametrize("loss", ["logits", "linear"])
def test_every_operator_has_a_deterministic_way(job: JobConfig, loss: str) -> None:
    """Torch would raise RuntimeError with its name."""
    kernels = DETERMINISTIC.model_copy(update={"loss": loss})
    layout = Layout(micro_batch=2, recompute="full")
    engine = build_engine(job.model_copy(update={"kernels": kernels}), layout, 0, None, CPU)
    engine.initialise(0)
    engine.gradients_of(batch(engine.job, layout, 0, 1))
    engine.optimizer_step(0.01)
    engine.evaluate([batch(engine.job, layout, 0, 2)])
    engine.close()


@pytest.mark.parametrize("sent", [12, 7, 0], ids=["all", "some", "none"])
def test_rows_of_experts_and_their_sums(sent: int) -> None:
    """As by general indices, and their gradients as by finite differences."""
    generator = torch.Generator().manual_seed(sent)
    tokens = torch.randn(4, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    kept = torch.zeros(12, dtype=torch.bool)
    kept[torch.randperm(12, generator=generator)[:sent]] = True
    experts = torch.randint(5, (1, 4, 3), generator=generator)
    routes = sort_routes(experts, kept.view(1, 4, 3), 5)
    order = routes.order[:sent]
    rows = rows_of(tokens, routes)
    assert torch.equal(rows[:sent], tokens[order // 3])
    rows = torch.randn(13, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    gates = torch.randn(12, dtype=torch.float64, generator=generator) * kept
    weighted = rows[:sent] * gates[order].unsqueeze(-1)
    expected = rows.new_zeros(4, 5).index_add(0, order // 3, weighted)
    torch.testing.assert_close(gated_sum(rows, gates, routes), expected, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: rows_of(x, routes)[:sent], tokens)
    if sent:
        others = rows[sent:].detach()
        own = rows[:sent].detach().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: gated_sum(torch.cat((x, others)), gates, routes), own)


def test_flash_attn_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    module = ModuleType("flash_attn")

    def attend(q: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        told.append(options)
        return q

    module.flash_attn_func = module.flash_attn_varlen_func = attend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    x = torch.zeros(1, 2, 4, 8)
    for asked in (False, True):
        choose_algorithms(JobConfig(kernels=KernelsConfig(deterministic=asked)))
        attention_kernel("flash-attn")(x, x, x)
    assert [options.get("deterministic", False) for options in told] == [False, True]


def test_workspaces_of_cublas() -> None:
    job, plain = JobConfig(kernels=DETERMINISTIC), JobConfig()
    empty: dict[str, str] = {}
    prepare_cublas(plain, empty)
    assert empty == {}
    prepare_cublas(job, empty)
    assert empty == {CUBLAS: ":4096:8"}
    small = {CUBLAS: ":16:8"}
    prepare_cublas(job, small)
    assert small == {CUBLAS: ":16:8"}
    with pytest.raises(ConfigError, match=r"saw CUBLAS_WORKSPACE_CONFIG=:0:0, expected :4096:8 or :16:8"):
        prepare_cublas(job, {CUBLAS: ":0:0"})


def test_bits_are_compared() -> None:
    """The comparison sees the last bit of one value."""
    value = np.ones(3, np.float32)
    other = value.copy()
    other[1] = np.nextafter(other[1], np.float32(2), dtype=np.float32)
    pieces = [[("a", (3,), (0,), (3,), True, x)] for x in (value, other)]
    assert same_bits(Result(state=pieces[0]), Result(state=pieces[0]))
    assert not same_bits(Result(state=pieces[0]), Result(state=pieces[1]))
