"""Seconds and bytes by hand of models of your own, ends and experts that a pipeline cuts, and buckets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from picotron_ray.config.schema.custom_model import BuiltModel
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputedBlocks
from picotron_ray.planner import cost as cost_module
from picotron_ray.planner.cost import block_again, step_cost
from picotron_ray.planner.kept_activations import STATE_BYTES
from picotron_ray.planner.memory import memory_estimate, rank_memory
from picotron_ray.planner.memory_moments import rank_moments
from picotron_ray.planner.model_sizes import sizes_of, stage_bounds, stage_flops_per_token, stage_parameters
from picotron_ray.planner.recompute_search import cheapest_recompute
from tests.support.runs.by_hand import UNIT
from tests.support.runs.by_hand import job_by_hand as job

BUILT = BuiltModel(
    parameters=(("embed", (300, 8)), ("a.0.up", (16, 8)), ("a.0.norm", (8,)), ("a.1.up", (16, 8)),
                ("a.1.norm", (8,)), ("head.weight", (300, 8))),
    blocks=("a.0", "a.1"),
    pipeline=("embed", "a.0", "a.1", "head"),
    tensor={},
    cuts={"a.0.up": 0, "a.1.up": 0},
    tensor_degrees=(2,),
    hidden_size=8,
    activations=100,
)  # fmt: skip


def own(**facts: Any) -> JobConfig:
    """Two blocks of 16·8 parameters that tensor parallelism cuts and 8 that it leaves whole."""
    plain = job()
    built = BuiltModel.model_validate({**BUILT.model_dump(), **facts})
    update = {"builder": "mine:build", "built": built}
    return plain.model_copy(update={"model": plain.model.model_copy(update=update)})


def test_blocks_are_counted_as_they_were_found() -> None:
    one = sizes_of(own(blocks=("a.0",)).model)
    assert (one.layers, one.block, one.whole_block, one.matrices) == (1, 136, 8, 128)
    assert (one.embed, one.head) == (2400, 136 + 2400), "the other one follows in the chain"
    none = sizes_of(own(blocks=(), pipeline=()).model)
    assert (none.layers, none.block, none.matrices) == (1, 0, 0)


def test_what_tensor_parallelism_leaves_whole_is_computed_by_every_rank() -> None:
    """6·136 + 12·8·6 FLOPs a token and block, 8 of whose 136 parameters are whole, as is the head."""
    model, block, head = own().model, 6 * 136 + 12 * 8 * 6, 6 * 300 * 8
    share = 8 / 136
    assert stage_flops_per_token(model, 6, 1, 0) == 2 * block + head
    cut = 2 * block * (share + (1 - share) / 2)
    assert stage_flops_per_token(model, 6, 1, 0, tp=2) == pytest.approx(cut + head)
    assert stage_flops_per_token(model, 6, 2, 0, tp=2) == pytest.approx(cut / 2)
    assert [stage_parameters(model, 1, 0, tp) for tp in (1, 2)] == [5072, 5072 - 128]
    bare = own(cuts={name: 0 for name, _ in BUILT.parameters}).model
    assert stage_flops_per_token(bare, 6, 2, 0, tp=2) == block / 2


def test_a_block_again() -> None:
    """Two all-reduces of 12 tokens, 200 elements a token and 8 of 136 parameters that are not cut."""
    found = block_again(own(), Layout(tp=2, micro_batch=2), replace(UNIT, memory_bytes_s=50.0))
    selective = 12 * 200 * 4 / 50 + 2 * (192 / 1e2 + 5) + 7 / 3
    share = 8 / 136 + (1 - 8 / 136) / 2
    full = selective + 1.1 * 12 * (2 * 136 + 4 * 8 * 6) * share / 1e3
    assert found == pytest.approx(
        {"kept": 0.0, "int8": 40 * 12 * 100 / 50, "selective": selective, "full": full}
    )


@pytest.mark.parametrize(
    ("config", "layout", "nodes", "seconds"),
    [
        (own(), Layout(pp=2, tp=2, micro_batch=2), (), 384 / 1e2 + 5),  # rows are whole
        (own(), Layout(pp=2, micro_batch=2), (2,), 384 / 1e2 + 5),
        (own(), Layout(pp=2, micro_batch=2), (1, 1), 384 / 1e1 + 5),
        (job(), Layout(pp=2, tp=2, micro_batch=2), (4,), 192 / 1e2 + 5),
    ],
    ids=str,
)
def test_a_hop_there_and_back(
    config: JobConfig, layout: Layout, nodes: tuple[int, ...], seconds: float
) -> None:
    assert step_cost(config, layout, UNIT, nodes).pipeline_s == pytest.approx(9 * 2 * seconds)


def test_zero_gathers_a_block_of_which_a_part_is_whole() -> None:
    """Of each 8 + 128 / 2: two blocks' weights, and gradients of one."""
    layout = Layout(dp=2, tp=2, zero=3)
    found = rank_moments(own(), layout, 0, 4, 0.0, 0.0).gathered
    ends = found.loss  # weights of head and embedding
    assert found.head == ends + 72 * 4
    assert found.backward - ends - ends / 2 == 3 * 72 * 4  # and the head's gradient, half of both
    assert found.reduced - found.backward == 72 * 4


