"""Overlapped tensor parallelism: what plain collectives and products give, at every layout."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedules import SCHEDULES
from picotron_ray.parallel.tensor.symmetric_memory import RenumberedStore
from tests.gloo.parallel.test_matrix import GPT2, GPT2_TIED, ODD, TIED, WIDE
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    MIXTURE,
    MODEL,
    SEQUENCE,
    STEPS,
    documents_job,
    make_job,
    run_layout,
)
from tests.support.gloo.parallel_jobs.tensor_overlap_jobs import (
    PLANTS,
    both_ways,
    kept,
    order,
    run_unfused,
    shifts,
)
from tests.support.gloo.parity import compare, reference, thinned
from tests.support.gloo.pool import Pool, WorkerError
from tests.support.selection import also_deep

pytestmark = pytest.mark.gloo
RING = KernelsConfig(tp_overlap="ring")
BOTH = KernelsConfig(tp_overlap="ring", projections="fused")
SYMMETRIC = KernelsConfig(tp_overlap="symmetric-memory")
DEEP = ModelConfig(**{**MODEL.model_dump(), "layers": 5})
TWO = ModelConfig(**{**MODEL.model_dump(), "layers": 2})
WHOLE = ODD.model_copy(update={"sliding_window": None})  # a window and a cut row do not go together


@pytest.mark.parametrize("kind", ["ring", "symmetric-memory"])
@pytest.mark.parametrize(("ranks", "biased", "rows"), [(2, True, 2), (4, False, 2), (3, True, 1)])
def test_products_equal_those_after_plain_collectives(
    pool: Pool, kind: str, ranks: int, biased: bool, rows: int
) -> None:
    for distances in pool.run(ranks, both_ways, kind, biased, rows, False):
        assert max(overlapped for _, overlapped in distances) < 1e-13


@pytest.mark.parametrize("kind", ["ring", "symmetric-memory"])
def test_products_under_autocast(pool: Pool, kind: str) -> None:
    """All in all as near to full precision as without overlap, and of the same types."""
    for distances in pool.run(2, both_ways, kind, True, 2, True):
        plain, overlapped = (sum(column) for column in zip(*distances, strict=True))
        assert plain > 1e-2
        assert overlapped < 1.5 * plain, distances


# fmt: off
LAYOUTS = [
    (Layout(tp=4, micro_batch=4), 12, WIDE, RING),
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), 7, ODD, BOTH),  # biases
    (Layout(tp=2, pp=2, micro_batch=3), 12, WHOLE, RING),
    (Layout(tp=2, cp=2, micro_batch=4), 12, GPT2_TIED, RING),
    (Layout(tp=2, micro_batch=3, recompute="selective"), 12, ODD, RING),
    (Layout(dp=2, tp=2, ep=2, micro_batch=3, recompute="full"), 10, MIXTURE, BOTH),
    (Layout(tp=2, micro_batch=6), 12, TIED, BOTH),
    (Layout(dp=2, tp=2, zero=1, micro_batch=2), 7, MODEL, RING),
    (Layout(dp=2, tp=2, zero=2, micro_batch=2), 10, WHOLE, RING),
    (Layout(dp=2, tp=2, micro_batch=2), 10, MODEL, BOTH),
    (Layout(tp=2, cp=2, micro_batch=3, context="all-gather", recompute="full"), 12, WHOLE, RING),
    (Layout(tp=2, pp=2, virtual_stages=2, schedule="interleaved-1f1b", micro_batch=1), 12, DEEP, BOTH),
    (Layout(tp=2, pp=2, schedule="gpipe", micro_batch=3, recompute="every-2"), 12, GPT2, RING),
    (Layout(tp=4, pp=2, micro_batch=3), 12, WIDE, RING),
    (Layout(dp=2, tp=2, pp=2, zero=3, micro_batch=2), 7, ODD, RING),
    (Layout(dp=4, tp=2, zero=2, replicate=2, micro_batch=1), 10, MODEL, RING),
    (Layout(tp=4, cp=2, micro_batch=3, recompute="selective"), 12, WIDE, BOTH),
]
# fmt: on


@pytest.mark.parametrize(
    ("layout", "rows", "model", "kernels"), thinned(LAYOUTS, (1, 3), lambda layout, *_: str(layout))
)
def test_every_layout_equals_one_process(
    pool: Pool, layout: Layout, rows: int, model: ModelConfig, kernels: KernelsConfig
) -> None:
    jobs = [make_job(optimizer, rows, model, kernels=kernels) for optimizer in ("sgd", "adamw")]
    per_rank = pool.run(layout.world_size, run_layout, jobs, layout)
    for job, ranks in zip(jobs, zip(*per_rank, strict=True), strict=True):
        assert compare(job, layout, list(ranks)) == []
        assert all(rank.stable for rank in ranks), "state() must stay valid for the engine's whole life"
        for rank in ranks:
            blocks = model.layers // layout.pp if model is not DEEP else 0
            modules = blocks * (2 if model is MIXTURE else 4)
            assert not modules or f"communication of {modules} of them overlapped by ring" in rank.applied


def test_documents_and_the_linear_loss(pool: Pool) -> None:
    job = documents_job("adamw", 10)
    kernels = KernelsConfig(tp_overlap="ring", loss="linear", loss_chunk=5)
    job, layout = job.model_copy(update={"kernels": kernels}), Layout(dp=2, tp=2, micro_batch=2)
    ranks = [results[0] for results in pool.run(4, run_layout, [job], layout)]
    assert compare(job, layout, ranks) == []


def test_without_tensor_parallelism_it_says_so(pool: Pool) -> None:
    """The planner may come to tp=1 where the degree is left to it."""
    job, layout = make_job("sgd", 4, kernels=RING), Layout(micro_batch=4)
    ((result,),) = pool.run(1, run_layout, [job], layout)
    assert "no tensor parallelism that ring could overlap" in result.applied


def test_bf16_is_close_to_fp64(pool: Pool) -> None:
    layout = Layout(tp=2, micro_batch=3)
    job = make_job("adamw", 12, precision="bf16", kernels=RING)
    ranks = [results[0] for results in pool.run(2, run_layout, [job], layout)]
    for step in range(STEPS):
        found = sum(rank.loss[step] for rank in ranks)
        assert found == pytest.approx(reference("adamw", 12).loss[step], rel=0.03)


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("tp", [2, *also_deep(4)])
def test_a_mistake_in_the_ring_is_noticed(pool: Pool, plant: str, tp: int) -> None:
    job, layout = make_job("adamw", 12, WIDE, kernels=RING), Layout(tp=tp, micro_batch=6)
    per_rank = pool.run(tp, run_layout, [job], layout, f"overlap-{plant}")
    wrong = compare(job, layout, [results[0] for results in per_rank])
    assert any("gradient" in line for line in wrong), f"{plant} went unnoticed: {wrong}"


def test_every_transfer_has_a_product_to_hide_behind(pool: Pool) -> None:
    """Between sending a part and waiting for the next lies a product, forward and backward."""
    for found in pool.run(4, order):
        # x forward; x and sums backward; sums forward; gradients backward
        assert [sum(e.startswith("send") for e in events) for events in found] == [3, 6, 3, 3]
        for events in found:
            waits = {event.split()[1]: at for at, event in enumerate(events) if event.startswith("wait")}
            for at, event in enumerate(events):
                if event.startswith("send"):
                    assert "product" in events[at : waits[event.split()[1]]]


def test_less_is_kept_than_without(pool: Pool) -> None:
    """Of the input of attention and of the hidden layer the part of the other rank."""
    layout, rows = Layout(tp=2, micro_batch=4), 4
    plain, ring = (
        pool.run(2, kept, make_job("sgd", rows, TWO, kernels=kernels), layout)[0]
        for kernels in (KernelsConfig(), RING)
    )
    whole = rows * SEQUENCE * TWO.hidden_size * 8
    assert plain - ring >= 2 * TWO.layers * whole // 2


@pytest.mark.parametrize("recompute", ["none", *also_deep("full", "selective")])
def test_what_travels_is_what_the_planner_counts(pool: Pool, recompute: str) -> None:
    """Of each block 10 collectives in parts, and 4 of a forward pass that runs again."""
    layout = Layout(tp=4, micro_batch=6, recompute=recompute)
    job = make_job("sgd", 12, WIDE, kernels=RING)
    for _, count in pool.run(4, shifts, [job], layout):
        collectives = 10 if recompute == "none" else 14
        assert count == collectives * 3 * WIDE.layers * 2 * STEPS


SPLITTING = [name for name, entry in SCHEDULES.items() if entry.splits_backward]


@pytest.mark.deep
@pytest.mark.parametrize("schedule", thinned([(name,) for name in SPLITTING], [0]))
def test_why_a_split_backward_pass_refuses_it(pool: Pool, schedule: str) -> None:
    """Of what is split each half sends all of it: gradients are right, and more travels."""
    counts = {}
    for name in (schedule, "looped-bfs"):
        layout = Layout(tp=2, pp=2, virtual_stages=2, schedule=name, micro_batch=1)
        job = make_job("sgd", 12, DEEP, kernels=RING)
        found = pool.run(layout.world_size, shifts, [job], layout)
        assert compare(job, layout, [result for result, _ in found]) == []
        counts[name] = sum(count for _, count in found)
    assert counts["looped-bfs"] == 4 * 12 * STEPS * DEEP.layers * (2 * 3 + 2 * 2) // 2
    assert counts[schedule] > counts["looped-bfs"], "it is sent once now: allow it"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kernels", [RING, BOTH], ids=["separate", "fused"])
def test_in_compiled_blocks(pool: Pool, kernels: KernelsConfig) -> None:
    layout = Layout(tp=2, micro_batch=6, recompute="full" if kernels is BOTH else "none")
    job = make_job("adamw", 12, TWO, kernels=kernels.model_copy(update={"compile": True}))
    ranks = [results[0] for results in pool.run(2, run_layout, [job], layout)]
    assert "2 blocks compiled" in ranks[0].applied
    assert compare(job, layout, ranks) == []


# --- symmetric memory, as far as CPUs can tell -----------------------------------------------------------


def test_symmetric_memory_is_refused_on_cpus(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"LayoutError: kernels\.tp_overlap: saw symmetric-memory"):
        pool.run(2, run_layout, [make_job("sgd", 4, kernels=SYMMETRIC)], Layout(tp=2, micro_batch=4))


def test_what_torch_does_not_fuse_is_refused(pool: Pool) -> None:
    job, layout = make_job("sgd", 4, kernels=SYMMETRIC), Layout(tp=2, micro_batch=4)
    expected = "torch ran fused_all_gather_matmul and fused_matmul_reduce_scatter unfused"
    with pytest.raises(WorkerError, match=expected):
        pool.run(2, run_unfused, [job], layout, True)


@pytest.mark.parametrize(
    ("layout", "rows", "model"),
    [
        (Layout(dp=2, tp=2, zero=3, micro_batch=2), 7, ODD),
        *also_deep(
            (Layout(tp=2, pp=2, micro_batch=3, recompute="selective"), 12, WHOLE),
            (Layout(tp=4, micro_batch=4), 12, WIDE),
        ),
    ],
    ids=str,
)
def test_torchs_operators_in_test_mode_equal_one_process(
    pool: Pool, layout: Layout, rows: int, model: ModelConfig
) -> None:
    """The same calls and shapes; torch's own plain implementation of them."""
    job = make_job("adamw", rows, model, kernels=SYMMETRIC)
    ranks = [found[0] for found in pool.run(layout.world_size, run_unfused, [job], layout, False)]
    assert compare(job, layout, ranks) == []
    assert any("overlapped by symmetric-memory" in phrase for phrase in ranks[0].applied)


def test_processes_of_different_age_find_each_other() -> None:
    """torch counts the exchanges of a process's life; through C++, as torch calls it."""
    shared = HashStore()
    shared.set_timeout(timedelta(seconds=2))
    inner = [RenumberedStore(shared), RenumberedStore(shared)]
    stores = [PrefixStore("", store) for store in inner]  # C++ in between; the objects must live
    for exchange in range(2):
        numbers = [exchange, 40 + exchange]  # a new process, and one that has been here before
        for rank, number in enumerate(numbers):
            stores[rank].set(f"CUDASymmetricMemory/{number}/{rank}", f"{exchange} of {rank}")
        for rank, number in enumerate(numbers):
            keys = [f"CUDASymmetricMemory/{number}/{peer}" for peer in range(2)]
            assert stores[rank].multi_get(keys) == [f"{exchange} of {peer}".encode() for peer in range(2)]
