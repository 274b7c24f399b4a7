"""Models of the user's own: looked into, cut as planned, and at every layout the same as in one process."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.errors import ConfigError, LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.models.build import definition_of
from picotron_ray.planner.model_sizes import parameter_count, stage_bounds, stage_parameters
from picotron_ray.train.custom_model.inspect import inspect
from picotron_ray.train.engine import build_engine
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, Result, make_job, run_layout
from tests.support.gloo.parity import check, compare, reference, thinned
from tests.support.gloo.pool import Pool


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def model(name: str, plan: dict[str, Any] | None = None, **arguments: Any) -> ModelConfig:
    values = {"builder": f"own_models:{name}", "arguments": arguments, "plan": plan or {}}
    return ModelConfig.model_validate({"vocab_size": 24, **values})


@functools.cache
def looked_into(config: ModelConfig) -> ModelConfig:
    """As launch hands it to the workers."""
    return config.model_copy(update={"built": inspect(make_job("sgd", 12, config))[0]})


def built(name: str, plan: dict[str, Any] | None = None, **arguments: Any) -> ModelConfig:
    if name == "gpt2":
        pytest.importorskip("transformers")
    return looked_into(model(name, plan, **arguments))


@pytest.mark.parametrize(
    ("layout", "global_batch"),
    thinned(
        [
            (Layout(dp=2, tp=2, zero=3, micro_batch=2), 7),
            (Layout(dp=2, pp=2, micro_batch=2), 10),
            (Layout(tp=2, pp=2, micro_batch=3), 12),
        ],
        (0, 1),
    ),
)
def test_a_loss_of_ones_own(pool: Pool, layout: Layout, global_batch: int) -> None:
    own = looked_into(model("chain").model_copy(update={"loss": "own_models:focal"}))
    check(pool, layout, global_batch, own)
    losses = [reference("sgd", global_batch, config).loss[0] for config in (own, built("chain"))]
    assert losses[0] < 0.999 * losses[1], "not cross-entropy's"


# --- every layout as in one process ----------------------------------------------------------------------

# fmt: off
LAYOUTS = [
    ("encoder", Layout(dp=2, micro_batch=3), 12),
    ("encoder", Layout(dp=2, zero=2, micro_batch=2), 7),
    ("encoder", Layout(dp=2, zero=3, micro_batch=3), 12),
    ("encoder", Layout(tp=2, micro_batch=6), 12),
    ("encoder", Layout(tp=3, micro_batch=6), 7),
    ("encoder", Layout(dp=2, tp=2, zero=0, micro_batch=3), 7),
    ("encoder", Layout(dp=2, tp=2, zero=3, micro_batch=3), 12),
    ("gpt2", Layout(dp=2, micro_batch=3), 12),
    ("gpt2", Layout(dp=2, zero=3, micro_batch=2), 7),
    ("gpt2", Layout(tp=2, micro_batch=6), 12),
    ("gpt2", Layout(dp=2, tp=2, zero=2, micro_batch=3), 12),
    ("chain", Layout(dp=2, tp=2, zero=3, micro_batch=3), 12),
    ("chain", Layout(tp=4, micro_batch=4), 12),
    ("chain", Layout(dp=2, pp=2, zero=3, micro_batch=2), 10),
    ("chain", Layout(tp=2, pp=2, micro_batch=2), 7),
    ("in_place", Layout(dp=2, zero=3, micro_batch=2), 7),
]
# fmt: on


@pytest.mark.parametrize(("name", "layout", "global_batch"), thinned(LAYOUTS, (4, 9, 11, 13)))
def test_layout_equals_one_process(pool: Pool, name: str, layout: Layout, global_batch: int) -> None:
    config = built(name)
    ranks = check(pool, layout, global_batch, config)
    assert config.built is not None
    names_of_the_module(config, ranks)
    said = " ".join(ranks[0].applied)
    cut = len(config.built.tensor) // layout.pp
    assert (f"tensor parallel over {layout.tp}, {cut} modules" in said) == (layout.tp > 1)


FROZEN = [
    ("chain", ("0.*", "1.*", "2.mlp.*"), Layout(dp=2, pp=2, zero=3, micro_batch=2), 10),
    ("encoder", ("embed.*", "*.linear1.weight"), Layout(dp=2, tp=2, zero=3, micro_batch=3), 12),
    ("encoder", ("*.bias", "encoder.layers.0.*"), Layout(tp=2, micro_batch=6), 12),
]


@pytest.mark.parametrize(("name", "patterns", "layout", "global_batch"), thinned(FROZEN, (0, 1)))
def test_frozen_parts_equal_one_process(
    pool: Pool, name: str, patterns: tuple[str, ...], layout: Layout, global_batch: int
) -> None:
    config = built(name).model_copy(update={"freeze": patterns})
    ranks = check(pool, layout, global_batch, config)
    names_of_the_module(config, ranks)
    moments = {part[0].partition("/")[2] for rank in ranks for part in rank.state if "/" in part[0]}
    frozen = {spec.name for spec in definition_of(config, 0).table if spec.frozen}
    assert frozen
    assert not moments & frozen


def test_freezing_nothing_or_all_of_an_own_model_is_refused() -> None:
    for pattern, words in (("embd.*", "names no parameter; the nearest is embed"), ("*", "name all")):
        asked = model("encoder").model_copy(update={"freeze": (pattern,)})
        with pytest.raises(ConfigError, match=rf"^model\.freeze: .*{words}"):
            inspect(make_job("sgd", 12, asked))


def names_of_the_module(config: ModelConfig, ranks: list[Result]) -> None:
    """State is kept under the module's own names, uncut, with every box held by one state group."""
    whole = {
        name: tuple(p.shape)
        for name, p in definition_of(config, 0).stage(stage_bounds(config, 1), 0).named_parameters()
    }
    assert {(name, shape) for rank in ranks for name, shape, *_ in rank.state if "/" not in name} == set(
        whole.items()
    )


