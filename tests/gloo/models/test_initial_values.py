"""Initial weights: any box alone as in the whole, the same on any machine, normal, and in little memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, region, whole
from picotron_ray.models.families.registry import parameter_table
from picotron_ray.models.layers.init import PIECE, initial_value, normal
from picotron_ray.parallel.shard_boxes import local_box

TINY = ModelConfig(vocab_size=48, hidden_size=24, intermediate_size=40, layers=3, heads=6, kv_heads=2)
SHAPE = (6, 37, 45)


@pytest.mark.parametrize(
    "box",
    [
        Box((1, 3, 5), (4, 20, 13)),
        Box((0, 0, 0), (6, 37, 9)),
        Box((5, 36, 44), (1, 1, 1)),
        Box((2, 0, 0), (3, 37, 45)),
        Box((0, 5, 0), (6, 30, 45)),
        Box((3, 5, 8), (0, 30, 8)),
    ],
    ids=str,
)
def test_a_box_drawn_alone_is_that_part_of_the_whole(box: Box) -> None:
    full = initial_value("a", SHAPE, 3, init_std=0.5)
    alone = initial_value("a", SHAPE, 3, init_std=0.5, box=box)
    assert torch.equal(alone, full[region(box, whole(SHAPE))])
    assert torch.equal(initial_value("a", SHAPE, 3, init_std=None, box=box), torch.ones(box.size))


def test_a_box_of_many_pieces_is_that_part_of_the_whole() -> None:
    shape = (5, PIECE // 2 + 3)
    box = Box((1, 9), (4, PIECE // 2 - 20))
    full = initial_value("a", shape, 0, init_std=1.0)
    assert torch.equal(initial_value("a", shape, 0, init_std=1.0, box=box), full[region(box, whole(shape))])
    assert initial_value("a", (), 0, init_std=1.0).shape == ()


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=3), Layout(dp=2, tp=2, zero=3), Layout(tp=4, pp=2), Layout(dp=3, pp=2, zero=1)],
    ids=str,
)
def test_what_the_ranks_of_a_layout_draw_is_what_one_process_draws(layout: Layout) -> None:
    for spec in parameter_table(TINY):
        full = initial_value(spec.name, spec.shape, 0, init_std=spec.init_std)
        for rank in range(layout.world_size):
            box = local_box(spec, layout, rank)
            part = initial_value(spec.name, spec.shape, 0, init_std=spec.init_std, box=box)
            assert torch.equal(part, full[region(box, whole(spec.shape))]), (spec.name, rank)


def test_numbers_are_box_and_mullers_of_the_words() -> None:
    words = np.random.Generator(np.random.Philox(7)).integers(0, 2**64, 1 << 16, dtype=np.uint64)
    words[:4] = [0, 2**64 - 1, 2**63, 2**32 - 1]
    low, high = (words & 0xFFFFFFFF) | 1, (words >> 32).astype(np.float64) / 2**32
    radius = np.sqrt(-2 * np.log(np.minimum(low.astype(np.float32).astype(np.float64) / 2**32, 1)))
    expected = np.stack([radius * np.cos(2 * np.pi * high), radius * np.sin(2 * np.pi * high)], 1)
    assert np.abs(normal(words).reshape(-1, 2) - expected).max() < 1e-4
    assert np.abs(normal(words)).max() < 7


def test_values_are_normal_and_neighbours_do_not_know_of_each_other() -> None:
    values = initial_value("a", (512, 1024), 0, init_std=1.0).double().flatten()
    ones = 1 / len(values) ** 0.5
    moments = [float((values**power).mean()) for power in (1, 2, 3, 4)]
    for found, expected, spread in zip(moments, (0, 1, 0, 3), (1, 2**0.5, 15**0.5, 96**0.5), strict=True):
        assert abs(found - expected) < 5 * spread * ones
    for lag in (1, 2, 7, 8, 1024):
        assert abs(float((values[lag:] * values[:-lag]).mean())) < 5 * ones
    other = initial_value("b", (512, 1024), 0, init_std=1.0).double().flatten()
    assert abs(float((values * other).mean())) < 5 * ones


def test_values_depend_on_seed_and_name_alone() -> None:
    def value(name: str, seed: int) -> torch.Tensor:
        return initial_value(name, (300, 200), seed, init_std=0.02)

    first = value("a", 1)
    torch.manual_seed(5)
    assert torch.equal(first, value("a", 1))
    assert not torch.equal(first, value("a", 2))
    assert not torch.equal(first, value("b", 1))


def test_recorded_values_are_still_drawn() -> None:
    """Every run of a seed begins with them: whoever changes them raises ``VERSION``."""
    found = initial_value("a", (300, 200), 1, init_std=0.02)[[0, 0, 1, 299], [0, 1, 0, 199]]
    assert found.tolist() == RECORDED


def test_a_part_takes_little_memory_beside_itself() -> None:
    shape, box = (4096, 4096), Box((0, 1024), (4096, 512))
    initial_value("a", shape, 0, init_std=1.0, box=Box((0, 0), (1, 8)))
    tracemalloc.start()
    initial_value("a", shape, 0, init_std=1.0, box=box)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4 * box.numel + (4 << 20)


RECORDED = [0.0038045388646423817, 0.018058499321341515, -0.041384510695934296, -0.014898541383445263]
