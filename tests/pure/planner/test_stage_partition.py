"""Cutting layers into pipeline stages, against every possible cut."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.errors import LayoutError
from picotron_ray.layout.schedules import SCHEDULES
from picotron_ray.planner.model_sizes import stage_bounds
from picotron_ray.planner.stage_partition import partition

pytestmark = pytest.mark.pure

CASES = [
    ([1.0] * 4, 0.0, 0.0, 2),
    ([1.0] * 7, 0.0, 1.5, 3),
    ([3.0, 1.0, 1.0, 1.0, 4.0, 2.0], 2.0, 1.0, 3),
    ([1.0, 9.0, 1.0, 1.0], 0.0, 0.5, 4),
    ([5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0], 1.0, 3.0, 4),
    ([0.0, 5.0, 2.0, 1.0, 1.0, 1.0, 1.0], 9.0, 0.0, 4),
    ([1.0], 0.0, 7.0, 1),
]


@pytest.mark.parametrize(("costs", "first", "last", "stages"), CASES)
def test_no_cut_has_a_cheaper_worst_stage(costs: list[float], first: float, last: float, stages: int) -> None:
    assert_no_cut_is_better(costs, first, last, stages)


def test_no_cut_is_better_in_a_thousand_drawn_cases() -> None:
    """Half of them of equal layers, which are cut another way."""
    draw = random.Random(13)
    for number in range(1000):
        layers = draw.randint(1, 10)
        costs = [draw.choice((1.0, 2.5, 7.0, draw.uniform(0.1, 9.0))) for _ in range(layers)]
        if number % 2:
            costs = costs[:1] * layers
        ends = [draw.choice((0.0, draw.uniform(0.0, 20.0))) for _ in range(2)]
        assert_no_cut_is_better(costs, *ends, draw.randint(1, layers))


def assert_no_cut_is_better(costs: list[float], first: float, last: float, stages: int) -> None:
    layers = len(costs)

    def worst(bounds: tuple[tuple[int, int], ...]) -> float:
        sums = [sum(costs[start:end]) for start, end in bounds]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    every = [tuple(pairwise((0, *cuts, layers))) for cuts in combinations(range(1, layers), stages - 1)]
    found = partition(costs, first, last, stages)
    assert found in every
    assert worst(found) == pytest.approx(min(map(worst, every)), rel=1e-12)


def test_the_head_counts() -> None:
    """A head as heavy as two blocks takes layers off the last stage; a light one does not."""
    heavy = ModelConfig(layers=8, hidden_size=64, intermediate_size=64, heads=4, vocab_size=600)
    assert [end - start for start, end in stage_bounds(heavy, 4)] == [3, 2, 2, 1]
    assert [end - start for start, end in stage_bounds(ModelConfig(layers=8), 4)] == [2, 2, 2, 2]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(LayoutError, match="saw 5 stages for 4 layers"):
        stage_bounds(ModelConfig(), 5)


@pytest.mark.parametrize("schedule", [name for name, entry in SCHEDULES.items() if not entry.with_actions])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_every_stage_is_on_one_rank(schedule: str, pp: int) -> None:
    virtual = SCHEDULES[schedule].stages_per_rank[0]
    held = [SCHEDULES[schedule].rank_stages(pp, virtual, rank) for rank in range(pp)]
    assert sorted(stage for stages in held for stage in stages) == list(range(pp * virtual))
    assert all(len(stages) == virtual for stages in held)