def test_gradients_go_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1000 bytes: 13.2 for half of 26400, between two copies; ZeRO-1 gathers and reduces once per step."""
    monkeypatch.setattr(cost_module, "BUCKET_BYTES", 1e3)
    found = step_cost(job(), Layout(dp=4, zero=1, replicate=2, micro_batch=2), UNIT).data_s
    copies, shards = 13200 / 2 / 1e2 + 13.2 * 5, 26400 / 2 / 1e2 + 6 * 5
    assert found == pytest.approx(2 * copies + 2 * shards)


def test_a_pipeline_reduces_once_per_step() -> None:
    """The first stage's 3·448 + 2400 values, in 4 pieces: gathered and reduced."""
    found = step_cost(job(), Layout(dp=2, pp=2, zero=2, micro_batch=2), UNIT).data_s
    assert found == pytest.approx(2 * (3744 * 4 / 2 / 1e2 + 4 * 5))


def test_experts_that_no_token_goes_through_weigh_nothing() -> None:
    """Blocks of 1008 active parameters before a head of 2056: three and one; 2544 would make two and two."""
    model = {"vocab_size": 257, "moe": {"experts": 4, "top_k": 2, "intermediate_size": 16}}
    assert stage_bounds(job(model).model, 2) == ((0, 3), (3, 4))


def test_both_ends_on_one_rank_hold_a_tie_once() -> None:
    """Two blocks, embedding, norm and the head's copy, which has no moments; all halved by ZeRO."""
    layout = Layout(dp=2, pp=2, zero=1, schedule="zbv", virtual_stages=2)
    found = rank_memory(job({"tie_embeddings": True}), layout, 0, RecomputedBlocks(0, 0, 2))
    held = 2 * 448 + 2400 + 8
    assert found.state_bytes == 4 * (2 * (held + 2400) + 2 * held) / 2


def test_one_moment_of_a_matrix_that_is_cut() -> None:
    found = memory_estimate(job(optimizer={"name": "muon"}), Layout(tp=2))
    assert found.state_bytes == 4 * (4 * 6600 - 4 * 432) / 2


def test_state_is_wide_in_every_precision() -> None:
    found = {
        name: memory_estimate(job().model_copy(update={"precision": name}), Layout()).state_bytes
        for name in STATE_BYTES
    }
    wide = dict.fromkeys(("fp32", "tf32", "bf16", "fp16", "fp8", "auto"), 6600 * 16)
    assert found == {"fp64": 6600 * 32, **wide}
    for optimizer, values in (("adamw", 4), ("sgd", 2), ("muon", 4)):
        state = memory_estimate(job(optimizer={"name": optimizer}), Layout()).state_bytes
        assert state == 4 * (values * 6600 - (4 * 432 if optimizer == "muon" else 0))


def test_a_budget_may_be_filled() -> None:
    layout = Layout(micro_batch=2)
    named = job(layout={"recompute": "none"})
    needs = memory_estimate(named, layout).total_bytes
    assert cheapest_recompute(named, layout, needs) == layout
    assert cheapest_recompute(named, layout, needs - 1) is None
