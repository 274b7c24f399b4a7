"""A module of the user's own in one process: its seeds, its ties, its stages, and what it must still be."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from picotron_ray.config.import_path import import_object, one_line
from picotron_ray.config.schema.custom_model import BuiltModel
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.errors import ConfigError
from picotron_ray.layout.shards import whole as whole_box
from picotron_ray.models.custom import (
    CustomDefinition,
    build_whole,
    keep_only,
    logits_of,
    on_meta,
    set_parameter,
    ties_of,
)
from picotron_ray.models.parameters import ParameterSpec

HERE = __name__


class Drawn(nn.Module):
    """One parameter of what each generator gives, and their type."""

    def __init__(self) -> None:
        super().__init__()
        values = [torch.rand(()).item(), random.random(), np.random.rand()]
        self.drawn = nn.Parameter(torch.tensor(values))
        self.eval()


class Tied(nn.Module):
    """An embedding that the head shares, three blocks, two modules after them, and a buffer."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.scale = nn.Identity()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(2), nn.Linear(2, 5, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.arange(3.0))

    def forward(self, tokens: Tensor) -> Any:
        x = self.scale(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return type("Output", (), {"logits": self.head(self.norm(x))})()


def drawn() -> nn.Module:
    return Drawn()


def tied(tie: bool = True) -> nn.Module:
    return Tied(tie)


def nothing() -> None:
    return None


def named(name: str, **arguments: Any) -> ModelConfig:
    return ModelConfig.model_construct(builder=f"{HERE}:{name}", arguments=arguments, vocab_size=5)


def built(**facts: Any) -> BuiltModel:
    shapes = tuple((name, tuple(p.shape)) for name, p in Tied(facts.pop("tie", True)).named_parameters())
    return BuiltModel(
        **{
            "parameters": shapes,
            "blocks": ("blocks.0", "blocks.1", "blocks.2"),
            "pipeline": ("embed", "scale", "blocks.0", "blocks.1", "blocks.2", "norm", "head"),
            "tensor": {"blocks.0": "colwise", "blocks.1": "rowwise"},
            "cuts": {"blocks.0.weight": 0, "blocks.0.bias": 0, "blocks.1.weight": 1},
            "tensor_degrees": (2,),
            "embeddings": ("embed.weight",),
            "hidden_size": 2,
            "activations": 4,
            **facts,
        }
    )


def definition(seed: int = 3, tie: bool = True, **facts: Any) -> CustomDefinition:
    found = built(tie=tie, **facts)
    return CustomDefinition(named("tied", tie=tie).model_copy(update={"built": found}), seed)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


def values(seed: int) -> Tensor:
    return build_whole(named("drawn"), seed).get_parameter("drawn").detach()


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 7])
def test_all_three_generators_are_seeded_and_put_back(seed: int) -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    torch.set_default_dtype(torch.float64)
    try:
        first, second, third = values(seed), values(seed), values(seed + 1)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert np.array_equal(before[2], after[2])
    assert first.dtype == torch.float32
    assert torch.equal(first, second)
    assert not (first == third).any(), "each of them follows the seed"
    expected = random.Random(seed).random(), np.random.RandomState(seed % 2**32).rand()
    assert first[1:].tolist() == pytest.approx(expected, rel=1e-6)


def test_a_built_module_trains() -> None:
    assert build_whole(named("drawn"), 0).training


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model.builder: .*:nothing returns a NoneType, expected a torch"):
        build_whole(named("nothing"), 0)
    with pytest.raises(ConfigError, match=r"raises TypeError: .*unexpected keyword .* check model.arguments"):
        build_whole(named("drawn", wide=1), 0)
    with pytest.raises(ConfigError, match=f"^key: saw {HERE}:gone, but {HERE} has no gone; name a function"):
        import_object("key", f"{HERE}:gone")
    assert import_object("key", f"{HERE}:tied") is tied
    assert one_line(ValueError("a\n  b" + "c" * 400)) == "ValueError: a b" + "c" * 297


def test_ties_are_known_by_all_their_names() -> None:
    model = Tied()
    assert ties_of(model) == [["embed.weight", "head.weight"]]
    bare = on_meta(model)
    assert ties_of(bare) == [["embed.weight", "head.weight"]]
    assert {parameter.device.type for parameter in bare.parameters()} == {"meta"}
    assert model.mask.tolist() == [0.0, 1.0, 2.0]
    other = nn.Parameter(torch.ones(5, 2))
    set_parameter(model, "head.weight", other)
    assert model.head.weight is other
    assert ties_of(model) == []


