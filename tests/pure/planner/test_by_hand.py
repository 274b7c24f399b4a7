"""Mixtures, uneven vocabularies, offloading and tied ends by hand: bytes, parameters, FLOPs and seconds."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import pytest

from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputedBlocks
from picotron_ray.planner.cost import block_again, step_cost
from picotron_ray.planner.kept_activations import block_bytes, offloaded_activations
from picotron_ray.planner.memory import budget_bytes, memory_estimate, rank_memory
from picotron_ray.planner.model_sizes import (
    active_parameters,
    parameter_count,
    stage_flops_per_token,
    stage_parameters,
    tied_copy,
)
from picotron_ray.planner.software_profile import SoftwareProfile
from tests.support.runs.by_hand import MIXTURE, UNIT
from tests.support.runs.by_hand import job_by_hand as job


@pytest.mark.parametrize(
    ("options", "layout", "state", "kept"),
    [
        # Two of four experts: blocks of 528. A token keeps 56 + 92 elements, 96 bytes of routes; what comes
        # back from other ranks is kept in the place of what experts gave.
        ({}, Layout(micro_batch=2), 8072 * 16, 12 * 688),
        ({}, Layout(dp=2, ep=2, micro_batch=2), 6920 * 16, 12 * 688),
        # Half of it, but gathered inputs of 2·8, and rows of 2·8 on their way in and out.
        ({}, Layout(dp=2, ep=2, tp=2, micro_batch=2), 3460 * 16, 12 * (344 + (64 + 64 * 2) / 2)),
        # Experts are left on two copies of four: a half of 4·288, a quarter of the rest.
        ({}, Layout(dp=4, ep=2, zero=1, micro_batch=2), (5768 // 4 + 1152 // 2) * 16, 12 * 688),
        # In 16 bits the router has a wide input.
        (
            {"precision": "bf16"},
            Layout(dp=2, ep=2, micro_batch=2),
            6920 * 16,
            12 * (148 * 2 + 96 + 32),
        ),
        # Muon has one moment of every matrix inside a block.
        (
            {"optimizer": {"name": "muon"}},
            Layout(dp=2, ep=2, micro_batch=2),
            6920 * 16 - 4 * 512 * 4,
            12 * 688,
        ),
    ],
    ids=str,
)
def test_memory_of_a_mixture(options: dict[str, Any], layout: Layout, state: int, kept: float) -> None:
    config = job(MIXTURE, **options)
    assert memory_estimate(config, layout).state_bytes == state
    assert block_bytes(config, layout, 1).kept == pytest.approx(kept)


def test_a_recomputed_block_of_a_mixture() -> None:
    """Selectively a block keeps 40 + 44 elements, and makes the others once more while it is at work."""
    found = block_bytes(job(MIXTURE), Layout(micro_batch=2), 1)
    assert (found.selective, found.full) == (12 * 84 * 4, 12 * 8 * 4)
    assert (found.selective_again, found.full_again) == (12 * (688 - 84 * 4), 12 * (688 - 8 * 4))


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, 8 * 4),  # attention's result in rows
        ({"kernels": {"norm": "eager"}}, 8 * 4 + 16 * 4),  # and the norms' scaled inputs
        ({"kernels": {"activation": "compiled"}}, 8 * 4 - 10 * 4),
    ],
    ids=str,
)
def test_what_cpus_keep_besides(options: dict[str, Any], more: int) -> None:
    config = job(cluster={"device": "cpu"}, **options)
    assert block_bytes(config, Layout(micro_batch=2), 1).kept == 12 * (96 * 4 + more)


def test_a_precision_that_is_not_settled_counts_as_the_widest() -> None:
    layout = Layout(dp=2, zero=1, micro_batch=2)
    auto, wide = (memory_estimate(job(precision=name), layout) for name in ("auto", "fp32"))
    assert auto == wide


def test_the_budget_is_what_is_asked_or_nine_tenths_of_the_device() -> None:
    assert budget_bytes(job(), 1000.0) == 900.0
    assert budget_bytes(job(layout={"memory_margin": 0.25}), 1000.0) == 750.0
    assert budget_bytes(job(layout={"memory_budget_gib": 0.5}), 1e12) == 2**29
    assert budget_bytes(job(layout={"memory_budget_gib": 0.5}), 1000.0) == 900.0


def test_what_a_rank_sends_to_the_host() -> None:
    """96 elements a block of 4 tokens, under cp 8 more, halved by tp; a recomputed block's input of 8."""
    config = job(layout={"offload_activations": True})
    cut = Layout(cp=3, tp=2, micro_batch=2, offload_activations=True)
    assert offloaded_activations(config, cut, 0, RecomputedBlocks(0, 0, 4)) == 4 * 4 * 104 * 4 / 2
    assert offloaded_activations(config, cut, 0, RecomputedBlocks(1, 0, 4)) == 4 * (3 * 104 + 8) * 4 / 2
    near = replace(cut, offload_activations=False)
    assert offloaded_activations(config, near, 0, RecomputedBlocks(0, 0, 4)) == 0.0
    piped = Layout(pp=2, micro_batch=2, offload_activations=True)  # two micro-batches of three blocks
    first = rank_memory(config, piped, 0, RecomputedBlocks(0, 0, 3))
    assert first.host_activation_bytes == 2 * 12 * 3 * 96 * 4


