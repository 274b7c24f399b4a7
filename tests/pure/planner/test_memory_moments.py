"""Moments of a step by hand: 12 tokens, width 8, 300 words; four blocks of 448 parameters, a head of 2400."""

from __future__ import annotations

import pytest

from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputedBlocks
from picotron_ray.planner import cost
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.memory import memory_estimate, rank_needs, rank_state
from picotron_ray.planner.memory_moments import RankMoments, rank_moments
from picotron_ray.planner.model_sizes import sizes_of
from tests.support.runs.by_hand import MIXTURE, UNIT
from tests.support.runs.by_hand import job_by_hand as job

PLAIN = RecomputedBlocks(0, 0, 4)
LOGITS = 12 * 300


def of(layout: Layout, rank: int = 0, **options: object) -> RankMoments:
    config = job(**options)
    state = rank_state(config, layout, rank)
    return rank_moments(config, layout, rank, state.depth, state.parameters, state.mine)


def test_the_loss_has_three_wide_copies_of_the_logits() -> None:
    """Their softmax, the gradient of it, and theirs; where tensor parallelism cuts them, two."""
    assert of(Layout(micro_batch=2)).logits.loss == 3 * 4 * LOGITS
    assert of(Layout(tp=2, micro_batch=2)).logits.loss == 2 * 4 * LOGITS / 2
    assert of(Layout(micro_batch=2), precision="bf16").logits.loss == 3 * 4 * LOGITS
    assert of(Layout(tp=2, micro_batch=2), precision="bf16").logits.loss == (2 * 4 + 2) * LOGITS / 2


def test_a_linear_cross_entropy_has_the_logits_of_a_chunk() -> None:
    found = of(Layout(micro_batch=2), kernels={"loss": "linear", "loss_chunk": 5}).logits
    assert found.loss == 5 * 300 * 4
    assert found.head == 5 * 300 * 4 + 12 * 8 * 4 + 2400 * 4


def test_gpipe_keeps_logits_of_all_micro_batches() -> None:
    """Each of eight keeps its output and its softmax; another two copies live in the first backward pass."""
    last = of(Layout(pp=2, micro_batch=2, schedule="gpipe"), rank=1)
    assert last.logits.loss == (8 * (4 + 4) - 4 + 3 * 4) * LOGITS
    assert of(Layout(pp=2, micro_batch=2), rank=1).logits.loss == (4 + 3 * 4) * LOGITS


def test_stages_keep_what_they_send_and_have_buffers_for_what_is_on_its_way() -> None:
    hidden = 12 * 8 * 4
    assert of(Layout(micro_batch=2)).fixed == hidden
    assert of(Layout(pp=2, micro_batch=2), rank=0).fixed == hidden * (2 + 2)
    assert of(Layout(pp=2, micro_batch=2), rank=1).fixed == hidden * 2  # its input lies in a buffer


def test_the_peak_is_the_loss_where_the_vocabulary_is_large() -> None:
    found = of(Layout(micro_batch=2)).peak(PLAIN)
    assert found.gathered == 0.0
    assert found.activations == 12 * (4 * 96 * 4 + 8 * 4) + 3 * 4 * LOGITS


def test_whole_gradients_are_there_until_they_are_reduced() -> None:
    """ZeRO-1: 6600 weights and as many gradients, of which a quarter is counted in the state."""
    found = of(Layout(dp=4, zero=1, micro_batch=2)).gathered
    assert set(found) == {2 * 6600 * 4 - 6600}
    assert of(Layout(dp=4, zero=2, micro_batch=2)).gathered.loss == 6600 * 4
    freed = of(Layout(dp=4, zero=3, micro_batch=2)).gathered
    assert freed.loss == 2400 * 4  # the head's weights
    assert freed.forward == 2 * freed.loss  # and the buffer in which they came
    assert freed.scattered == (448 + 2 * 2400) * 4  # a block that is fetched, the gradient and its copy
    assert freed.backward == (3 * 448 + 2400) * 4
    assert freed.reduced == 4 * 448 * 4
    assert freed.embedding == 2400 * 4  # the copy of its gradient
    tied = of(Layout(dp=4, zero=3, micro_batch=2), model={"tie_embeddings": True}).gathered
    assert tied.loss == freed.loss
    assert tied.scattered == (448 + 2400) * 4  # which does not come before the backward pass ends
    assert tied.reduced == (4 * 448 + 2 * 2400) * 4


