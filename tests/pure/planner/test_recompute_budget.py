"""What a memory budget comes to, against every assignment of a kind to every block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputeKind
from picotron_ray.planner import model_sizes
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.datasheet import GPU
from picotron_ray.planner.device_profile import CPU, DeviceProfile
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.model_sizes import blocks_again, stage_depth
from picotron_ray.planner.recompute_search import cheapest_recompute

pytestmark = pytest.mark.pure

LETTERS: dict[str, RecomputeKind] = {".": "kept", "F": "full", "S": "selective"}
# so slow a memory that what is cheap in arithmetic is not in time; and none of its time counts
SLOW_MEMORY = replace(CPU, memory_bytes_s=1e7)
FREE_ARITHMETIC = replace(CPU, flops=1e30)
MIXTURE = {"experts": 2, "intermediate_size": 32}


def job(layers: int, **options: Any) -> JobConfig:
    model = {"layers": layers, "hidden_size": 64, "intermediate_size": 160, "vocab_size": 260}
    return parse_job(
        {
            "model": {**model, **options.pop("model", {})},
            "data": {"sequence_length": 64, "global_batch": 8},
            "layout": {"schedule": options.pop("schedule", "1f1b")},
            **options,
        }
    )


def assignments(config: JobConfig, layout: Layout, kinds: str) -> Iterator[str]:
    """Every assignment of kinds to blocks, as a letter per block and a comma between stages."""
    depths = [stage_depth(config.model, layout.stages, stage) for stage in range(layout.stages)]
    each = [["".join(letters) for letters in product(kinds, repeat=depth)] for depth in depths]
    return map(",".join, product(*each))


def spelled(policy: str, depth: int, stage: int = 0) -> tuple[RecomputeKind, ...]:
    found = tuple(LETTERS[letter] for letter in policy.split(",")[stage])
    assert len(found) == depth
    return found


CASES: dict[str, tuple[JobConfig, Layout, DeviceProfile, str]] = {
    "one stage": (job(6), Layout(micro_batch=8), CPU, ".SF"),
    "a GPU": (job(6, precision="bf16"), Layout(dp=2, zero=3, micro_batch=4), GPU, ".SF"),
    "slow memory": (job(6), Layout(micro_batch=8), SLOW_MEMORY, ".SF"),
    "free arithmetic": (job(6), Layout(micro_batch=8), FREE_ARITHMETIC, ".SF"),
    "a mixture": (job(5, model={"moe": MIXTURE}), Layout(dp=2, tp=2, ep=2, micro_batch=2), CPU, ".SF"),
    "gathered experts": (
        job(5, model={"moe": MIXTURE}), Layout(dp=4, ep=2, zero=3, micro_batch=2), CPU, ".F",
    ),
    "compiled": (job(6, kernels={"compile": True}), Layout(micro_batch=8), CPU, ".F"),
    "1f1b": (job(6), Layout(pp=3, micro_batch=1), CPU, ".SF"),
    "1f1b, tp and cp": (job(5), Layout(tp=2, pp=2, cp=2, micro_batch=2), CPU, ".SF"),
    "interleaved": (
        job(6, schedule="interleaved-1f1b"),
        Layout(pp=2, schedule="interleaved-1f1b", virtual_stages=2, micro_batch=2), CPU, ".SF",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_no_assignment_that_fits_is_cheaper(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, layout, profile, kinds = CASES[case]
    with monkeypatch.context() as patched:
        patched.setattr(model_sizes, "recomputed", spelled)
        every = []
        for letters in assignments(config, layout, kinds):
            one = replace(layout, recompute=letters)
            needs, seconds = memory_estimate(config, one).total_bytes, step_cost(config, one, profile).total_s
            every.append((needs, seconds, len(letters) - letters.count(".") - letters.count(",")))
    most, least = memory_estimate(config, layout).total_bytes, min(needs for needs, *_ in every)
    assert cheapest_recompute(config, layout, least - 1, profile) is None
    found_words = set()
    for budget in (*(least + share / 10 * (most - least) for share in range(11)), most - 1):
        found = cheapest_recompute(config, layout, budget, profile)
        assert found is not None
        assert memory_estimate(config, found).total_bytes <= budget
        seconds = step_cost(config, found, profile).total_s
        best_s = min(seconds for needs, seconds, _ in every if needs <= budget)
        assert seconds == pytest.approx(best_s, rel=1e-12)
        again = sum(blocks_again(config, found, rank).repeated for rank in range(layout.pp))
        if layout.pp == 1:  # of several ranks those that nobody waits for may compute less, but not as fast
            ties = [count for needs, s, count in every if needs <= budget and s <= best_s * (1 + 1e-12)]
            assert again == min(ties)
        found_words.add(found.recompute)
    assert len(found_words) > 3


def test_the_first_rank_of_1f1b_computes_more_again() -> None:
    config, layout, *_ = CASES["1f1b"]
    most = memory_estimate(config, layout)
    found = cheapest_recompute(config, layout, most.total_bytes - 0.4 * most.activation_bytes)
    assert found is not None
    words = found.recompute.split(",")
    assert len(words) == 3
    counts = [blocks_again(config, found, rank) for rank in range(3)]
    assert counts[0].repeated > counts[-1].repeated


def test_what_is_computed_again_by_hand() -> None:
    """A block 8 wide: 7·8 + 2·8 + 2·4 + 5·10 elements a token, 2·448 + 4·8·6 FLOPs of its forward pass."""
    config = parse_job(
        {
            "model": {"vocab_size": 300, "hidden_size": 8, "intermediate_size": 10, "layers": 4, "heads": 2,
                      "kv_heads": 1},
            "data": {"sequence_length": 6, "global_batch": 16},
        }
    )  # fmt: skip
    unit = DeviceProfile(1e3, 1e9, link_bytes_s=1e2, latency_s=5.0, kernel_s=7.0, memory_bytes_s=50.0)
    for policy, expected in [
        ("selective", 4 * (12 * 130 * 4 / 50 + 7 / 3)),
        ("blocks-1-2", 3 * (12 * 130 * 4 / 50 + 7 / 3) + 12 * (2 * 448 + 192) / 1e3),
    ]:
        cost = step_cost(config, Layout(micro_batch=2, recompute=policy), unit)
        assert cost.again_s == pytest.approx(8 * expected)
        assert cost.compute_s == step_cost(config, Layout(micro_batch=2), unit).compute_s
    cut = step_cost(config, Layout(tp=2, micro_batch=2, recompute="selective"), unit)
    collectives = 3 * (12 * 8 * 4 / 2 / 1e2 + 5)
    assert cut.again_s == pytest.approx(8 * 4 * (12 * 130 * 4 / 2 / 50 + 7 / 3 + collectives))
