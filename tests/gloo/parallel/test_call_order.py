"""The order of calls on every communicator, messages included, which ``check`` of every layout looks at too.

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
SENT = Call("tp", (0, 1), "send", "[[4]]", True, peer=1)
TAKEN = SENT._replace(kind="recv", peer=0)
ANSWERED, ANSWER = SENT._replace(kind="recv"), SENT._replace(peer=0)
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
    assert order_problems([[SUM, SENT, GATHERED], [SUM, TAKEN, GATHERED]]) == []
    assert order_problems([[SENT, SUM], [SUM]])[0] == "tp [0, 1]: rank 0 begins with send"
    assert order_problems([[SUM], []]) == ["tp [0, 1]: only ranks [0] use it"]
    assert order_problems([[SUM, GATHERED], [GATHERED, SUM]]) == ["tp [0, 1]: ranks call other collectives"]
    uneven = [SUM._replace(kind="all_to_all_single", sizes=f"[[{rank}]]") for rank in range(2)]
    assert order_problems([[one] for one in uneven]) == []


def test_what_is_wrong_with_an_order_of_messages() -> None:
    def problem(first: list[Call], second: list[Call]) -> list[str]:
        return order_problems([[SUM, *first], [SUM, *second]])

    assert problem([SENT, ANSWERED], [TAKEN, ANSWER]) == []
    sent, answer = "0 to 1 [[4]] after 1 collective", "1 to 0 [[4]] after 1 collective"
    assert problem([SENT, ANSWERED], [ANSWER, TAKEN]) == [
        f"tp [0, 1]: rank 0 posts {sent} where rank 1 posts {answer}"
    ]
    both = [[one._replace(batch=2) for one in of] for of in ([SENT, ANSWERED], [ANSWER, TAKEN])]
    assert problem(*both) == [], "those of a batch travel together"
    assert problem([SENT], []) == [f"tp [0, 1]: rank 0 posts {sent} where rank 1 posts nothing"]
    assert problem([], [TAKEN]) == [f"tp [0, 1]: rank 1 posts {sent} where rank 0 posts nothing"]
    longer = TAKEN._replace(sizes="[[5]]")
    assert problem([SENT], [longer]) == [
        f"tp [0, 1]: rank 0 posts {sent} where rank 1 posts 0 to 1 [[5]] after 1 collective"
    ]
    moved = sent.replace("1 collective", "2 collectives")
    assert problem([SENT, GATHERED], [GATHERED, TAKEN]) == [
        f"tp [0, 1]: rank 0 posts {sent} where rank 1 posts {moved}"
    ]
    assert order_problems({0: [SUM, SENT]}) == [], "what the other rank posts is not known"