def test_a_step_of_one_micro_batch_begins_without_gradients() -> None:
    one, two = (
        memory_estimate(job(data={"sequence_length": 6, "global_batch": rows}), Layout(micro_batch=2))
        for rows in (2, 4)
    )
    assert two.total_bytes - one.total_bytes == 6600 * 4
    replicas = memory_estimate(
        job(data={"sequence_length": 6, "global_batch": 4}), Layout(dp=2, micro_batch=2)
    )
    assert replicas.total_bytes == two.total_bytes  # whose buckets stay


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [Layout(micro_batch=2), Layout(dp=4, zero=3), Layout(pp=2, tp=2)], ids=str)
def test_one_more_recomputed_block_never_needs_more(layout: Layout, precision: str) -> None:
    """What the search for the cheapest set relies on."""
    config = job(precision=precision)
    needs = rank_needs(config, layout, 0)
    depth = rank_state(config, layout, 0).depth
    for kind in (0, 1):
        numbers = range(depth + 1)
        found = [needs(RecomputedBlocks(n * (kind == 0), n * (kind == 1), depth)) for n in numbers]
        assert found == sorted(found, reverse=True)


def test_a_block_makes_anew_what_it_did_not_keep_when_later_blocks_are_done() -> None:
    """Three blocks recomputed of four need no more than four: the last one's turn comes first."""
    rows = {"sequence_length": 60, "global_batch": 16}
    config = job(data=rows, kernels={"loss": "linear", "loss_chunk": 1})
    policies = ("full", "blocks-3", "blocks-2", "every-2", "middle-50")
    full, three, two, every, middle = (
        memory_estimate(config, Layout(micro_batch=2, recompute=policy)).total_bytes for policy in policies
    )
    assert full == three
    assert two - three == 120 * (96 - 8) * 4  # of 96 values a token the block's input
    assert every - two == 120 * (96 - 8) * 4  # the last one makes anew what it did not keep
    assert middle == every  # of blocks in another order the worst is taken


def test_gradients_of_16_bits_wait_to_be_added_up() -> None:
    """Of a block under ZeRO-1, until its backward pass ends; of a tied table, which is used again at the
    end, until all of it does.
    """

    def gathered(precision: str, tied: bool) -> list[float]:
        layout, model = Layout(dp=4, zero=1, micro_batch=2), {"tie_embeddings": tied}
        found = of(layout, precision=precision, model=model).gathered
        return [found.backward - found.loss, found.reduced - found.loss, found.embedding - found.loss]

    assert gathered("fp32", tied=True) == [0, 0, 0]
    assert gathered("bf16", tied=False) == [448 * 2, 448 * 2, 0]
    assert gathered("bf16", tied=True) == [(448 + 2400) * 2, (448 + 2400) * 2, 2400 * 2]


def test_gradients_of_scores_come_when_the_hidden_layer_is_done() -> None:
    """Their capped scores' and softmax's, wide and in 16 bits, of 2 heads and 60 keys, less 4 x 10 values."""
    model = {"family": "gemma2", "attention_softcap": 50.0, "sliding_window": 60}
    rows, scores = {"sequence_length": 60, "global_batch": 16}, 2 * 60 * (4 + 2)
    found = of(Layout(micro_batch=2), precision="bf16", model=model, data=rows)
    assert found.at_work == 120 * (scores + (8 + 8 - 40) * 2)


def test_stages_of_a_rank_keep_their_weights_until_their_next_forward_pass() -> None:
    """Of two stages of a block of 448 one has its own; where a rank is done with a stage first, none."""
    found = [
        of(Layout(dp=2, pp=2, zero=3, virtual_stages=2, schedule=schedule, micro_batch=1)).gathered
        for schedule in ("interleaved-1f1b", "looped-bfs")
    ]
    assert found[0].forward - found[1].forward == 448 * 4


def test_what_zero_pads_of_experts_is_gathered_and_costs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven ranks divide neither 4 experts nor what is in them: each has one, a gather as much as 7 have."""
    config, layouts = job(MIXTURE), [Layout(dp=dp, zero=3, micro_batch=1) for dp in (4, 7)]
    experts = sizes_of(config.model).experts
    found = []
    for layout in layouts:
        state = rank_state(config, layout, 0)
        found.append(rank_moments(config, layout, 0, state.depth, state.parameters, state.mine))
    even, odd = (one.gathered.backward for one in found)
    assert odd - even == 3 * 4 * 0.75 * experts  # two blocks' weights, and gradients of one
    costs = [step_cost(config, layouts[1], UNIT).data_s]
    monkeypatch.setattr(cost, "padded_elements", lambda job, layout: 0.0)
    costs.append(step_cost(config, layouts[1], UNIT).data_s)
    assert costs[0] > 1.1 * costs[1]
