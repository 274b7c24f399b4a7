"""Bytes of axes by hand, and the cost model moving as many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.comm_cost import tensor_passes
from picotron_ray.planner.model_sizes import parameter_count, sizes_of
from picotron_ray.planner.sent_bytes import sent_bytes
from picotron_ray.planner.software_profile import OURS
from tests.support.runs.by_hand import UNIT

HIDDEN, TOKENS, LAYERS = 64, 32, 4


def job_of(precision: str = "bf16", rows: int = 4, **keys: object) -> JobConfig:
    model = {
        "vocab_size": 512, "hidden_size": HIDDEN, "intermediate_size": 128, "layers": LAYERS, "heads": 4
    } | keys  # fmt: skip
    data = {"sequence_length": TOKENS, "global_batch": rows}
    return parse_job({"model": model, "data": data, "precision": precision, "cluster": {"device": "cpu"}})


def test_bytes_by_hand() -> None:
    """Tensor parallelism: eight collectives a block, two at each end, all in 16 bits; ZeRO-1 gathers weights
    in 16 bits and scatters gradients in 32 once, HSDP adds an all-reduce of a shard.
    """
    stream = TOKENS * HIDDEN // 2
    found = sent_bytes(job_of(), Layout(tp=2), 0)
    assert found["tp"] == 4 * stream * (LAYERS * 8 + 2 * 2) * 2
    size = 4.0 * parameter_count(job_of().model)
    assert sent_bytes(job_of(), Layout(dp=4), 0)["replicas"] == 2 * size * 3 / 4
    assert sent_bytes(job_of(), Layout(dp=4, zero=1), 0)["replicas"] == 1.5 * size * 3 / 4
    copies = sent_bytes(job_of(), Layout(dp=4, zero=2, replicate=2), 0)["replicas"]
    assert copies == 1.5 * size / 2 + 2 * size / 2 / 2
    hops = [sent_bytes(job_of(), Layout(pp=4), rank)["pp"] for rank in range(4)]
    assert hops == [4 * TOKENS * HIDDEN * 2 * way for way in (1, 2, 2, 1)]


def test_ends_of_a_tied_embedding_send_each_other_its_gradient() -> None:
    """Once a step, in 32 bits, as much of it as ZeRO and tensor parallelism leave a rank."""

    def more(layout: Layout, **keys: object) -> list[float]:
        tied, apart = (job_of(rows=8, tie_embeddings=tie, **keys) for tie in (True, False))
        ranks = range(layout.pp)
        return [sent_bytes(tied, layout, at)["pp"] - sent_bytes(apart, layout, at)["pp"] for at in ranks]

    table = 512 * HIDDEN * 4
    assert more(Layout(pp=4)) == [table, 0, 0, table]
    assert more(Layout(pp=2, dp=2)) == [table, table]
    assert more(Layout(pp=2, dp=2, zero=1)) == [table / 2, table / 2]
    assert more(Layout(pp=2, dp=4, zero=2, replicate=2, tp=2)) == [table / 4, table / 4]
    assert more(Layout(pp=2, virtual_stages=2, schedule="zbv")) == [0, 0]  # both ends on one rank
    assert more(Layout(pp=2), freeze=["*embed*"]) == [0, 0]


def test_dense_blocks_before_mixtures_send_nothing_to_experts() -> None:
    """Of four blocks three have experts: each sends two rows a token there and back, forward and backward;
    one of the three does so again for the backward pass where two blocks are recomputed.
    """
    model = {
        "family": "deepseek",
        "kv_heads": 4,
        "mla": {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
        "moe": {"experts": 4, "top_k": 2, "intermediate_size": 32, "first_dense_layers": 1},
    }
    job = job_of(**model)
    rows = TOKENS * 2 * HIDDEN * 2 / 2  # 16 bits, half of them to the other rank
    found = [
        sent_bytes(job, Layout(dp=2, ep=2, recompute=policy), 0)["replicas"]
        for policy in ("none", "blocks-1", "blocks-2")
    ]
    assert found[0] == found[1]
    assert found[2] - found[1] == 2 * (2 * rows)  # two micro-batches
    shared = sent_bytes(job, Layout(dp=2), 0)["replicas"]
    gradients = sizes_of(job.model).experts * 3 * 4
    assert found[0] == shared - gradients + 2 * (3 * 4 * rows)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_cost_model_moves_what_blocks_send(precision: str, recompute: str) -> None:
    job, layout = job_of(precision), Layout(tp=2, recompute=recompute)
    profile = replace(UNIT, link_bytes_s=1.0, latency_s=0.0, software=OURS)
    ends = 4 * 4 * TOKENS * HIDDEN // 2 * (2 if precision == "bf16" else 4)
    passes = tensor_passes(job, layout, profile, ())
    moved = 4 * LAYERS * (passes.both + (passes.again if recompute == "full" else 0.0))
    assert sent_bytes(job, layout, 0)["tp"] - ends == pytest.approx(moved, rel=0.08)
