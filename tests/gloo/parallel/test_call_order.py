"""The order of calls on every communicator, which ``check`` of every layout looks at too.

Under NCCL the first operation of a communicator must be one of all its ranks.
"""

from __future__ import annotations

import pytest

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.dry_run.call_order import Call, order_problems
from tests.support.gloo.parallel_jobs.matrix_jobs import MODEL, make_job, run_layout
from tests.support.gloo.pool import Pool

TIED = ModelConfig(**{**MODEL.model_dump(), "tie_embeddings": True})
SUM = Call("tp", (0, 1), "all_reduce", "[[1]]", False)
SENT = Call("tp", (0, 1), "send", "[[4]]", True)
GATHERED = SUM._replace(kind="all_gather")


@pytest.mark.parametrize(("layout", "model"), [(Layout(dp=2, pp=3, micro_batch=2), TIED)], ids=["tied"])
def test_the_ends_of_a_pipeline_do_not_meet_first(pool: Pool, layout: Layout, model: ModelConfig) -> None:
    """Gradients of a tied embedding go between the first and the last of three stages."""
    job = make_job("sgd", 12, model)
    warm, cold = (
        [results[0].calls for results in pool.run(layout.world_size, run_layout, [job], layout, plant)]
        for plant in ("", "cold")
    )
    assert order_problems(warm) == []
    assert {one.axis for one in warm[0]} == {"", "pp", "data"}
    assert any(line.startswith("pp ") and "begins with" in line for line in order_problems(cold))


def test_what_is_wrong_with_an_order() -> None:
    assert order_problems([[SUM, SENT, GATHERED], [SUM, GATHERED]]) == []
    assert order_problems([[SENT, SUM], [SUM]]) == ["tp [0, 1]: rank 0 begins with send"]
    assert order_problems([[SUM], []]) == ["tp [0, 1]: only ranks [0] use it"]
    assert order_problems([[SUM, GATHERED], [GATHERED, SUM]]) == ["tp [0, 1]: ranks call other collectives"]
    uneven = [SUM._replace(kind="all_to_all_single", sizes=f"[[{rank}]]") for rank in range(2)]
    assert order_problems([[one] for one in uneven]) == []
