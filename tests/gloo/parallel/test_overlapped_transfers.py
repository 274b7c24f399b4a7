"""What travels does so while something is computed: the order in which ranks do both, read from real steps.

Pipelines are in test_schedules, the buckets of replicated gradients in test_data_parallel.
"""

from __future__ import annotations

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from tests.support.gloo.parallel_jobs.matrix_jobs import MIXTURE, MODEL, make_job
from tests.support.gloo.parallel_jobs.overlap_jobs import expert_log, ring_log
from tests.support.gloo.pool import Pool

ONE_BLOCK = {"layers": 1}


def test_keys_travel_round_the_ring_while_parts_are_computed(pool: Pool) -> None:
    model = ModelConfig(**{**MODEL.model_dump(), **ONE_BLOCK})
    log = pool.run(2, ring_log, make_job("sgd", 12, model), Layout(cp=2, micro_batch=12))[0]
    step = log[: len(log) // 3]  # a step is evaluated, too: what comes first is the first forward pass
    assert step[:4] == ["send", "forward", "wait", "forward"]
    back = step[step.index("backward") - 1 :]
    # keys set off, a part is computed, keys are there; gradients set off, the next part is computed
    assert back[:6] == ["send", "backward", "wait", "send", "backward", "wait"]


def test_tokens_travel_to_experts_behind_the_shared_one(pool: Pool) -> None:
    model = ModelConfig(**{**MIXTURE.model_dump(), **ONE_BLOCK})
    log = pool.run(2, expert_log, make_job("sgd", 12, model), Layout(dp=2, ep=2, micro_batch=6))[0]
    assert log[:5] == ["start", "shared", "finish", "start", "finish"]
    assert log[5:11] == ["start", "down", "finish", "start", "inner", "finish"]
