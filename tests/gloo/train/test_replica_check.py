"""Ranks that hold the same find a bit that differs, its place, and whose it is; sound ones find nothing."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from picotron_ray.config.schema.comm import CommConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.build import definition_of
from picotron_ray.parallel.shard_boxes import local_box, replica_key
from picotron_ray.train.disturbance import flip_bit
from picotron_ray.train.tensor_hash import CHUNK, tensor_hash, tensor_hashes
from tests.support.gloo.layouts import PAIRS
from tests.support.gloo.parallel_jobs.matrix_jobs import MIXTURE, make_job
from tests.support.gloo.pool import Pool
from tests.support.gloo.train_jobs.replica_jobs import Flips, trained
from tests.support.selection import also_deep

STEPS, EVERY = 6, 3
WEIGHT = "layers.1.attention.wq.weight"


# --- the hash ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_any_bit_changes_the_hash_wherever_the_tensor_lies(dtype: torch.dtype) -> None:
    values = (torch.arange(CHUNK + 11) % 101).to(dtype)
    apart = torch.cat([values[:1], values])[1:]
    before = int(tensor_hash(values))
    assert int(tensor_hash(apart)) == int(tensor_hash(values.view(1, -1))) == before
    words = values.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    )
    for element, bit in product((0, 5, CHUNK - 1, CHUNK, CHUNK + 10), (0, 3, 8 * values.element_size() - 2)):
        words[element] ^= 1 << bit
        assert int(tensor_hash(values)) != before
        words[element] ^= 1 << bit
    assert int(tensor_hash(values)) == before


def test_two_signs_that_turn_over_do_not_cancel_out() -> None:
    values = torch.arange(1.0, 101.0, dtype=torch.float64)
    before = int(tensor_hash(values))
    values[[3, 70]] *= -1
    assert int(tensor_hash(values)) != before


def test_the_order_and_number_of_elements_count() -> None:
    one = torch.tensor([1.0, 2.0, 0.0])
    found = tensor_hashes([one, one.flip(0), one[:2], torch.zeros(0), torch.zeros(1)])
    assert len(set(found)) == 5


def test_a_flipped_bit_stays_finite_and_is_seen_by_nobody_else() -> None:
    weight = torch.nn.Parameter(torch.tensor([0.5, 1.0]))
    loss = (weight * weight).sum()
    flip_bit(weight)
    loss.backward()
    assert weight.tolist() == [0.75, 1.0]


# --- who holds the same -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_equal_keys_mean_equal_boxes_and_the_other_way_round(case: Any) -> None:
    layout: Layout = case.layout
    table = definition_of(case.model, 0).table
    for spec in table:
        by_stage: dict[int, list[tuple[Any, Any]]] = {}
        for rank in range(layout.world_size):
            box = local_box(spec, layout, rank)
            if box.numel:
                by_stage.setdefault(layout.coordinates(rank).pp, []).append(
                    (replica_key(spec, layout, rank), box)
                )
        for held in by_stage.values():
            for (key, box), (other, there) in product(held, held):
                assert (key == other) == (box == there), f"{spec.name}: {key} {box}, {other} {there}"


# --- the check ----------------------------------------------------------------------------------------


def run(
    pool: Pool, layout: Layout, flips: Flips, replay: Any = None, model: Any = None
) -> list[dict[str, Any]]:
    job = make_job("adamw", 8, model) if model else make_job("adamw", 8)
    return pool.run(layout.world_size, trained, job, layout, STEPS, EVERY, flips, replay)


@pytest.mark.parametrize(
    ("layout", "model", "shared"),
    [
        (Layout(dp=2, zero=2), None, "0.0%"),
        (Layout(dp=2, tp=2), MIXTURE, "100.0%"),
        *also_deep(
            (Layout(dp=2), None, "100.0%"),
            (Layout(tp=2), None, "3.3%"),
            (Layout(dp=4, zero=1, replicate=2), None, "100.0%"),
            (Layout(cp=2, ep=2), MIXTURE, ""),
        ),
    ],
    ids=str,
)
def test_sound_replicas_are_found_to_agree(pool: Pool, layout: Layout, model: Any, shared: str) -> None:
    for said in run(pool, layout, {}, model=model):
        assert said["found"] is None, said["text"]
        assert f"replica check every 3 steps: {shared}" in said["applied"][0] or not shared


@pytest.mark.deep
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("muon", {}),
        ("sgd", {}),
        ("adamw", {"precision": "fp16"}),
        ("adamw", {"precision": "fp32", "comm": CommConfig(gradients="int8")}),
    ],
)
def test_other_optimizers_precisions_and_compressed_sums_raise_no_alarm(
    pool: Pool, optimizer: str, options: dict[str, Any]
) -> None:
    job = make_job(optimizer, 8, **options)
    for said in pool.run(2, trained, job, Layout(dp=2), STEPS, EVERY, {}, None):
        assert said["found"] is None, said["text"]


def test_of_three_replicas_the_minority_is_named(pool: Pool) -> None:
    found = run(pool, Layout(dp=3), {4: [(1, WEIGHT, 5)]})
    assert all(said == found[0] for said in found), "all ranks find the same"
    said = found[0]
    assert said["found"] == {"step": 6, "agreed_step": 3, "liars": (1,), "settled": False, "replay": None}
    assert f"replicas differ after step 6: {WEIGHT} in 1 element, the first of them 5" in said["text"]
    assert said["text"].endswith("they agreed after step 3; rank 1 differs from the majority")


@pytest.mark.parametrize(
    ("layout", "tensor", "at", "liar"),
    [
        (Layout(dp=2), WEIGHT, 4, 0),  # two steps of wrong gradients have reached the other one
        *also_deep(
            (Layout(dp=2), WEIGHT, 6, 1),
            (Layout(dp=2), f"exp_avg/{WEIGHT}", 6, 1),
            (Layout(tp=2), "layers.0.attention_norm.weight", 5, 1),
            (Layout(dp=4, zero=1, replicate=2), WEIGHT, 5, 3),
        ),
    ],
    ids=str,
)
def test_of_two_the_one_is_named_that_steps_computed_again_disprove(
    pool: Pool, layout: Layout, tensor: str, at: int, liar: int
) -> None:
    first = run(pool, layout, {at: [(liar, tensor, 3)]})
    replay = first[0]["found"]["replay"]
    assert first[0]["found"]["liars"] == ()
    assert (replay["tensor"], replay["elements"]) == (tensor, (3,))
    again = run(pool, layout, {}, replay)
    for said in again:
        assert said["found"]["liars"] == (liar,), said["text"]
        assert said["found"]["settled"]
        assert said["text"].endswith("all ranks agree now")


def test_a_fault_that_repeats_itself_is_told_and_nobody_is_named(pool: Pool) -> None:
    flips = {5: [(1, WEIGHT, 3)]}
    replay = run(pool, Layout(dp=2), flips)[0]["found"]["replay"]
    (said, _) = run(pool, Layout(dp=2), flips, replay)
    assert said["found"] == {"step": 6, "agreed_step": 3, "liars": (), "settled": False, "replay": None}
    assert "who was wrong cannot be decided; each rank computes again what it held" in said["text"]
    assert said["text"].endswith("ranks differ once more")
