"""Pipeline schedules given as lists of actions, against one process in fp64."""

from __future__ import annotations

import random
from itertools import product

import pytest
from torch.distributed.pipelining.schedules import _Action, _add_send_recv

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedule_actions import action_list
from picotron_ray.parallel import mesh
from picotron_ray.train.engine import build_engine
from tests.gloo.parallel.pipeline.test_schedules import DEEP
from tests.support.gloo.action_lists import NEIGHBOURS, ONE_F_ONE_B, V_SPLIT, Rows, layout_of, made
from tests.support.gloo.faults import replace
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, batch, make_job, run_layout
from tests.support.gloo.parity import check, compare, primaries, thinned
from tests.support.gloo.pool import Job, Pool, WorkerError

SCATTERED = made(((0, 5), (3, 1), (2, 4)), 3, split=False)
FOUR_EACH = made(((0, 3, 4, 5), (1, 2, 6, 7)), 3, split=True)

# fmt: off
LISTS = [
    ("1f1b", ONE_F_ONE_B, 10, {"tp": 2}),
    ("v-split", V_SPLIT, 12, {"dp": 2, "zero": 1}),
    ("neighbours", NEIGHBOURS, 7, {}),
    ("scattered", SCATTERED, 12, {}),
    ("four-each", FOUR_EACH, 12, {"dp": 2, "zero": 2}),
    ("1f1b-zero3", ONE_F_ONE_B, 14, {"dp": 2, "zero": 3, "recompute": "full"}),
    ("neighbours-tp", NEIGHBOURS, 12, {"tp": 2, "dp": 2}),
    ("scattered-cp", SCATTERED, 12, {"cp": 2}),
]
# fmt: on


@pytest.mark.parametrize(
    ("name", "rows", "global_batch", "degrees"), thinned(LISTS, (0, 2, 4), lambda name, *_: name)
)
def test_list_equals_one_process(
    pool: Pool, name: str, rows: Rows, global_batch: int, degrees: dict[str, int]
) -> None:
    layout = layout_of(rows, global_batch, **degrees)
    ranks = check(pool, layout, global_batch, DEEP, rows)
    primaries(layout, ranks, DEEP)
    assert f"of {layout.stages}, custom" in ranks[0].applied[0]


def test_micro_batches_that_change_places_are_noticed(pool: Pool) -> None:
    layout, job = layout_of(ONE_F_ONE_B, 12), make_job("sgd", 12, DEEP, ONE_F_ONE_B)
    per_rank = pool.run(layout.world_size, run_layout, [job], layout, "actions")
    assert any("gradient" in line for line in compare(job, layout, [results[0] for results in per_rank]))


def without_refusal(job: Job, configs: list[JobConfig], layout: Layout) -> list:
    undo = replace(mesh, "check_schedule", lambda layout, schedule: None)
    try:
        return run_layout(job, configs, layout)
    finally:
        undo()


def test_why_a_split_backward_pass_refuses_zero_3(pool: Pool) -> None:
    """As torch's own schedules that split it (test_schedules)."""
    layout, job = layout_of(V_SPLIT, 12, dp=2, zero=3), make_job("sgd", 12, DEEP, V_SPLIT)
    with pytest.raises(WorkerError, match=r"layout\.zero: saw 3 with schedule custom"):
        pool.run(layout.world_size, run_layout, [job], layout)
    per_rank = pool.run(layout.world_size, without_refusal, [job], layout)
    wrong = compare(job, layout, [results[0] for results in per_rank])
    assert any("gradient" in line for line in wrong), "it is right now: allow it"


def test_a_list_of_another_layout_is_refused(pool: Pool) -> None:
    layout, job = layout_of(V_SPLIT, 12), make_job("sgd", 12, DEEP, NEIGHBOURS)
    with pytest.raises(WorkerError, match=r"saw stages \(\(0, 1\), \(2, 3\)\) on the ranks"):
        pool.run(layout.world_size, run_layout, [job], layout)


def lowered(job: Job, config: JobConfig, layout: Layout) -> tuple[Rows, Rows]:
    """Rows of computations of all ranks, and with the messages that torch adds; after a step."""
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(0)
    engine.forward_backward(batch(config, layout, 0, 1))
    (schedule,) = engine._passes.pipeline._runtimes.values()
    orders = schedule.pipeline_order, schedule.pipeline_order_with_comms
    rows = [tuple(" ".join(str(a) for a in order[r] if a) for r in range(layout.pp)) for order in orders]
    engine.close()
    groups.close()
    return rows[0], rows[1]


def shuffled(pick: random.Random, placement: tuple[tuple[int, ...], ...], micro_batches: int) -> Rows:
    """Every rank's forward and backward passes in an order that is right for the rank alone."""
    rows = []
    for stages in placement:
        row: list[str] = []
        for stage, micro_batch in product(stages, range(micro_batches)):
            first, second = sorted((pick.randint(0, len(row)), pick.randint(0, len(row))))
            row.insert(second, f"{stage}B{micro_batch}")
            row.insert(first, f"{stage}F{micro_batch}")
        rows.append(" ".join(row))
    return tuple(rows)


def problem(rows: Rows) -> str:
    try:
        action_list(rows)
    except ConfigError as error:
        return str(error)
    return ""


def test_what_waits_for_ever_is_what_torch_cannot_lower() -> None:
    """Random orders: ours finds the deadlocks that torch's own pass over the list finds, and no other."""
    pick, refused = random.Random(0), []
    placements = (((0,), (1,)), ((0, 3), (1, 2)), ((0, 1), (2, 3)), ((2,), (0,), (1,)))
    for placement in placements * 100:
        rows = shuffled(pick, placement, 2)
        actions = {rank: [_Action.from_str(text) for text in row.split()] for rank, row in enumerate(rows)}
        stages = sum(map(len, placement))
        owner = {stage: rank for rank, held in enumerate(placement) for stage in held}
        try:
            _add_send_recv(actions, owner.__getitem__, stages)
            possible = True
        except AssertionError:
            possible = False
        assert ("wait for each other" in problem(rows)) == (not possible), rows
        refused.append(not possible)
    assert 50 < sum(refused) < 350, sum(refused)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zbv"])
def test_a_list_that_spells_out_a_schedule_of_torch_runs_as_that(pool: Pool, schedule: str) -> None:
    """The way in is private to torch: messages must come out as torch's own schedules have them."""
    layout = Layout(pp=2, virtual_stages=2, schedule=schedule, micro_batch=3)
    (rows, messages), *_ = pool.run(2, lowered, make_job("sgd", 12, DEEP), layout)
    assert "RECV_B" in messages[0]
    again, listed = pool.run(2, lowered, make_job("sgd", 12, DEEP, rows), layout_of(rows, 12))[0]
    assert again == rows
    assert listed == messages
