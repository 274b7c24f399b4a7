"""Buffers that a pipeline receives into, as torch's stages hold them: as many bytes as the planner says."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import _Action, _add_send_recv

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.message_order import stage_owners, with_messages
from picotron_ray.layout.schedule_rows import PipelineShape
from picotron_ray.layout.schedules import SCHEDULES
from picotron_ray.planner.kept_activations import receive_bytes
from picotron_ray.train.engine import build_engine
from tests.gloo.parallel.pipeline.test_schedules import DEEP
from tests.support.gloo.action_lists import NEIGHBOURS, V_SPLIT, layout_of
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, SEQUENCE, batch, make_job
from tests.support.gloo.parity import check, thinned
from tests.support.gloo.pool import Job, Pool


def received(job: Job, config: JobConfig, layout: Layout) -> list[int]:
    """Bytes of all tensors that this rank's stages receive into or hand over, after each of two steps."""
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(0)
    found = []
    for step in (1, 2):
        engine.forward_backward(batch(config, layout, 0, step))
        (schedule,) = engine._passes.pipeline._runtimes.values()
        infos = [
            info
            for stage in schedule._stages
            for of in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            for info in of
        ]
        storages = {}
        for info in infos:
            if getattr(info, "buffer", None) is not None:
                storage = info.buffer.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        found.append(sum(storages.values()))
    engine.close()
    groups.close()
    return found


LAYOUTS = [
    (Layout(pp=2, schedule="1f1b", micro_batch=1), 10),
    (Layout(pp=2, virtual_stages=2, schedule="zbv", micro_batch=1), 10),
    (Layout(pp=2, schedule="gpipe", micro_batch=1), 10),
    (Layout(pp=3, schedule="1f1b", micro_batch=1), 12),
    *(
        (Layout(pp=2, virtual_stages=2, schedule=name, micro_batch=1), 10)
        for name in ("looped-bfs", "interleaved-1f1b", "interleaved-zero-bubble", "dualpipev")
    ),
    (Layout(pp=4, virtual_stages=2, schedule="interleaved-1f1b", micro_batch=1), 16),
    (Layout(tp=2, pp=2, schedule="1f1b", micro_batch=2), 16),
]


@pytest.mark.parametrize(("layout", "global_batch"), thinned(LAYOUTS, (0, 1)))
def test_buffers_hold_what_the_planner_says(pool: Pool, layout: Layout, global_batch: int) -> None:
    job = make_job("sgd", global_batch, DEEP)
    expected = [receive_bytes(job, layout, rank) for rank in range(layout.pp)]
    one = layout.micro_batch * SEQUENCE * DEEP.hidden_size * 8 // layout.tp
    remote = [abs(stage - other) == 1 for stage in layout.rank_stages(0) for other in layout.rank_stages(1)]
    assert expected[0] < sum(remote) * layout.micro_batches(global_batch) * one, "a buffer for each message"
    for rank, found in enumerate(pool.run(layout.world_size, received, job, layout)):
        of = expected[rank * layout.pp // layout.world_size]
        assert found == [of, of], rank


@pytest.mark.parametrize("rows", [V_SPLIT, NEIGHBOURS], ids=["v-split", "neighbours"])
def test_what_stages_of_one_rank_hand_over_is_freed(pool: Pool, rows: tuple[str, ...]) -> None:
    layout = layout_of(rows, 12)
    job = make_job("sgd", 12, DEEP, rows)
    expected = [receive_bytes(job, layout, rank) for rank in range(layout.pp)]
    for rank, found in enumerate(pool.run(layout.world_size, received, job, layout)):
        assert found == [expected[rank]] * 2


@pytest.mark.parity
@pytest.mark.parametrize("schedule", [name for name, entry in SCHEDULES.items() if entry.rows])
def test_long_steps_equal_one_process(pool: Pool, schedule: str) -> None:
    """A buffer is used again many times."""
    stages = SCHEDULES[schedule].stages_per_rank[0]
    check(pool, Layout(pp=2, virtual_stages=stages, schedule=schedule, micro_batch=1), 12, DEEP)


@pytest.mark.parametrize("schedule", [name for name, entry in SCHEDULES.items() if entry.rows])
def test_messages_are_in_the_order_of_torch(schedule: str) -> None:
    """Of torch's own pass over the same rows."""
    entry = SCHEDULES[schedule]
    assert entry.rows is not None
    for ranks, count in ((2, 4), (3, 6), (4, 12)):
        rows = entry.rows(PipelineShape(ranks, entry.stages_per_rank[0], count))
        owner = stage_owners(rows)
        plain = {rank: [_Action.from_str(str(each)) for each in row] for rank, row in enumerate(rows)}
        of_torch = _add_send_recv(plain, owner.__getitem__, len(owner))
        ours = {rank: list(map(str, row)) for rank, row in enumerate(with_messages(rows, early=False))}
        assert ours == {rank: list(map(str, row)) for rank, row in of_torch.items()}
