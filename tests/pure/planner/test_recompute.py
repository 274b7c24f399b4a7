"""Which blocks are computed again, and what the planner makes of a memory budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import (
    RecomputedBlocks,
    is_quantized,
    is_selective,
    policy_of,
    recomputed,
)
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.device_profile import CPU
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.search import choose_layout

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("policy", "depth", "expected"),
    [
        ("none", 4, "...."),
        ("full", 3, "FFF"),
        ("selective", 3, "SSS"),
        ("every-1", 3, "FFF"),
        ("every-2", 5, ".F.F."),
        ("every-4", 3, "..."),
        ("middle-50", 4, ".FF."),
        ("middle-50", 6, ".FFF.."),
        ("middle-50", 3, "FF."),
        ("middle-0", 3, "..."),
        ("middle-100", 3, "FFF"),
        ("blocks-2", 5, "FF..."),
        ("blocks-9", 3, "FFF"),
        ("blocks-0", 3, "..."),
        ("blocks-1-2", 5, "FSS.."),
        ("blocks-0-2", 3, "SS."),
        ("blocks-2-0", 3, "FF."),
        ("blocks-2-9", 4, "FFSS"),
        ("blocks-9-9", 2, "FF"),
        ("int8", 3, "888"),
        ("blocks-1-1-2", 5, "FS88."),
        ("blocks-0-0-1", 3, "8.."),
        ("blocks-1-0-9", 3, "F88"),
    ],
)
def test_what_becomes_of_each_block(policy: str, depth: int, expected: str) -> None:
    letters = {"kept": ".", "full": "F", "selective": "S", "int8": "8"}
    assert "".join(letters[kind] for kind in recomputed(policy, depth)) == expected


def test_a_list_has_a_word_per_stage() -> None:
    found = [recomputed("none,blocks-1-1,selective", 3, stage) for stage in range(3)]
    assert found == [recomputed(word, 3) for word in ("none", "blocks-1-1", "selective")]
    assert recomputed("full", 2, 7) == ("full", "full")
    assert recomputed("none,full", 2) == ("kept", "kept")
    with pytest.raises(ValueError, match=r"^recompute: saw a list of 2 stages, expected one with a stage 3$"):
        recomputed("none,full", 3, 2)


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 4), min_size=1, max_size=4))
def test_numbers_become_a_policy_and_back(numbers: list[tuple[int, int, int, int]]) -> None:
    """The shortest string, of the same meaning in every stage; selective and 8 bits are known by it."""
    stages = [RecomputedBlocks(full, some, full + some + q + kept, q) for full, some, q, kept in numbers]
    policy = policy_of(stages)
    for stage, again in enumerate(stages):
        assert RecomputedBlocks.of(recomputed(policy, again.depth, stage)) == again
    some, packed = (any(numbers) for numbers in zip(*((s.selective, s.int8) for s in stages), strict=True))
    whole = all(again.depth for again in stages)
    assert not whole or (is_selective(policy), is_quantized(policy)) == (some, packed)


@pytest.mark.parametrize(
    "policy",
    [
        "none,",
        ",none",
        "blocks-1-2-3-4",
        "int4",
        "blocks--1-1",
        "full, none",
        "",
        "some",
        "every-0",
        "middle-101",
        "middle-050",
        "blocks--1",
        "full ",
    ],
)
def test_other_words_are_refused(policy: str) -> None:
    with pytest.raises(ValueError, match="expected a policy"):
        recomputed(policy, 4)


def job(budget_gib: float | None, **layout: object) -> JobConfig:
    return parse_job(
        {
            "model": {"layers": 8, "hidden_size": 256, "intermediate_size": 1024},
            "data": {"sequence_length": 1024, "global_batch": 8},
            "layout": {
                "dp": 1,
                "tp": 1,
                "pp": 1,
                "micro_batch": 8,
                "memory_budget_gib": budget_gib,
                **layout,
            },
        }
    )


def needs(policy: str) -> float:
    """Gibibytes of the job's only layout under a policy."""
    return memory_estimate(job(None), Layout(micro_batch=8, recompute=policy)).total_bytes / 2**30


def test_policies_need_less_and_cost_more_in_this_order() -> None:
    order = ["none", "selective", *(f"blocks-{count}" for count in range(4, 9))]
    found = [needs(policy) for policy in order]
    assert found == sorted(found, reverse=True)
    seconds = [step_cost(job(None), Layout(micro_batch=8, recompute=policy), CPU).total_s for policy in order]
    assert seconds == sorted(seconds)
    assert needs("blocks-8") == needs("full") == needs("every-1") == needs("middle-100")


def test_8_bits_need_less_than_all_and_cost_more() -> None:
    assert needs("full") < needs("int8") < needs("selective") < needs("none")
    plain, packed = (
        step_cost(job(None), Layout(micro_batch=8, recompute=policy), CPU).total_s
        for policy in ("none", "int8")
    )
    assert plain < packed


def test_the_planner_never_takes_8_bits_by_itself() -> None:
    assert is_quantized(choose_layout(job(None, recompute="int8"), 1).layout.recompute)
    for share in (0.9, 0.5, 0.2):
        budget = needs("full") + share * (needs("none") - needs("full"))
        assert not is_quantized(choose_layout(job(budget), 1).layout.recompute)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("none", "none"),
        ("selective", "blocks-0-7"),
        ("blocks-0-3", "blocks-0-3"),
        ("blocks-5", "blocks-4-3"),
        ("full", "blocks-7"),
    ],
)
def test_a_budget_takes_the_cheapest_policy_that_keeps_it(policy: str, expected: str) -> None:
    """The last block may keep what it would make anew first thing in the backward pass."""
    choice = choose_layout(job(needs(policy) * 1.0001), 1)
    assert choice.layout.recompute == expected
    asked, found = (step_cost(job(None), Layout(micro_batch=8, recompute=p), CPU) for p in (policy, expected))
    assert found.total_s <= asked.total_s


def test_a_budget_that_nothing_keeps_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"saw room for .* expected at least .* GB for the leanest layout"):
        choose_layout(job(needs("full") * 0.99), 1)


def test_a_policy_that_was_asked_for_is_kept() -> None:
    assert choose_layout(job(None, recompute="every-2"), 1).layout.recompute == "every-2"
    with pytest.raises(LayoutError, match="saw room for"):
        choose_layout(job(needs("none") * 0.99, recompute="none"), 1)
