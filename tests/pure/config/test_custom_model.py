"""What a config may say of a model of the user's own, before anything is imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from picotron_ray.bench.mfu.settings import changed
from picotron_ray.config.export import public_dict, to_yaml
from picotron_ray.config.load import load_job
from picotron_ray.config.resume import compare
from picotron_ray.config.schema.custom_model import BuiltModel
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.check import check
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputedBlocks
from picotron_ray.models.sizes import ModelSizes
from picotron_ray.planner.comm_cost import tensor_passes
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.device_profile import CPU
from picotron_ray.planner.kept_activations import offloaded_activations
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.model_sizes import flops_per_token, parameter_count, sizes_of, stage_flops_per_token
from picotron_ray.planner.search import choose_layout
from picotron_ray.runtime.ray_cluster.fingerprint import builder_fingerprint

OWN = "model={vocab_size: 264, builder: 'mine:build', arguments: {layers: 2, shape: [1, 2]}}"
BUILT = BuiltModel(
    parameters=(("embed.weight", (264, 8)), ("a.0.up", (32, 8)), ("a.0.norm", (8,)), ("a.1.up", (32, 8)),
                ("a.1.norm", (8,)), ("head.weight", (264, 8))),
    blocks=("a.0", "a.1"),
    pipeline=("embed", "a.0", "a.1", "head"),
    tensor={},
    cuts={"a.0.up": 0, "a.1.up": 0},
    tensor_degrees=(2,),
    hidden_size=8,
    activations=100,
    no_tensor="expected one of 1, 2: the rest was not tried on the model",
)  # fmt: skip


def own(*overrides: str) -> JobConfig:
    return load_job("tiny", [OWN, *overrides])


def looked_into(*overrides: str) -> JobConfig:
    job = own(*overrides)
    return job.model_copy(update={"model": job.model.model_copy(update={"built": BUILT})})


def test_sizes_are_those_of_the_built_module() -> None:
    """Two blocks of 32 x 8, which tensor parallelism cuts, and a norm of 8, which it leaves whole."""
    assert sizes_of(looked_into().model) == ModelSizes(
        layers=2, hidden=8, embed=2112, block=264, head=2112, tied=0, whole_block=8, whole_embed=2112,
        whole_head=2112, activations=100, products=100, at_work=16, pointwise=200, sequence_cut=False,
        vocabulary=264, scores=8, matrices=256,
    )  # fmt: skip
    layout = Layout(tp=2, micro_batch=2, offload_activations=True)  # which cuts no activations
    again = RecomputedBlocks(0, 0, 2)
    assert offloaded_activations(looked_into(), layout, 0, again) == 2 * 32 * 2 * 100 * 4
    kept = memory_estimate(looked_into(), Layout(tp=2, micro_batch=2)).activation_bytes
    assert kept == 2 * 32 * (2 * 100 * 4 + 3 * 264 * 4 + 8 * 4)  # three copies of logits, and what goes in
    link = replace(CPU, link_bytes_s=1.0, latency_s=0.0)
    hidden = 2 * 32 * 8 * 4
    assert tensor_passes(looked_into(), Layout(tp=2, micro_batch=2), link, ()) == (4 * hidden, hidden)


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("model.heads=8", "model.heads: saw a value with model.builder, which takes only"),
        ("model.builder=mine.build", "model.builder: saw 'mine.build', expected a string that matches"),
        ("model.builder=null", "model.arguments: saw a value without model.builder"),
        ("model.arguments.when=2020-01-01", "model.arguments: saw something other than finite plain data"),
        ("model.plan.tensor={a: diagonal}", "model.plan.tensor"),
        (f"model.built={BUILT.model_dump_json()}", "model.built: saw a value, expected none"),
        ("model.plan.block=a", "model.plan.block: saw an unknown key, did you mean model.plan.blocks?"),
    ],
)
def test_bad_keys(override: str, start: str) -> None:
    with pytest.raises(ConfigError) as caught:
        own(override)
    assert any(line.startswith(start) for line in caught.value.problems), caught.value.problems


def test_parameters_lie_before_in_or_after_the_blocks() -> None:
    """One block in a chain of four modules, of which two follow it; and the same with no chain known."""
    parameters = (("embed.weight", (5, 2)), ("block.up", (3, 2)), ("block.norm", (2,)), ("norm.weight", (2,)),
                  ("head.weight", (5, 2)))  # fmt: skip
    chain = ("embed", "block", "norm", "head")
    facts = {"parameters": parameters, "blocks": ("block",), "pipeline": chain, "cuts": {"block.up": 0}}
    built = BuiltModel.model_validate({**BUILT.model_dump(), **facts})
    places = [("embed", None), ("block", 0), ("block", 0), ("head", None), ("head", None)]
    assert [built.part_of(name) for name, _ in parameters] == places
    assert built.elements == {"embed": (10, 10), "block": (8, 2), "head": (12, 12)}
    assert built.matrices == 6
    unchained = BuiltModel.model_validate({**built.model_dump(), "pipeline": (), "embeddings": ("block.up",)})
    assert unchained.elements == {"embed": (22, 22), "block": (8, 2), "head": (0, 0)}
    assert unchained.matrices == 0
    bare = BuiltModel.model_validate({**built.model_dump(), "parameters": (), "blocks": (), "pipeline": ()})
    assert bare.elements == {"embed": (0, 0), "block": (0, 0), "head": (0, 0)}


def test_depth_is_known_once_launch_has_looked() -> None:
    assert (own().model.depth, looked_into().model.depth, JobConfig().model.depth) == (0, 2, 4)


def test_the_config_reads_back(tmp_path: Path) -> None:
    job = own("layout.tp=2")  # whether the model allows it is known once launch has built it
    path = tmp_path / "job.yaml"
    path.write_text(to_yaml(job))
    assert load_job(str(path)) == job
    assert hash(job) == hash(own("layout.tp=2"))
    filled = looked_into()
    assert JobConfig.model_validate(filled.model_dump(mode="json")).model.built == BUILT
    with pytest.raises(ConfigError, match="once launch has built it"):
        parameter_count(job.model)


def test_muon_needs_matrices_in_blocks() -> None:
    job = looked_into("optimizer.name=muon")
    assert check(job) == []
    states = [memory_estimate(found, Layout()).state_bytes for found in (looked_into(), job)]
    assert states[0] - states[1] == 4 * 2 * 32 * 8, "one moment less of each block's matrix"
    built = BuiltModel.model_validate({**BUILT.model_dump(), "blocks": ("a.1.norm",), "pipeline": ()})
    bare = job.model.model_copy(update={"built": built})
    (problem,) = check(job.model_copy(update={"model": bare}))
    assert problem.key == "optimizer.name"
    assert problem.text.startswith("saw muon, but mine:build has no matrix inside a repeated block")


def test_what_may_change_on_resume() -> None:
    old = public_dict(looked_into())
    assert compare(old, looked_into()) == []
    assert dict(compare(old, looked_into("model.plan.blocks=a.*"))) == {"model.plan.blocks": "may"}
    assert ("model.arguments.depth", "refuse") in compare(old, looked_into("model.arguments.depth=3"))
    fewer = looked_into()
    fewer = fewer.model_copy(
        update={"model": fewer.model.model_copy(update={"arguments": {"shape": [1, 2]}})}
    )
    assert compare(old, fewer) == [("model.arguments.layers", "refuse")]
    other = BUILT.model_copy(update={"parameters": BUILT.parameters[1:]})
    changed = fewer.model_copy(update={"model": looked_into().model.model_copy(update={"built": other})})
    assert compare(old, changed) == [("model.built.parameters", "refuse")]


def test_the_planner_counts_with_what_launch_found() -> None:
    job = looked_into("cluster.max_workers=4", "layout.tp=2", "layout.pp=2", "data.global_batch=8")
    table = 264 * 8
    assert parameter_count(job.model) == 2 * table + 2 * (32 * 8 + 8)
    assert flops_per_token(job.model, 16) == 6 * parameter_count(job.model) + 12 * 2 * 8 * 16
    whole = stage_flops_per_token(job.model, 16, 1, 0)
    assert whole / 2 < stage_flops_per_token(job.model, 16, 1, 0, tp=2) < whole
    assert BUILT.part_of("a.1.norm") == ("block", 1)
    assert BUILT.part_of("head.weight") == ("head", None)
    choice = choose_layout(job, 4)
    assert (choice.layout.tp, choice.layout.pp) == (2, 2)
    cut, uncut = Layout(tp=2, micro_batch=2), Layout(micro_batch=2)
    assert memory_estimate(job, cut).state_bytes == 4 * 4 * (parameter_count(job.model) - 2 * 32 * 8 / 2)
    assert step_cost(job, cut, CPU).tensor_s > 0 == step_cost(job, uncut, CPU).tensor_s


def test_degrees_that_were_not_tried_are_not_chosen() -> None:
    job = looked_into("layout.tp=auto", "layout.pp=auto", "layout.dp=1", "cluster.max_workers=4")
    assert choose_layout(job, 3).layout.tp in (1, 2)
    for key in ("layout.tp=4", "layout.pp=4"):
        with pytest.raises(ConfigError):
            choose_layout(looked_into("cluster.max_workers=4", key), 4)


def test_the_builders_source_is_known_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lone_model.py").write_text("raise SystemExit('never run')")
    package = tmp_path / "model_package"
    package.mkdir()
    for name in ("__init__", "net", "parts"):
        (package / f"{name}.py").write_text(f"raise SystemExit('{name}')")
    lone, net = builder_fingerprint("lone_model:build"), builder_fingerprint("model_package.net:build")
    assert len(lone) == len(net) == 16
    assert builder_fingerprint("lone_model:other") == lone
    (package / "parts.py").write_text("raise SystemExit('changed')")
    assert builder_fingerprint("model_package.net:build") != net
    for missing in ("no_such_model:build", "model_package.none:build", "no_such.model:build"):
        assert builder_fingerprint(missing) == "not importable"


def test_a_benchmarks_switch_keeps_what_was_built() -> None:
    job = looked_into()
    assert changed(job, ["steps=3"]) == job.model_copy(update={"steps": 3})