def test_a_sum_left_out_is_noticed(pool: Pool) -> None:
    """Tensor parallelism without the sum of the input's gradients."""
    job = make_job("sgd", 12, built("encoder"))
    layout = Layout(tp=2, micro_batch=6)
    ranks = [found[0] for found in pool.run(2, run_without_sum, [job], layout)]
    with pytest.raises(AssertionError, match=r"gradient of|replicas disagree about"):
        assert compare(job, layout, ranks) == []


def run_without_sum(job: Any, configs: list[JobConfig], layout: Layout) -> list[Result]:
    import picotron_ray.parallel.tensor.tensor_parallel as tensor

    kept = tensor._Copy.backward
    tensor._Copy.backward = staticmethod(lambda ctx, *gradients: (gradients[0], None))
    try:
        return run_layout(job, configs, layout)
    finally:
        tensor._Copy.backward = kept


def test_weights_of_step_0_are_the_builders_own(pool: Pool) -> None:
    """A function of the seed alone: neither the state of a generator nor other builds enter."""
    config = built("encoder")
    values = []
    for seed, noise in ((1, 0), (1, 5), (2, 0)):
        torch.manual_seed(noise)
        job = make_job("sgd", 12, config).model_copy(update={"seed": seed})
        engine = build_engine(job, Layout(micro_batch=4), 0, None, CPU)
        engine.initialise(job.seed)
        values.append({item.shard.name: item.tensor.detach().clone() for item in engine.state()})
        engine.close()
    first, again, other = values
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert first["embed.weight"].std() == pytest.approx(1.0, rel=0.2)  # nn.Embedding's own


def test_buffers_keep_their_values() -> None:
    job = make_job("sgd", 12, built("encoder"))
    engine = build_engine(job, Layout(micro_batch=4), 0, None, CPU)
    mask = dict(engine._models[0].named_buffers())["mask"]
    assert mask.dtype == torch.float64
    assert torch.equal(mask == 0, torch.ones(32, 32).tril().bool())
    engine.close()


def test_launch_refuses_before_anything_starts(tmp_path: Path) -> None:
    """The builder is found in the folder of the launch, tried, and refused by one line."""
    (tmp_path / "mine.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(2, 2)\n")
    (tmp_path / "job.yaml").write_text("name: refused\nmodel: {builder: 'mine:build'}\n")
    command = [sys.executable, "-m", "picotron_ray.launch", "job.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: model.builder: forward of tokens [1, 128] (data.sequence_length) raises")
    assert not (tmp_path / "runs").exists()


# --- what may be cut -------------------------------------------------------------------------------------


def test_a_plan_is_proposed_and_said() -> None:
    found, said = inspect(make_job("sgd", 12, model("encoder")))
    assert found.blocks == ("encoder.layers.0", "encoder.layers.1")
    assert set(found.tensor) == {f"encoder.layers.{i}.linear{n}" for i in (0, 1) for n in (1, 2)}
    assert found.tensor_degrees == (2, 3, 4)
    assert "encoder.layers.*.linear1 colwise, encoder.layers.*.linear2 rowwise; 70% of" in said[1]
    chained, _ = inspect(make_job("sgd", 12, model("chain")))
    assert chained.pipeline == tuple(map(str, range(7)))
    assert {chained.tensor[f"1.mix.{part}"] for part in "qkv"} == {"colwise"}


