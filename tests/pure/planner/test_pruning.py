"""The search prunes before it enumerates, and still finds what an exhaustive one does."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picotron_ray.config.load import load_job, parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.best_first import BestFirst, kind_of
from picotron_ray.planner.candidates import candidates
from picotron_ray.planner.cost import sharing_s, step_cost
from picotron_ray.planner.datasheet import GPU, profile_of
from picotron_ray.planner.device_profile import HALF_A_SUM, DeviceProfile, PassCost
from picotron_ray.planner.hardware import hardware
from picotron_ray.planner.memory import budget_bytes, memory_estimate
from picotron_ray.planner.plan import plan
from picotron_ray.planner.recompute_search import cheapest_recompute
from picotron_ray.planner.refusal import leanest_bytes
from picotron_ray.planner.search import choose_layout
from picotron_ray.planner.software_profile import OURS, PLAIN

H100 = profile_of("cuda", 81559 * 2**20)


def search(job: JobConfig, workers: int, profile: DeviceProfile = H100) -> BestFirst:
    sizes = (8,) * (workers // 8) or (workers,)
    found = BestFirst(job, profile, sizes, budget_bytes(job, profile.memory_bytes))
    found.run(workers)
    return found


def exhaustive(job: JobConfig, workers: int, sizes: tuple[int, ...], profile: DeviceProfile) -> list[Any]:
    """The cheapest of every kind, of all candidates."""
    budget = budget_bytes(job, profile.memory_bytes)
    best: dict[Any, Any] = {}
    for candidate in candidates(job, workers):
        layout = cheapest_recompute(job, candidate, budget, profile, sizes)
        if layout is not None:
            choice = (step_cost(job, layout, profile, sizes).total_s, layout)
            best[kind_of(layout)] = min(choice, best.get(kind_of(layout), choice))
    return sorted(best.values())


def test_one_in_thirty_candidates_of_8b_on_64_cards_is_costed() -> None:
    job = load_job("llama-3-8b", ["data.path=/corpus", "cluster.max_workers=64"])
    found = search(job, 64)
    everything = sum(1 for _ in candidates(job, 64))
    assert found.found
    assert 30 * found.costed < everything


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_one_in_thirty_candidates_of_70b_on_256_cards_is_costed() -> None:
    job = load_job("llama-3-70b", ["data.path=/corpus", "cluster.max_workers=256"])
    began = time.process_time()
    found = search(job, 256)
    spent_s = time.process_time() - began
    everything = sum(1 for _ in candidates(job, 256))
    print(f"70B on 256: {found.costed} of {everything} candidates costed, {spent_s:.1f} s of CPU")
    assert 30 * found.costed < everything
    assert spent_s < 15


@given(
    workers=st.integers(1, 8),
    batch=st.integers(1, 24),
    layers=st.integers(1, 6),
    experts=st.sampled_from([0, 4]),
    tight=st.sampled_from([1.0, 0.5, 0.25, 0.1]),
    nodes=st.booleans(),
    half=st.sampled_from([0.0, 64.0]),
    crowd=st.sampled_from([1.0, 1.5, 4.0]),
    gather=st.sampled_from([HALF_A_SUM, PassCost(2.0, 2.0), PassCost(0.5, 3.0)]),
    scatter=st.sampled_from([HALF_A_SUM, PassCost(3.0, 0.5)]),
    more=st.sampled_from(
        [
            {},
            {"layout": {"schedule": "auto"}},
            {"layout": {"recompute": "full"}},
            {"precision": "bf16"},
            {"kernels": {"loss": "linear"}},
            {"optimizer": {"name": "sgd"}},
            {"layout": {"offload_activations": True}},
        ]
    ),
)
@settings(max_examples=40, deadline=None)
def test_the_two_best_are_those_of_an_exhaustive_search(
    workers: int,
    batch: int,
    layers: int,
    experts: int,
    tight: float,
    nodes: bool,
    half: float,
    crowd: float,
    gather: PassCost,
    scatter: PassCost,
    more: dict[str, Any],
) -> None:
    moe = {"moe": {"experts": experts, "intermediate_size": 64}} if experts else {}
    layout = {"ep": "auto", **more.get("layout", {})}
    tree = {"model": {"layers": layers, **moe}, "data": {"global_batch": batch}, **more, "layout": layout}
    job = parse_job(tree)
    whole = memory_estimate(job, next(candidates(job, 1))).total_bytes
    profile = DeviceProfile(
        5e9, tight * whole, 1e9, 1e-4, node_link_bytes_s=1e8, kernel_s=1e-4, matmul_half=half,
        attention_flops=5e9 if half else 0.0, attention_backward_flops=4e9 if half else 0.0,
        software=OURS if half else PLAIN, crowd=crowd, gather=gather, scatter=scatter,
    )  # fmt: skip
    sizes = (workers - workers // 2, workers // 2) if nodes and workers > 1 else ()
    expected = exhaustive(job, workers, sizes, profile)[:2]
    found = BestFirst(job, profile, sizes, budget_bytes(job, profile.memory_bytes))
    found.run(workers)
    assert [cost for cost, _ in found.found] == pytest.approx([cost for cost, _ in expected])
    assert [layout for _, layout in found.found] == [layout for _, layout in expected]


@pytest.mark.parametrize("policy", ["full", "selective", "every-2", "blocks-1-2"])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_named_recomputation_loses_no_layout_that_fits(policy: str, pp: int) -> None:
    """Nothing kept would need more than there is; what the policy keeps fits."""
    model = {"layers": 6, "hidden_size": 64, "intermediate_size": 160, "vocab_size": 260}
    layout = {"recompute": policy, "pp": pp, "tp": 1, "zero": 0, "micro_batch": 2}
    job = parse_job({"model": model, "data": {"sequence_length": 64, "global_batch": 8}, "layout": layout})
    needs = memory_estimate(job, next(candidates(job, 2))).total_bytes
    kept = memory_estimate(job, replace(next(candidates(job, 2)), recompute="none")).total_bytes
    assert needs < kept
    profile = DeviceProfile(5e9, 1.01 * needs / 0.9, 1e9, 1e-4)
    expected = exhaustive(job, 2, (), profile)[:2]
    assert expected
    found = BestFirst(job, profile, (), budget_bytes(job, profile.memory_bytes))
    found.run(2)
    assert found.found == expected
    assert choose_layout(job, 2, profile).layout == expected[0][1]


def test_a_refusal_expects_more_than_there_is_room_for() -> None:
    """A schedule that splits the backward pass keeps all activations, so its leanest layout does too."""
    tree = {"schedule": "interleaved-zero-bubble", "pp": 2, "tp": 1, "zero": 0}
    model = {"layers": 8, "hidden_size": 64, "intermediate_size": 160, "vocab_size": 260}
    job = parse_job({"model": model, "data": {"sequence_length": 256, "global_batch": 8}, "layout": tree})
    need = leanest_bytes(job, 2)
    assert need == min(memory_estimate(job, one).total_bytes for one in candidates(job, 2))
    with pytest.raises(LayoutError, match=r"saw room for .* expected at least") as raised:
        choose_layout(job, 2, DeviceProfile(5e9, 0.99 * need / 0.9, 1e9, 1e-4))
    room, least = (float(word) for word in re.findall(r"(\S+) GB", str(raised.value))[:2])
    assert room < least
    assert choose_layout(job, 2, DeviceProfile(5e9, 1.01 * need / 0.9, 1e9, 1e-4)).layout.pp == 2


@pytest.mark.parametrize("optimizer", [{}, {"offload": True}])
@pytest.mark.parametrize("away", [False, True])
def test_a_bound_and_what_replicas_share_are_the_cost(away: bool, optimizer: dict[str, Any]) -> None:
    """But for activations that are offloaded: recomputation leaves less of them."""
    job = parse_job({"optimizer": optimizer, "cluster": {"device": "cuda"}})
    for layout in (
        Layout(dp=4, zero=2),
        Layout(dp=4, zero=1, replicate=2, pp=2),
        Layout(dp=2, micro_batch=2),
    ):
        cost = step_cost(job, replace(layout, offload_activations=away), H100, (4, 4))
        one = cost.compute_s / layout.micro_batches(job.data.global_batch)
        shares = sharing_s(job, replace(layout, offload_activations=away), H100, (4, 4), one)
        alone = step_cost(job, layout, H100, (4, 4))
        assert shares == pytest.approx(cost.data_s + cost.optimizer_s + alone.offload_s)


@given(
    workers=st.integers(2, 6),
    above=st.integers(1, 5),
    batch=st.integers(4, 12),
)
@settings(max_examples=15, deadline=None)
def test_a_search_of_more_workers_leaves_out_what_fewer_can_run(workers: int, above: int, batch: int) -> None:
    job = parse_job({"model": {"layers": 3}, "data": {"global_batch": batch}})
    profile = DeviceProfile(5e9, 8e9, 1e9, 1e-4)
    found = BestFirst(job, profile, (), budget_bytes(job, profile.memory_bytes), keep=1)
    found.run(workers, above)
    fitting = [one for one in exhaustive(job, workers, (), profile) if one[1].world_size > above]
    assert found.found == fitting[:1]


@pytest.mark.parametrize(
    ("name", "gpus", "limit_s"),
    [
        ("llama-3-70b", 64, 1.0),
        ("llama-3-70b", 1024, 5.0),
        ("llama-3.1-405b", 16384, 20.0),
    ],
)
@pytest.mark.deep
def test_a_plan_takes_few_seconds_of_one_core(name: str, gpus: int, limit_s: float) -> None:
    """The whole plan: the search, its table, and what more devices and more memory would buy."""
    job, h100 = load_job(name, ["data.path=unread", f"cluster.max_workers={gpus}"]), hardware("h100-80g")
    began = time.process_time()
    found = plan(job, gpus, h100, clock=time.process_time)
    spent_s = time.process_time() - began
    print(f"{name} on {gpus}: {found.seconds:.2f} s of CPU for the search, {spent_s:.2f} s for the plan")
    assert found.seconds < limit_s
    assert spent_s < limit_s


def test_the_runner_up_is_named_with_what_it_lost_by() -> None:
    planned = choose_layout(parse_job({"data": {"global_batch": 8}}), 4)
    name, _, why = planned.runner_up.partition(": ")
    assert name != str(planned.layout)
    assert " % more, for " in why or why == "as much, but later in the order of layouts"
    alone = choose_layout(parse_job({"layout": {"dp": 1, "tp": 1, "pp": 1, "zero": 0}}), 1)
    assert alone.runner_up == ""


def test_a_limit_below_the_devices_memory_is_kept() -> None:
    job = load_job("llama-3-8b", ["data.path=/corpus", "cluster.max_workers=8"])
    free = choose_layout(job, 8, GPU)
    need = memory_estimate(job, free.layout).total_bytes
    less = choose_layout(job, 8, GPU, limit_bytes=0.9 * need)
    assert memory_estimate(job, less.layout).total_bytes <= 0.9 * need
    assert less.cost_s >= free.cost_s
    with pytest.raises(LayoutError, match="below layouts that ran out of memory"):
        choose_layout(job, 8, GPU, limit_bytes=1e9)
