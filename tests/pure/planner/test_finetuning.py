"""What freezing and adapters change in sizes, memory, traffic and operations, against the table by hand."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.registry import finetuned_table, parameter_table
from picotron_ray.planner.memory import memory_estimate, rank_state
from picotron_ray.planner.memory_causes import memory_by_cause
from picotron_ray.planner.memory_explained import explain_memory
from picotron_ray.planner.model_sizes import (
    EVERYTHING,
    flops_per_token,
    parameter_count,
    trained_elements,
    trained_of_stage,
)
from picotron_ray.planner.sent_bytes import sent_bytes

LORA = {"rank": 4, "targets": ["*.wq", "*.down"]}


def job(**model: Any) -> JobConfig:
    return JobConfig.model_validate({"precision": "fp32", "model": {"layers": 4, **model}})


def test_a_plain_model_is_trained_whole() -> None:
    model = job().model
    assert trained_of_stage(model, 2, 1) == EVERYTHING == (1.0, 0.0)
    assert trained_elements(model) == parameter_count(model)
    assert finetuned_table(model) == parameter_table(model)


@pytest.mark.parametrize("tied", [False, True])
def test_shares_of_a_stage_are_those_of_its_table(tied: bool) -> None:
    model = job(freeze=["embed.*", "layers.[01].*"], tie_embeddings=tied).model
    assert trained_of_stage(model, 2, 0) == (0.0, 0.0)
    table = parameter_table(model)
    of_last = sum(spec.numel for spec in table if spec.part == "head" or (spec.layer or 0) > 1)
    copy = table[0].numel if tied else 0
    assert trained_of_stage(model, 2, 1).share == of_last / (of_last + copy)
    assert trained_elements(model) == of_last


def test_state_of_a_frozen_model_is_its_weights() -> None:
    """Weights, and gradient and two moments of 4 bytes of what trains."""
    plain, lora = job(), job(lora=LORA)
    count, trained = parameter_count(plain.model), trained_elements(lora.model)
    assert trained == 4 * (4 * (128 + 128) + 4 * (352 + 128))
    assert rank_state(plain, Layout(), 0).state == 4 * 4 * count
    found = rank_state(lora, Layout(), 0)
    assert found.state == pytest.approx(4 * count + 4 * 4 * trained)
    assert found.kept == pytest.approx(4 * count + 3 * 4 * trained)
    assert memory_estimate(lora, Layout()).total_bytes < memory_estimate(plain, Layout()).total_bytes
    frozen = job(freeze=["embed.*", "head.*"])
    ends = sum(
        spec.numel for spec in parameter_table(plain.model) if spec.name in ("embed.weight", "head.weight")
    )
    assert rank_state(frozen, Layout(), 0).state == pytest.approx(4 * 4 * count - 3 * 4 * ends)
    shards = Layout(dp=2, zero=3)
    assert rank_state(frozen, shards, 0).state == pytest.approx(rank_state(frozen, Layout(), 0).state / 2)


def test_gradients_that_are_not_there_do_not_travel() -> None:
    plain, frozen, layout = job(), job(freeze=["layers.*"]), Layout(dp=4, micro_batch=2)
    share = trained_of_stage(frozen.model, 1, 0).share
    whole, rest = (sent_bytes(one, layout, 0)["replicas"] for one in (plain, frozen))
    assert 0 < share < 0.5
    assert rest == pytest.approx(share * whole)
    sharded = Layout(dp=4, zero=1, micro_batch=2)
    whole, rest = (sent_bytes(one, sharded, 0)["replicas"] for one in (plain, frozen))
    assert rest == pytest.approx((1 + share) / 2 * whole), "weights are gathered all the same"


def test_a_frozen_parameter_costs_two_thirds() -> None:
    plain, frozen, lora = job(), job(freeze=["layers.*"]), job(lora=LORA)
    full = flops_per_token(plain.model, 128)
    still = parameter_count(plain.model) - trained_elements(frozen.model)
    assert flops_per_token(frozen.model, 128) == full - 2 * still
    count, added = parameter_count(plain.model), trained_elements(lora.model)
    assert flops_per_token(lora.model, 128) == full - 2 * count + 6 * added


@pytest.mark.parametrize("model", [{"lora": LORA}, {"freeze": ["layers.*"]}, {}])
def test_causes_of_memory_tell_gradients_from_weights(model: dict[str, Any]) -> None:
    asked = job(**model)
    count, trained = parameter_count(asked.model), trained_elements(asked.model)
    adapters = trained if "lora" in model else 0
    found = memory_by_cause(asked, Layout(), 0)
    told = {cause.cause: cause.bytes for cause in explain_memory(asked, Layout(), 0)}
    for one in (found, told):
        assert one["weights"] == pytest.approx(4 * (count + adapters))
        assert one["gradients"] == pytest.approx(4 * trained)
        assert one["optimizer"] == pytest.approx(8 * trained)