def test_a_pair_with_a_softmax_between_stays_whole() -> None:
    found, _ = inspect(make_job("sgd", 12, model("softmaxed")))
    assert found.tensor == {}
    assert found.no_tensor.startswith("cutting 1.up and its like over 2, the model gives other logits")


def test_a_plan_by_import_path_and_by_hand() -> None:
    by_path, _ = inspect(make_job("sgd", 12, model("chain", {"path": "own_models:CHAIN_PLAN"})))
    assert set(by_path.tensor) == {f"{i}.mlp.{n}" for i in range(1, 5) for n in (0, 2)}
    none, _ = inspect(make_job("sgd", 12, model("chain", {"tensor": {}, "pipeline": ["*"]})))
    assert none.tensor == {}
    assert len(none.pipeline) == 7


REFUSED = {
    "not_causal": ({}, "logits depend on later tokens"),
    "noisy": ({}, "other logits the second time"),
    "batch_norm": ({}, "writes buffer norm.running_mean"),
    "broken": ({}, "own_models:broken raises RuntimeError: no such luck"),
    "no_module": ({}, "returns a int, expected a torch.nn.Module"),
    "nothing": ({}, "own_models has no nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused(name: str) -> None:
    refused(model(name), "model.builder", REFUSED[name][1])


def refused(config: ModelConfig, key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inspect(make_job("sgd", 12, config))
    (line,) = caught.value.problems
    assert line.startswith(f"{key}: ")
    assert text in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dropout": 0.1}, "drops out with p=0.1"),
        (
            {"vocabulary": 25},
            "forward gives [1, 8, 25], expected logits [batch, seq, model.vocab_size] = [1, 8, 24]",
        ),
        ({"longest": 4}, "forward of tokens [1, 8] (data.sequence_length) raises"),
        ({"colour": 3}, "raises TypeError"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], text: str) -> None:
    refused(model("encoder", **arguments), "model.builder", text)


@pytest.mark.parametrize(
    ("plan", "key", "text"),
    [
        ({"blocks": "layer.*"}, "model.plan.blocks", "names no module; the model's own parts are embed"),
        ({"tensor": {"norm": "colwise"}}, "model.plan.tensor", "norm is a LayerNorm, expected a linear"),
        ({"tensor": {"head": "colwise"}}, "model.plan.tensor", "cut over 2, the model gives other logits"),
        (
            {"pipeline": ["embed", "encoder.layers.*", "norm", "head"]},
            "model.plan.pipeline",
            "parameter posit",
        ),
        ({"path": "own_models:broken"}, "model.plan.path", "gives no plan: RuntimeError"),
    ],
    ids=str,
)
def test_plans_that_do_not_fit(plan: dict[str, Any], key: str, text: str) -> None:
    refused(model("encoder", plan), key, text)


def test_layouts_that_the_module_does_not_allow() -> None:
    job = make_job("sgd", 12, built("encoder"))
    assert [m.key for m in layout_problems(job, Layout(tp=2, micro_batch=2))] == []
    (tensor,) = layout_problems(job, Layout(tp=5, micro_batch=2))
    assert tensor.text.startswith("saw 5; expected one of 1, 2, 3, 4")
    (pipeline,) = layout_problems(job, Layout(pp=2, micro_batch=2))
    assert "EncoderModel is no nn.Sequential" in pipeline.text


def test_the_planner_counts_the_module() -> None:
    for name in ("encoder", "chain"):
        config = built(name)
        module = definition_of(config, 0).stage(stage_bounds(config, 1), 0)
        assert parameter_count(config) == sum(p.numel() for p in module.parameters())
    for stage in (0, 1):
        part = definition_of(config, 0).stage(stage_bounds(config, 2), stage)
        assert stage_parameters(config, 2, stage) == sum(p.numel() for p in part.parameters())


def test_another_module_on_a_node_is_refused() -> None:
    config = built("encoder")
    assert config.built is not None
    other = config.built.model_copy(update={"parameters": config.built.parameters[1:]})
    job = make_job("sgd", 12, config.model_copy(update={"built": other}))
    with pytest.raises(ConfigError, match="not the module that launch looked into"):
        build_engine(job, Layout(micro_batch=4), 0, None, CPU)
    with pytest.raises(LayoutError, match="expected a layer each"):
        stage_bounds(built("chain"), 5)