def test_logits_are_the_output_or_in_it() -> None:
    logits = torch.ones(1)
    assert logits_of(logits) is logits_of(type("Output", (), {"logits": logits})()) is logits


def test_only_a_chain_is_kept() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2), nn.ReLU())
    kept = model[1]
    keep_only(model, ("1", "2"), ("0",))
    x = torch.randn(3, 2)
    assert torch.equal(model.forward(x), kept(x).relu())
    assert list(dict(model.named_children())) == ["1", "2"]


def test_the_table_holds_what_launch_found() -> None:
    found = definition()
    assert found.styles == (("blocks.0", "copy_colwise"), ("blocks.1", "sum_rowwise"))
    table = {spec.name: spec for spec in found.table}
    assert table["embed.weight"] == ParameterSpec(
        "embed.weight", (5, 2), None, "embed", None, True, None, embedding=True
    )
    assert table["blocks.1.weight"] == ParameterSpec("blocks.1.weight", (2, 2), 1, "block", 1, True, None)
    assert table["blocks.0.bias"] == ParameterSpec("blocks.0.bias", (2,), 0, "block", 0, False, None)
    assert table["norm.bias"] == ParameterSpec("norm.bias", (2,), None, "head", None, False, None)


@pytest.mark.parametrize(
    ("first", "last", "embed", "head", "names"),
    [
        (0, 2, True, False, ["embed", "scale", "blocks"]),
        (1, 2, False, False, ["blocks"]),
        (2, 3, False, True, ["blocks", "norm", "head"]),
    ],
)
def test_a_stage_is_a_part_of_the_chain(
    first: int, last: int, embed: bool, head: bool, names: list[str]
) -> None:
    found = definition(tie=False)
    stage = found.build(first, last, embed=embed, head=head)
    assert [name for name, _ in stage.named_children()] == names
    assert list(stage.get_submodule("blocks")._modules) == [str(n) for n in range(first, last)]
    assert found.blocks(stage) == [stage.get_submodule(f"blocks.{n}") for n in range(first, last)]
    found.materialise(stage, torch.device("cpu"))
    x = torch.zeros(1, 2, dtype=torch.int64) if embed else torch.zeros(1, 2, 2)
    assert stage.forward(x).shape == ((1, 2, 5) if head else (1, 2, 2))


def test_stages_one_after_the_other_are_the_whole() -> None:
    found = definition(tie=False)
    initial = found.initial(5)

    def run(bounds: list[tuple[int, int]]) -> Tensor:
        x = torch.tensor([[4, 0, 2]])
        for index in range(len(bounds)):
            stage = found.stage(bounds, index)
            found.materialise(stage, torch.device("cpu"))
            with torch.no_grad():
                for name, parameter in stage.named_parameters():
                    parameter.copy_(initial(found.specs[name], whole_box(found.specs[name].shape)))
            x = logits_of(stage.forward(x))
        return x

    whole = run([(0, 3)])
    assert whole.shape == (1, 3, 5)
    for bounds in ([(0, 1), (1, 2), (2, 3)], [(0, 2), (2, 3)]):
        assert torch.equal(run(bounds), whole)


def test_the_whole_gives_logits_ties_again_and_begins_as_it_was_built() -> None:
    found = definition()
    whole = found.build(0, 3, embed=True, head=True)
    found.materialise(whole, torch.device("cpu"))
    assert whole.head.weight is whole.embed.weight
    assert whole.mask.tolist() == [0.0, 1.0, 2.0]
    assert whole.forward(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 5)
    initial, expected = found.initial(3), dict(build_whole(named("tied"), 3).named_parameters())
    assert all(torch.equal(initial(spec, whole_box(spec.shape)), expected[spec.name]) for spec in found.table)
    assert not any(initial(spec, whole_box(spec.shape)).requires_grad for spec in found.table)
    assert found.close_norms(whole) == 0


def test_another_module_than_launch_saw_is_refused() -> None:
    shapes = built().parameters
    for parameters, other in (
        ((("embed.weight", (6, 2)), *shapes[1:]), r"embed.weight\[5, 2\]"),
        ((*shapes, ("more", (1,))), "fewer parameters"),
    ):
        with pytest.raises(
            ConfigError, match=f":tied built {other} here, which is not the module that launch"
        ):
            definition(parameters=parameters)
    with pytest.raises(ConfigError, match=r"^model.built: saw nothing, expected what launch finds"):
        CustomDefinition(named("tied"), 0)
