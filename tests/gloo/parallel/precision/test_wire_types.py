"""In which type values travel, by axis, as torch's recorder and the note of messages have them."""

from __future__ import annotations

import json
from math import prod

import pytest

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.dry_run.call_order import Call
from tests.support.gloo.parallel_jobs.matrix_jobs import MIXTURE, MODEL, make_job, run_layout
from tests.support.gloo.pool import Pool

SUMS = ("all_reduce", "reduce_scatter")
"""Of losses, of gradients that several ranks have a part of, of norms."""
ROUTER = 2 * MODEL.hidden_size  # elements of one rank's shard of a router, which stays fp32


def wide(calls: list[Call], least: int = 1) -> set[tuple[str, str]]:
    """Axis and kind of what travels in fp32 and is no sum, of more than ``least`` values."""
    return {
        (one.axis, one.kind)
        for one in calls
        if one.dtype == "float32" and one.kind not in SUMS and values(one) > least
    }


def values(one: Call) -> int:
    return sum(prod(size) for size in json.loads(one.sizes))


def called(pool: Pool, model: ModelConfig, layout: Layout, **changes: object) -> list[Call]:
    job = make_job("sgd", 12, model, precision="bf16", **changes)
    return pool.run(layout.world_size, run_layout, [job], layout)[0][0].calls


@pytest.mark.parametrize(
    ("model", "layout", "axes"),
    [
        (MODEL, Layout(tp=2, pp=2, micro_batch=2), {"tp", "pp"}),
        (MODEL, Layout(cp=2, tp=2, micro_batch=2), {"data", "tp"}),
        (MIXTURE, Layout(dp=2, ep=2, micro_batch=2), {"data"}),
    ],
    ids=["tp-pp", "cp-tp", "ep"],
)
def test_hidden_states_keys_and_rows_travel_in_16_bits(
    pool: Pool, model: ModelConfig, layout: Layout, axes: set[str]
) -> None:
    calls = called(pool, model, layout)
    assert wide(calls) == set()
    assert axes <= {one.axis for one in calls if one.dtype == "bfloat16"}


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_zero_gathers_in_16_bits_and_scatters_as_the_config_says(pool: Pool, reduce: str) -> None:
    """gloo scatters by an exchange of parts, which are added up on arrival."""
    layout = Layout(dp=2, zero=3, micro_batch=3)
    calls = called(pool, MODEL, layout, comm={"reduce_dtype": reduce})
    gathered = {one.dtype for one in calls if one.kind == "all_gather" and values(one) > 100}
    assert gathered == {"bfloat16"}
    scattered = {one.dtype for one in calls if one.kind == "all_to_all"}
    assert scattered == {"float32" if reduce == "fp32" else "bfloat16"}


def test_routers_are_gathered_wide(pool: Pool) -> None:
    calls = called(pool, MIXTURE, Layout(dp=2, zero=2, micro_batch=3))
    assert {values(one) for one in calls if one.kind == "all_gather" and one.dtype == "float32"} == {ROUTER}
