"""What is kept of a rank: names, boxes, and who speaks for the loss scale."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, Shard
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.train.training_state import TrainingState


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, True), (2, False), (3, False)])
def test_all_that_a_rank_keeps_and_its_values_at_step_0(rank: int, speaks: bool) -> None:
    layout, box = Layout(dp=2, pp=2), Box((2,), (2,))
    held = [
        LocalParameter(
            ParameterSpec(name, (4,), None, "embed", None, True, 1.0), box, name == "a", True,
            nn.Parameter(torch.ones(2)),
        )
        for name in "ab"
    ]  # fmt: skip
    began: list[str] = []
    scale, moment = torch.ones(2), torch.ones(2)
    scaling: Any = SimpleNamespace(tensors=lambda: (scale,), initialise=lambda: began.append("scale"))
    definition: Any = SimpleNamespace(
        initial=lambda seed: lambda spec, box: torch.arange(2.0) + box.offset[0] + seed
    )
    mesh: Any = SimpleNamespace(layout=layout, rank=rank)
    state = TrainingState(definition, mesh, held, held[:1], {"exp_avg": {"a": moment}}, scaling)
    assert [(item.shard, item.primary) for item in state.tensors()] == [
        (Shard("a", "float32", (4,), box), True),
        (Shard("b", "float32", (4,), box), False),
        (Shard("exp_avg/a", "float32", (4,), box), True),
        (Shard("scaler/loss_scale", "float32", (2,), Box((0,), (2,))), speaks),
    ]
    assert [item.shard.name for item in state.weights()] == ["a", "b"]
    assert [item.shard.name for item in state.gradients([moment])] == ["a"]
    state.initialise(10)
    assert [parameter.local.tolist() for parameter in held] == [[12.0, 13.0]] * 2
    assert (moment.tolist(), began) == ([0.0, 0.0], ["scale"])