def test_parameters_over_an_uneven_vocabulary() -> None:
    """Of 301 rows of 8 the first of two ranks has 151: 4 parameters more than a half, of every table."""
    free, tied = (job({"vocab_size": 301, "tie_embeddings": tie}).model for tie in (False, True))
    assert stage_parameters(free, 1, 0, 2) == (4 * 448 + 2 * 2408 + 8) / 2 + 2 * 4
    assert stage_parameters(tied, 1, 0, 2) == (4 * 448 + 2408 + 8) / 2 + 4
    for model in (free, tied):  # three blocks on the first stage, one before the head
        assert stage_parameters(model, 2, 0, 2) == (3 * 448 + 2408) / 2 + 4
        assert stage_parameters(model, 2, 1, 2) == (448 + 2408 + 8) / 2 + 4
        assert [stage_parameters(model, 4, stage, 2) for stage in (1, 2)] == [224, 224]
        assert stage_parameters(model, 4, 0, 2) == (448 + 2408) / 2 + 4
    assert tied_copy(tied, Layout(pp=2, tp=2)) == 2408 / 2 + 4
    assert tied_copy(tied, Layout(pp=2)) == 2408
    assert tied_copy(tied, Layout(tp=2)) == tied_copy(free, Layout(pp=2, tp=2)) == 0.0


def test_a_token_goes_through_two_experts_of_four() -> None:
    """6·(816 - 288) + 12·8·6 FLOPs a block, and 6·2400 of the head."""
    model = job(MIXTURE).model
    assert parameter_count(model) == stage_parameters(model, 1, 0) == 8072
    assert stage_parameters(model, 1, 0, ep=2) == 6920
    assert active_parameters(model) == 8072 - 4 * 288
    assert stage_flops_per_token(model, 6, 1, 0) == 4 * (6 * 528 + 576) + 14400
    assert stage_flops_per_token(model, 6, 1, 0, tp=2) == (4 * (6 * 528 + 576) + 14400) / 2
    again = block_again(job(MIXTURE), Layout(micro_batch=2), UNIT)
    assert again["kept"] == 0.0
    assert again["full"] - again["selective"] == pytest.approx(12 * (2 * 528 + 4 * 8 * 6) / 1e3)


@pytest.mark.parametrize(
    ("layout", "nodes", "seconds"),
    [
        (Layout(pp=2, micro_batch=2), (), 2 * (4800 / 1e2 + 5)),
        (Layout(pp=2, micro_batch=2), (1, 1), 2 * (4800 / 1e1 + 5)),
        (Layout(pp=2, tp=2, micro_batch=2), (4,), 2 * (2400 / 1e2 + 5)),
        (Layout(micro_batch=2), (), 0.0),
    ],
    ids=str,
)
def test_tied_ends_sum_their_gradients(layout: Layout, nodes: tuple[int, ...], seconds: float) -> None:
    """2400 values of 4 bytes, half of which each of the two sends, there and back."""
    assert step_cost(job({"tie_embeddings": True}), layout, UNIT, nodes).data_s == pytest.approx(seconds)


def test_replicas_and_tied_ends_add_up() -> None:
    """ZeRO cuts the tie's gradient too; the first stage has 3·448 + 2400 parameters in 4 pieces."""
    found = step_cost(job({"tie_embeddings": True}), Layout(pp=2, dp=2, zero=1, micro_batch=2), UNIT).data_s
    ends, stage = 2 * (2400 / 1e2 + 5), 2 * (3744 * 4 / 2 / 1e2 + 4 * 5)
    assert found == pytest.approx(ends + stage)


def test_a_step_is_the_sum_of_its_causes_and_the_pipeline_waits_for_each() -> None:
    config = job(MIXTURE, layout={"offload_activations": True})
    layout = Layout(dp=2, tp=2, pp=2, cp=3, ep=2, micro_batch=2, recompute="full", offload_activations=True)
    machine = replace(UNIT, host_link_bytes_s=1.0, memory_bytes_s=1e3)
    cost = step_cost(config, layout, replace(machine, software=SoftwareProfile(update_bytes=10.0)))
    assert min(astuple(cost)) > 1
    assert cost.total_s == pytest.approx(sum(astuple(cost)))
    inside = cost.compute_s + cost.again_s + cost.tensor_s + cost.context_s + cost.expert_s
    assert cost.bubble_s == pytest.approx(inside / 4)  # one of four micro-batches
    assert cost.sync_s == pytest.approx(5 * 4.584962500721156)  # log2(24)
