"""Planner: all layouts that fit are offered, none that does not, ranked by the stated cost."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picotron_ray.config.load import load_job, parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.optimizer import OptimizerConfig
from picotron_ray.config.schema.service import ClusterConfig
from picotron_ray.config.validation.layout import Degrees, fitting_degrees, layout_problems, nearest_layouts
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import is_selective
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.datasheet import GPU, profile_of
from picotron_ray.planner.device_profile import CPU, DeviceProfile
from picotron_ray.planner.kept_activations import block_bytes
from picotron_ray.planner.memory import memory_estimate, rank_needs, rank_state
from picotron_ray.planner.model_sizes import (
    blocks_again,
    flops_per_token,
    parameter_count,
    remember_latest,
    stage_flops_per_token,
    stage_parameters,
)
from picotron_ray.planner.recompute_search import cheapest_recompute
from picotron_ray.planner.search import choose_layout, layouts
from tests.support.runs.by_hand import BY_HAND, UNIT


def job(*overrides: str, recipe: str = "quickstart") -> JobConfig:
    return load_job(recipe, ["cluster.max_workers=64", "chaos=[]", *overrides])


# --- counts ------------------------------------------------------------------------------------------


def test_parameter_count_of_a_known_model() -> None:
    """Llama-3-8B: the published 8,030,261,248 parameters."""
    llama = job(
        "model={vocab_size: 128256, hidden_size: 4096, intermediate_size: 14336,"
        " layers: 32, heads: 32, kv_heads: 8}"
    ).model
    assert parameter_count(llama) == 8_030_261_248
    # 6N + 12Lhs at s = 8192, by hand.
    assert flops_per_token(llama, 8192) == 6 * 8_030_261_248 + 12 * 32 * 4096 * 8192


def test_tied_embedding_counts_once() -> None:
    free, tied = job().model, job("model.tie_embeddings=true").model
    assert parameter_count(free) - parameter_count(tied) == free.vocab_size * free.hidden_size


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_add_up_to_the_model(pp: int) -> None:
    model = job().model
    assert sum(stage_parameters(model, pp, stage) for stage in range(pp)) == parameter_count(model)
    whole = stage_flops_per_token(model, 128, 1, 0)
    assert sum(stage_flops_per_token(model, 128, pp, stage) for stage in range(pp)) == whole


# --- which layouts -----------------------------------------------------------------------------------


def test_all_fitting_degrees_are_offered() -> None:
    """Against a brute-force search over every degree up to 8."""
    config = job("model.layers=6", "model.heads=8", "model.kv_heads=4", "data.global_batch=6")
    expected = {
        (dp, tp, pp)
        for dp in range(1, 9)
        for tp in range(1, 9)
        for pp in range(1, 9)
        if dp * tp * pp <= 8 and not layout_problems(config, Layout(dp=dp, tp=tp, pp=pp))
    }
    assert {(x.dp, x.tp, x.pp) for x in layouts(config, 8)} == expected
    assert {(1, 4, 2), (6, 1, 1), (2, 1, 3)} <= expected
    assert not expected & {(7, 1, 1), (1, 3, 1), (1, 1, 7)}


@given(
    workers=st.integers(1, 8),
    batch=st.integers(1, 40),
    layers=st.integers(1, 8),
    kv_heads=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)
@settings(max_examples=40, deadline=None)
def test_whatever_is_offered_fits(
    workers: int, batch: int, layers: int, kv_heads: int, schedule: str
) -> None:
    config = parse_job(
        {
            "model": {"layers": layers, "kv_heads": kv_heads, "heads": 4},
            "data": {"global_batch": batch},
            "layout": {"schedule": schedule},
        }
    )
    offered = layouts(config, workers)
    assert offered, "one worker always fits"
    for layout in offered:
        assert layout.world_size <= workers
        assert not layout_problems(config, layout)
        micro_batches = layout.micro_batches(batch)
        assert micro_batches * layout.micro_batch * layout.dp >= batch
        if layout.pp > 1 and schedule == "1f1b":
            assert micro_batches >= layout.pp
    assert len({(x.dp, x.tp, x.pp, x.zero) for x in offered}) == len(offered)


def test_fixed_degrees_are_kept() -> None:
    config = job("layout.tp=2", "layout.zero=3", "layout.micro_batch=4", "layout.schedule=gpipe")
    for layout in layouts(config, 8):
        assert (layout.tp, layout.zero, layout.micro_batch, layout.schedule) == (2, 3, 4, "gpipe")
    assert choose_layout(config, 5).layout.dp == 2  # the fifth worker stays idle


def test_layouts_of_recorded_steps_copy_the_model() -> None:
    """What communicates within the passes cannot be recorded (`kernels.cuda_graphs`)."""
    offered = layouts(job("kernels.cuda_graphs=true", "layout.cp=auto"), 8)
    assert {(x.tp, x.pp, x.cp, x.zero) for x in offered} == {(1, 1, 1, 0)}
    assert {x.dp for x in offered} >= {1, 2, 4, 8}


def test_context_parallel_only_where_asked() -> None:
    assert {layout.cp for layout in layouts(job(), 8)} == {1}
    offered = layouts(job("layout.cp=auto", "layout.context=all-gather", "data.sequence_length=24"), 8)
    assert {layout.cp for layout in offered} == {1, 2, 3, 4, 6}  # 2 x cp chunks of 24 tokens
    assert {layout.context for layout in offered} == {"all-gather"}
    assert all(24 // layout.cp % layout.tp == 0 for layout in offered)
    assert {layout.zero for layout in offered if layout.replicas > 1} == {0, 1, 2, 3}
    assert {layout.cp for layout in layouts(job("layout.cp=2"), 8)} == {2}
    with pytest.raises(LayoutError, match="expected at least 2 for cp=2"):
        choose_layout(job("layout.cp=2"), 1)


def test_context_parallel_by_hand() -> None:
    """Half the tokens per rank; keys and values of the other half pass by, and their gradients.

    Or half of all heads change places, twice forward and twice backward.
    """
    config = job("layout.cp=2", "precision=bf16", "data.global_batch=8")
    model, profile = (
        config.model,
        DeviceProfile(flops=1e12, memory_bytes=1e12, link_bytes_s=1e9, latency_s=0.0),
    )
    whole = step_cost(config, Layout(micro_batch=8), profile)
    halves = step_cost(config, Layout(cp=2, micro_batch=8), profile)
    assert halves.compute_s == pytest.approx(whole.compute_s / 2)
    tokens, width = 8 * config.data.sequence_length // 2, 2 * model.kv_heads * model.hidden_size / model.heads
    moved = tokens * width * (2 + 2 + 2) * model.layers  # keys twice, their gradients once, in bf16
    assert halves.context_s == pytest.approx(moved / 1e9)
    exchanged = step_cost(config, Layout(cp=2, micro_batch=8, context="ulysses"), profile)
    of_token = 2 * model.hidden_size + width  # queries and results, keys and values
    assert exchanged.context_s == pytest.approx(2 * tokens * of_token / 2 * 2 * model.layers / 1e9)
    assert halves.data_s == step_cost(config, Layout(dp=2, micro_batch=8), profile).data_s
    cut = step_cost(config, Layout(cp=2, tp=2, micro_batch=8), profile)
    assert cut.context_s == pytest.approx(halves.context_s / 2)
    kept = [block_bytes(config, Layout(cp=cp), 1).kept for cp in (1, 2)]
    copied = config.data.sequence_length // 2 * model.hidden_size * 2  # results of attention, once more
    assert kept[1] == pytest.approx(kept[0] / 2 + copied)


def test_long_rows_that_fit_no_worker_are_shared() -> None:
    small = DeviceProfile(flops=1e12, memory_bytes=6e8, link_bytes_s=1e9, latency_s=0.0)
    config = job("layout.cp=auto", "layout.tp=1", "data.sequence_length=65536", "data.global_batch=1")
    with pytest.raises(LayoutError, match="saw room for"):
        choose_layout(config, 1, small)
    assert choose_layout(config, 8, small).layout.cp > 1


def test_tied_embeddings_have_the_pipelines_that_others_have() -> None:
    tied, free = (layouts(job(f"model.tie_embeddings={value}"), 8) for value in ("true", "false"))
    assert set(tied) == set(free)
    assert {layout.pp for layout in tied} > {1}


@pytest.mark.parametrize("tp", [1, 2])
def test_the_heads_stage_holds_a_copy_of_a_tied_embedding(tp: int) -> None:
    """As many parameters as without the tie; on one rank with the embedding it has no moments."""
    tied, free = (job(f"model.tie_embeddings={value}", "model.layers=4") for value in ("true", "false"))
    layout = Layout(tp=tp, pp=2, micro_batch=2)
    table = free.model.vocab_size * free.model.hidden_size / tp
    for stage in range(2):
        assert stage_parameters(tied.model, 2, stage, tp) == stage_parameters(free.model, 2, stage, tp)
    both = replace(layout, schedule="zbv", virtual_stages=2)
    for where, less in ((layout, 0), (both, 2 * 4 * table), (replace(layout, pp=1), 4 * 4 * table)):
        states = [memory_estimate(config, where).state_bytes for config in (free, tied)]
        assert states[0] - states[1] == pytest.approx(less)


def test_summing_over_both_ends_costs_time_where_they_lie_apart() -> None:
    tied, free = (job(f"model.tie_embeddings={value}", "model.layers=4") for value in ("true", "false"))
    v = Layout(pp=2, schedule="zbv", virtual_stages=2, micro_batch=2)
    for layout, more in ((Layout(pp=2, micro_batch=2), True), (v, False), (Layout(dp=2), False)):
        seconds = [step_cost(config, layout, CPU).data_s for config in (free, tied)]
        assert (seconds[1] > seconds[0]) is more, layout


# --- the choice --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["quickstart", "tiny"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_cpu_prefers_plain_data_parallelism(recipe: str, workers: int) -> None:
    """On a laptop every worker given is used, a world of three included, and nothing is sharded."""
    choice = choose_layout(job(recipe=recipe), workers)
    assert (choice.layout.dp, choice.layout.world_size, choice.layout.zero) == (workers, workers, 0)
    assert str(choice.layout) in choice.reason


def test_the_best_may_leave_workers_idle() -> None:
    """Batch 4 on 5 workers: dp=5 is impossible, tp=5 does not divide; 4 replicas are best."""
    choice = choose_layout(job("data.global_batch=4", "model.layers=3"), 5)
    assert choice.layout.dp == 4
    assert "1 idle" in choice.reason


def test_choice_is_the_cheapest_and_repeatable() -> None:
    config = job()
    ranked = layouts(config, 8)
    costs = [step_cost(config, layout, CPU).total_s for layout in ranked]
    assert costs == sorted(costs)
    assert choose_layout(config, 8) == choose_layout(config, 8)
    assert choose_layout(config, 8).layout == ranked[0]
    assert choose_layout(config, 8).cost_s == costs[0]


def test_memory_forces_sharding_then_refuses() -> None:
    """A device that cannot hold the replicated state gets a sharded one; a smaller one is refused by name."""
    config = job("layout.tp=1", "layout.pp=1", "layout.micro_batch=1", "layout.recompute=none")
    replicated = memory_estimate(config, Layout(dp=4, micro_batch=1)).total_bytes
    sharded = memory_estimate(config, Layout(dp=4, zero=3, micro_batch=1)).total_bytes
    assert sharded < replicated
    tight = dataclasses.replace(CPU, memory_bytes=(replicated + sharded) / 2 / 0.9)
    assert choose_layout(config, 4, tight).layout.zero > 0
    with pytest.raises(
        LayoutError, match=r"saw room for 9e-05 GB per worker, expected at least .* GB"
    ) as raised:
        choose_layout(config, 4, dataclasses.replace(CPU, memory_bytes=1e5))
    needed = float(str(raised.value).split("at least ")[1].split(" GB")[0]) * 1e9
    assert needed == pytest.approx(sharded, rel=0.01)


def test_too_few_workers_says_how_many() -> None:
    with pytest.raises(LayoutError, match=r"saw 3 workers, expected at least 4 for dp=2 tp=2"):
        choose_layout(job("layout.dp=2", "layout.tp=2"), 3)
    with pytest.raises(LayoutError, match="saw no worker"):
        choose_layout(job(), 0)


def test_no_split_of_the_batch_is_named() -> None:
    """Every degree is allowed on its own but together they leave too few micro-batches."""
    config = job("layout.dp=4", "layout.pp=2", "data.global_batch=8", "layout.micro_batch=auto")
    squeezed = config.model_copy(
        update={"layout": config.layout.model_copy(update={"micro_batch": 2})}
    )  # validation refuses this; a changed cluster can still ask for it
    with pytest.raises(LayoutError, match="fits no split of model and batch"):
        choose_layout(squeezed, 8)


# --- cost and memory ---------------------------------------------------------------------------------


def test_cost_counts_the_slowest_replica_and_the_bubble() -> None:
    config = job()
    even, uneven = Layout(dp=4, micro_batch=8), Layout(dp=3, micro_batch=11)
    ratio = step_cost(config, uneven, CPU).compute_s / step_cost(config, even, CPU).compute_s
    assert ratio == pytest.approx(11 / 8, rel=0.01)
    piped = step_cost(config, Layout(pp=2, micro_batch=8), CPU)
    assert piped.bubble_s == pytest.approx(piped.compute_s / 4)  # (pp - 1) / m with m = 4
    assert piped.pipeline_s > 0
    assert piped.data_s == piped.tensor_s == 0


def test_a_tensor_group_across_nodes_costs_more() -> None:
    config = job()
    link = dataclasses.replace(GPU, latency_s=0.0)
    inside = step_cost(config, Layout(tp=2), link, (4, 4)).tensor_s
    across = step_cost(config, Layout(tp=2), link, (3, 3)).tensor_s
    assert across == pytest.approx(inside * GPU.link_bytes_s / GPU.node_link_bytes_s)


def test_node_sizes_reach_the_choice() -> None:
    """Gradients between nodes over a slow link: the chosen layout costs more than on one node."""
    link = DeviceProfile(flops=5e9, memory_bytes=8e9, link_bytes_s=1e9, latency_s=1e-5, node_link_bytes_s=1e6)
    assert choose_layout(job(), 4, link, [2, 2]).cost_s > choose_layout(job(), 4, link).cost_s


def test_zero_gathers_more_and_holds_less() -> None:
    config = job()
    data = [step_cost(config, Layout(dp=4, zero=zero, micro_batch=2), CPU).data_s for zero in (0, 1, 2, 3)]
    assert data == sorted(data)
    assert len(set(data)) == 4
    state = [memory_estimate(config, Layout(dp=4, zero=zero)).state_bytes for zero in (0, 1, 2, 3)]
    assert state == [state[0], *[state[0] / 4] * 3]
    assert memory_estimate(config, Layout(dp=4, zero=3, replicate=2)).state_bytes == state[0] / 2


def test_gpipe_keeps_every_micro_batch() -> None:
    config = job()
    first = memory_estimate(config, Layout(pp=2, micro_batch=1, schedule="gpipe"))
    second = memory_estimate(config, Layout(pp=2, micro_batch=1, schedule="1f1b"))
    assert first.activation_bytes > 10 * second.activation_bytes


def test_document_masks_take_a_square_of_the_row() -> None:
    """One for all blocks of a stage, in the type of scores; none in rings and for kernels that need none."""
    plain = ["data.sequence_length=256", "precision=bf16"]

    def added(layout: Layout, *more: str) -> float:
        with_masks = memory_estimate(job("data.document_masks=true", *plain, *more), layout)
        return with_masks.activation_bytes - memory_estimate(job(*plain, *more), layout).activation_bytes

    assert added(Layout(micro_batch=3)) == 3 * 256 * 256 * 2
    assert added(Layout(micro_batch=3, cp=2)) == 0
    window = "model.sliding_window=64"  # in the same mask; by itself it is one for all rows
    assert added(Layout(micro_batch=3), window) == (3 - 1) * 256 * 256 * 2
    gpu = "cluster.device=cuda"
    for name in ("auto", "flash", "flash-attn"):
        assert added(Layout(), gpu, f"kernels.attention={name}") == 0
    assert added(Layout(), gpu, "kernels.attention=efficient") == 256 * 256 * 2
    assert added(Layout(), gpu, "precision=fp32") == 256 * 256 * 4


def test_sgd_and_precision_change_the_state() -> None:
    adamw, sgd = job(), job("optimizer.name=sgd")
    double = job("precision=fp64")
    bytes_of = [memory_estimate(config, Layout()).state_bytes for config in (adamw, sgd, double)]
    assert bytes_of[0] == 2 * bytes_of[1]
    assert bytes_of[2] == 2 * bytes_of[0]
    assert bytes_of[0] == 16 * parameter_count(adamw.model)


# BY_HAND: a block has 2·8 + 2·64 + 2·8·4 + 3·8·10 = 448 parameters.
@pytest.mark.parametrize(
    ("layout", "nodes", "expected"),
    [
        # 12 tokens a micro-batch, 8 of them; a block 6·448 + 12·8·6 = 3264 FLOPs a token, the head 6·2400.
        (Layout(micro_batch=2), (), (8 * (12 * (4 * 3264 + 14400) / 1e3 + 4 * 7), 0, 0, 0, 0, 0)),
        # The head weighs more than four blocks: three on the first stage, one before the head. The kernels of
        # three, the arithmetic of the last. One hop of 2·6·8 values of 4 bytes each way.
        (
            Layout(pp=2, micro_batch=2),
            (),
            (
                8 * (12 * (3264 + 14400) / 1e3 + 21),
                12 * (3264 + 14400) / 1e3 + 21,
                0,
                9 * 2 * (384 / 1e2 + 5),
                0,
                5,
            ),
        ),
        # Four collectives a block forward and four backward, of half of 384 bytes; arithmetic 10 % slower.
        (
            Layout(tp=2, micro_batch=2),
            (2, 2),
            (8 * (1.1 * 12 * (4 * 3264 + 14400) / 1e3 / 2 + 28), 0, 8 * 32 * (192 / 1e2 + 5), 0, 0, 5),
        ),
        # 6600 parameters of 4 bytes all-reduced over 2 hops (dp 4); a bucket holds them.
        (
            Layout(dp=4, micro_batch=2),
            (4,),
            (2 * (12 * (4 * 3264 + 14400) / 1e3 + 28), 0, 0, 0, 2 * 0.75 * 26400 / 1e2 + 2 * 2 * 5, 10),
        ),
        # The same between nodes of two, which share the traffic, block by block (4 blocks, embedding, head):
        # ZeRO-2 gathers once per step, ZeRO-3 blocks twice per micro-batch and the ends (4808 parameters)
        # once, both scatter per micro-batch.
        (
            Layout(dp=4, zero=2, micro_batch=2),
            (2, 2),
            (
                2 * (12 * (4 * 3264 + 14400) / 1e3 + 28),
                0,
                0,
                0,
                (1 + 2) * (0.75 * 26400 / 2e1 + 6 * 2 * 5),
                10,
            ),
        ),
        (
            Layout(dp=4, zero=3, micro_batch=4),
            (4,),
            (
                24 * (4 * 3264 + 14400) / 1e3 + 28,
                0,
                0,
                0,
                0.75 * (26400 + 4 * (2 * 1792 + 4808)) / 1e2 + (6 + 4 * 2 + 2) * 2 * 5,
                10,
            ),
        ),
        # A copy on each node: only the sums of its shards go from one to the other.
        (
            Layout(dp=4, zero=3, replicate=2, micro_batch=4),
            (2, 2),
            (
                24 * (4 * 3264 + 14400) / 1e3 + 28,
                0,
                0,
                0,
                0.5 * (26400 + 4 * (2 * 1792 + 4808)) / 1e2
                + (6 + 4 * 2 + 2) * 5
                + 2 * (0.5 * 13200 / 1e1 + 5),
                10,
            ),
        ),
    ],
)
def test_cost_by_hand(layout: Layout, nodes: tuple[int, ...], expected: tuple[float, ...]) -> None:
    config = parse_job(BY_HAND)
    assert parameter_count(config.model) == 4 * 448 + 2 * 2400 + 8 == 6600
    cost = step_cost(config, layout, UNIT, nodes)
    parts = (cost.compute_s, cost.bubble_s, cost.tensor_s, cost.pipeline_s, cost.data_s, cost.sync_s)
    assert parts == pytest.approx(expected)
    assert cost.total_s == pytest.approx(sum(expected))


def test_wider_tensor_parallelism_by_hand() -> None:
    """Three quarters of 384 bytes per collective at tp 4, arithmetic 20 % slower, a quarter of it each."""
    cost = step_cost(parse_job(BY_HAND), Layout(tp=4, micro_batch=2), UNIT)
    assert cost.tensor_s == pytest.approx(8 * 32 * (288 / 1e2 + 5))
    assert cost.compute_s == pytest.approx(8 * (1.2 * 12 * (4 * 3264 + 14400) / 1e3 / 4 + 28))


def test_what_overlapped_tensor_parallelism_sends_by_hand() -> None:
    """Both gathers once more, and each collective in three transfers; experts are gathered as without."""
    for experts, parted, plain in ((0, 10, 0), (2, 5, 4)):
        raw = {**BY_HAND, "kernels": {"tp_overlap": "ring"}}
        if experts:
            raw["model"] = {**BY_HAND["model"], "moe": {"experts": experts, "intermediate_size": 8}}
        sent = step_cost(parse_job(raw), Layout(tp=4, micro_batch=2), UNIT).tensor_s
        assert sent == pytest.approx(32 * ((parted + plain) * 2.88 + (3 * parted + plain) * 5))


def test_tensor_and_pipeline_share_the_hop() -> None:
    """With tp 2 each rank passes on half of the hidden states, over the slow link between nodes."""
    cost = step_cost(parse_job(BY_HAND), Layout(tp=2, pp=2, micro_batch=2), UNIT, (2, 2))
    assert cost.pipeline_s == pytest.approx(9 * 2 * (384 / 2 / 1e1 + 5))


@pytest.mark.parametrize(
    ("precision", "layout", "state"),
    [
        ("fp32", Layout(micro_batch=2), 6600 * 16),
        ("bf16", Layout(micro_batch=2, tp=2), 6600 * 8),
        ("fp64", Layout(micro_batch=2, tp=2), 6600 * 16),
        # The first stage has the embedding and three of the blocks.
        ("fp32", Layout(micro_batch=2, pp=2), (3 * 448 + 2400) * 16),
        ("fp32", Layout(dp=2, pp=2, zero=2, micro_batch=2), (3 * 448 + 2400) * 8),
        ("fp32", Layout(dp=4, zero=1, micro_batch=2), 6600 * 4),
        ("fp32", Layout(dp=2, tp=2, zero=3), 6600 * 4),
    ],
)
def test_state_by_hand(precision: str, layout: Layout, state: int) -> None:
    """Weights, gradients and two moments; in a mixed precision all of them wide."""
    assert rank_state(parse_job({**BY_HAND, "precision": precision}), layout, 0).state == state


def test_a_linear_cross_entropy_by_hand() -> None:
    """One more product of the head: 2·2400 FLOPs."""
    plain = parse_job(BY_HAND)
    linear = parse_job({**BY_HAND, "kernels": {"loss": "linear", "loss_chunk": 5}})
    for layout, more in [
        (Layout(micro_batch=2), 8 * 12 * 4800 / 1e3),
        (Layout(pp=2, micro_batch=2), 8 * 12 * 4800 / 1e3),
        (Layout(tp=2, micro_batch=2), 1.1 * 8 * 12 * 4800 / 1e3 / 2),
    ]:
        less, found = (step_cost(job, layout, UNIT).compute_s for job in (plain, linear))
        assert found - less == pytest.approx(more)


MIXED = {"experts": 4, "intermediate_size": 6, "shared_intermediate_size": 3}


@pytest.mark.parametrize(
    ("layout", "options", "copied"),
    [
        # of a block 8·(8 + 2·4) of attention, and gate and up of 8·10 each
        (Layout(dp=2, zero=3), {}, 288 * 4),
        (Layout(dp=2, tp=2, zero=1, micro_batch=2), {}, 144 * 4),
        (Layout(dp=2, zero=1), {"precision": "bf16"}, 288 * 2),
        (Layout(dp=2), {"precision": "bf16"}, 0),
        (Layout(dp=2), {}, 0),
        (Layout(dp=2, ep=2), {"model": {**BY_HAND["model"], "moe": MIXED}}, 2 * 2 * 48 * 4),
        (Layout(zero=3, dp=2), {"model": {**BY_HAND["model"], "moe": MIXED}}, (176 + 4 * 2 * 48) * 4),
    ],
    ids=str,
)
def test_copies_of_fused_projections_by_hand(layout: Layout, options: dict[str, Any], copied: int) -> None:
    job = {**BY_HAND, **options}
    separate, fused = (
        block_bytes(parse_job({**job, "kernels": {"projections": kind}}), layout, 1).kept
        for kind in ("separate", "fused")
    )
    assert fused - separate == copied


@pytest.mark.parametrize(
    ("optimizer", "layout", "copied"),
    [
        ("adamw", Layout(), 6600),
        ("adamw", Layout(dp=2, zero=1), 3300),
        ("muon", Layout(), 2 * 2400 + 8 + 4 * 16),  # embedding, head and norms
        ("muon", Layout(dp=2, zero=3), (2 * 2400 + 8 + 4 * 16) // 2),
    ],
)
def test_an_update_of_all_tensors_at_once_copies_them(optimizer: str, layout: Layout, copied: int) -> None:
    """It counts where that is more than activations, which are gone by then."""
    job = {**BY_HAND, "optimizer": {"name": optimizer}}
    fused, foreach = (
        memory_estimate(parse_job({**job, "kernels": {"optimizer": kind}}), layout)
        for kind in ("fused", "foreach")
    )
    assert (fused.update_bytes, foreach.update_bytes) == (0, copied * 4)
    assert foreach.total_bytes == max(fused.total_bytes, fused.state_bytes + copied * 4)


@pytest.mark.parametrize(
    ("optimizer", "layout", "quantized"),
    [
        ("adamw", Layout(), 6600),
        ("adamw", Layout(dp=2, zero=1), 3300),
        ("muon", Layout(), 2 * 2400 + 8 + 4 * 16),  # embedding, head and norms
    ],
)
def test_moments_in_8_bits_by_hand(optimizer: str, layout: Layout, quantized: int) -> None:
    """A byte and 4/256 for each of two moments instead of 4; 30 bytes each while they are updated."""
    full, small = (
        memory_estimate(parse_job({**BY_HAND, "optimizer": {"name": optimizer, "moments": moments}}), layout)
        for moments in ("full", "8bit")
    )
    assert full.state_bytes - small.state_bytes == pytest.approx(2 * (4 - 1 - 1 / 64) * quantized)
    assert small.update_bytes == 30 * quantized


def test_decoded_moments_are_a_bucket_of_a_large_model() -> None:
    for kernel, each in (("fused", 30), ("foreach", 34)):
        job = {**BY_HAND, "model": {"layers": 48, "hidden_size": 2048}, "kernels": {"optimizer": kernel}}
        estimate = memory_estimate(parse_job({**job, "optimizer": {"moments": "8bit"}}), Layout())
        assert estimate.update_bytes == each * 4 * 2**20


def test_offloaded_moments_by_hand() -> None:
    """Two of four copies of 6600 values leave the device; staging is as large as gradients and updates."""
    config = parse_job({**BY_HAND, "optimizer": {"offload": True}})
    estimate = memory_estimate(config, Layout(micro_batch=2))
    assert (estimate.state_bytes, estimate.host_state_bytes) == (6600 * (8 + 8), 6600 * 8)
    plain = memory_estimate(parse_job(BY_HAND), Layout(dp=4, zero=3))
    sharded = memory_estimate(config, Layout(dp=4, zero=3))
    assert sharded.host_state_bytes == estimate.host_state_bytes / 4
    assert sharded.total_bytes == plain.total_bytes
    large = parse_job(
        {**BY_HAND, "model": {"layers": 48, "hidden_size": 2048}, "optimizer": {"offload": True}}
    )
    saved = memory_estimate(large, Layout()).host_state_bytes - 4 * 32 * 2**20  # two buckets each way
    kept = large.model_copy(update={"optimizer": OptimizerConfig()})
    assert memory_estimate(kept, Layout()).total_bytes - memory_estimate(large, Layout()).total_bytes == saved
    threads = config.model_copy(update={"cluster": ClusterConfig(cpus_per_worker=4)})
    seconds = [step_cost(job, Layout(), UNIT).offload_s for job in (parse_job(BY_HAND), config, threads)]
    moved, computed = 6600 * 8 / 1e10, 6600 * 28 / 1e10
    assert seconds == pytest.approx([0.0, moved + computed, moved + computed / 4])


@pytest.mark.parametrize(
    ("layout", "device", "host"),
    [
        (Layout(micro_batch=2), 2 * 96, 4 * 96),  # the block at work and the one that travels; all four
        (Layout(micro_batch=2, recompute="full"), 2 * 8, 4 * 8),
        (Layout(micro_batch=2, recompute="every-2"), 2 * 96, 2 * 96 + 2 * 8),
    ],
)
def test_offloaded_activations_by_hand(layout: Layout, device: int, host: int) -> None:
    """96 elements a token and block, or its input of 8; 12 tokens."""
    config = parse_job({**BY_HAND, "layout": {"offload_activations": True}})
    layout = replace(layout, offload_activations=True)
    estimate = memory_estimate(config, layout)
    again = blocks_again(config, layout, 0)
    assert block_bytes(config, layout, 1).held(again) == 12 * 4 * device
    assert (estimate.host_activation_bytes, estimate.host_state_bytes) == (12 * 4 * host, 0)
    # twice as far, for each of eight micro-batches
    assert step_cost(config, layout, UNIT).offload_s == pytest.approx(2 * 8 * 12 * 4 * host / 1e10)
    assert step_cost(config, replace(layout, offload_activations=False), UNIT).offload_s == 0.0


def test_offload_is_in_every_layout_that_is_chosen_and_never_with_selective_recomputation() -> None:
    config = parse_job({**BY_HAND, "layout": {"offload_activations": True}})
    assert all(layout.offload_activations for layout in layouts(config, 4))
    whole = memory_estimate(config, Layout(micro_batch=2, offload_activations=True))
    budget = whole.total_bytes - 1
    found = cheapest_recompute(config, Layout(micro_batch=2, offload_activations=True), budget)
    assert found is None or found.recompute == "full"
    assert str(Layout(offload_activations=True)) == "dp1-tp1-pp1-mb1-offload"


def test_the_first_stage_is_the_fullest_in_a_deep_pipeline() -> None:
    """Four 1F1B stages of long sequences: the first keeps four micro-batches, the last one and the logits."""
    config = parse_job({**BY_HAND, "model": {**BY_HAND["model"], "intermediate_size": 1000}})
    layout = Layout(pp=4, micro_batch=2)
    needs = [rank_needs(config, layout, rank)(blocks_again(config, layout, rank)) for rank in range(4)]
    assert max(needs) == needs[0] == memory_estimate(config, layout).total_bytes
    kept = 12 * (6 * 8 + 2 * 4 + 4 * 1000) * 4
    assert block_bytes(config, layout, 4).kept == 4 * kept


def test_as_many_micro_batches_as_stages_are_enough() -> None:
    config = parse_job(BY_HAND)
    assert not layout_problems(config, Layout(pp=4, micro_batch=4))
    assert layout_problems(config, Layout(pp=4, micro_batch=5, schedule="gpipe")) == []
    assert [x.key for x in layout_problems(config, Layout(pp=4, micro_batch=6))] == ["layout.pp"]
    assert not layout_problems(config, Layout(dp=16, micro_batch=16))


def test_profile_of_a_device() -> None:
    assert (profile_of("cuda"), profile_of("cpu")) == (GPU, CPU)


def test_nearest_layouts_are_near_and_fit() -> None:
    config = job("cluster.max_workers=8")
    assert nearest_layouts(config, Degrees(1, 3, 1, 1), 8)[0] == "dp=1 tp=2 pp=1"
    assert nearest_layouts(config, Degrees(4, 1, 3, 1), 8)[0] == "dp=4 tp=1 pp=2"
    assert len(nearest_layouts(config, Degrees(1, 3, 1, 1), 8)) == 3
    cut = job("cluster.max_workers=8", "layout.cp=2")
    assert nearest_layouts(cut, Degrees(1, 1, 1, 3), 8)[0] in ("dp=1 tp=1 pp=1 cp=2", "dp=1 tp=1 pp=1 cp=4")
    assert len(fitting_degrees(config, 1)) == 1


def test_nothing_is_sharded_over_one_replica() -> None:
    assert {layout.zero for layout in layouts(job(), 8) if layout.dp == 1} == {0}
    assert {layout.zero for layout in layouts(job(), 8) if layout.dp == 2} == {0, 1, 2, 3}


def test_what_is_remembered_is_told_apart_by_every_argument() -> None:
    calls: list[tuple[int, int]] = []

    @remember_latest
    def scaled(config: list[int], by: int, plus: int = 0) -> int:
        calls.append((by, plus))
        return config[0] * by + plus

    config = [3]
    assert [scaled(config, 2), scaled(config, 2), scaled(config, 2, plus=1), scaled(config, by=4)] == [
        6, 6, 7, 12,
    ]  # fmt: skip
    assert calls == [(2, 0), (2, 1), (4, 0)]
    assert scaled([5], 2) == 10


def test_no_budget_leads_to_recomputation_that_is_refused() -> None:
    """A block that gathers its experts within cannot be computed again selectively."""
    config = parse_job({**BY_HAND, "model": {**BY_HAND["model"], "moe": MIXED}})
    layout = Layout(dp=4, ep=2, zero=3, micro_batch=2)
    budget = memory_estimate(config, layout).total_bytes - 1
    alone = cheapest_recompute(
        config,
        dataclasses.replace(layout, dp=2, zero=0),
        memory_estimate(config, Layout(dp=2, ep=2, micro_batch=2)).total_bytes - 1,
    )
    assert alone is not None
    assert is_selective(alone.recompute)
    found = cheapest_recompute(config, layout, budget)
    assert found is not None
    assert found.recompute != "none"
    assert not is_selective(found.recompute)


def test_no_layout_is_chosen_in_which_grouped_experts_do_not_multiply() -> None:
    moe = {"experts": 4, "intermediate_size": 24}  # in bf16 multiples of 8: 24, not 12
    data = {"model": {"heads": 4, "kv_heads": 4, "moe": moe}, "precision": "bf16"}
    degrees = {kind: {layout.tp for layout in layouts(parse_job({**data, "kernels": {"experts": kind}}), 4)}
               for kind in ("loop", "grouped")}  # fmt: skip
    assert degrees == {"loop": {1, 2, 4}, "grouped": {1}}
