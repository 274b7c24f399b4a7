"""Rules between keys at their borders: what just passes, and whole problems of layouts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, get_args

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.custom_model import BuiltModel
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.check import check
from picotron_ray.config.validation.compute import _least_dp
from picotron_ray.config.validation.layout import (
    Degrees,
    LayoutProblem,
    fitting_degrees,
    layout_problems,
    nearest_layouts,
    splits_backward,
)
from picotron_ray.config.validation.schedules import least_micro_batch, virtual_stages
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import ContextVariant, Layout, Zero

MIXTURE = {"moe": {"experts": 4, "intermediate_size": 32}}
VARIANTS = get_args(ContextVariant)
ONE_F_ONE_B = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
OWN = {"builder": "mine:build", "vocab_size": 300}
BUILT = BuiltModel(
    parameters=(("layers.0.up", (8, 8)), ("layers.1.up", (8, 8))),
    blocks=("layers.0", "layers.1"),
    pipeline=("layers.0", "layers.1"),
    tensor={},
    cuts={},
    tensor_degrees=(4,),
    hidden_size=8,
    activations=8,
    no_tensor="only 4 was tried",
    no_pipeline="its blocks are no chain",
)


def job(**sections: Any) -> JobConfig:
    return parse_job({"cluster": {"max_workers": 8, **sections.pop("cluster", {})}, **sections})


def own(layout: dict[str, Any] | None = None, **facts: Any) -> JobConfig:
    """A model of your own that launch has looked into."""
    config = job(model=OWN, layout=layout or {})
    built = BuiltModel.model_validate({**BUILT.model_dump(), **facts})
    return config.model_copy(update={"model": config.model.model_copy(update={"built": built})})


@pytest.mark.parametrize(
    "sections",
    [
        # one stage splits nothing, whatever the schedule would do
        {"kernels": {"compile": True}, "layout": {"schedule": "zbv", "pp": 1, "recompute": "full"}},
        {"kernels": {"norm": "compiled"}, "layout": {"schedule": "zbv", "pp": 1}},
        {"layout": {"schedule": "zbv", "pp": 1, "dp": 2, "zero": 3}},
        # two of the three that do not go together
        {"kernels": {"projections": "fused", "activation": "compiled"}},
        {"kernels": {"projections": "fused"}, "layout": {"offload_activations": True}},
        {"kernels": {"activation": "compiled"}, "layout": {"offload_activations": True}},
        {"kernels": {"attention": "flash-attn"}, "layout": {"cp": 2}, "precision": "bf16"},
        # windows under context parallelism, in every variant
        *({"model": {"sliding_window": 8}, "layout": {"cp": 2, "context": variant}} for variant in VARIANTS),
        # 7 ids in parts of 2: one is left for the fourth rank
        {
            "model": {"vocab_size": 7, "kv_heads": 4},
            "data": {"source": "memmap", "path": "x"},
            "layout": {"tp": 4},
        },
        # selective recomputation around experts that no block gathers
        {"model": MIXTURE, "layout": {"recompute": "selective", "dp": 4, "ep": 2, "zero": 0}},
        {"model": MIXTURE, "layout": {"recompute": "selective", "dp": 4, "ep": 1, "zero": 3}},
        {"model": MIXTURE, "layout": {"recompute": "selective", "dp": 4, "ep": 4, "zero": 3}},
        {"model": {"rope_scaling": {"low_frequency_factor": 3.9}}},
        {"model": {"builder": "mine:build", "arguments": {"scale": 1.5}}},
    ],
    ids=str,
)
def test_what_just_passes(sections: dict[str, Any]) -> None:
    assert check(job(**sections)) == []


@pytest.mark.parametrize(
    ("layout", "model", "seen"),
    [
        ({}, {}, "dp=1 tp=4 pp=4 = 16 workers"),
        ({"zero": 1, "replicate": 2}, {}, "dp=4 tp=4 pp=4 = 64 workers"),
        ({"replicate": 2}, {}, "dp=4 tp=4 pp=4 = 64 workers"),
        ({"replicate": "auto"}, {}, "dp=1 tp=4 pp=4 = 16 workers"),
        ({"ep": 2}, MIXTURE, "dp=2 tp=4 pp=4 = 32 workers"),
        ({"ep": 2, "replicate": 3}, MIXTURE, "dp=6 tp=4 pp=4 = 96 workers"),
        ({"ep": 4, "cp": 2}, MIXTURE, "dp=2 tp=4 pp=4 cp=2 = 64 workers"),
        ({"ep": 1, "cp": 4}, MIXTURE, "dp=1 tp=4 pp=4 cp=4 = 64 workers"),
    ],
    ids=str,
)
def test_as_few_replicas_are_counted_as_experts_and_copies_need(
    layout: dict[str, Any], model: dict[str, Any], seen: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        job(layout={"tp": 4, "pp": 4, **layout}, model={"kv_heads": 4, **model})
    (line,) = caught.value.problems
    text = (
        f": saw {seen.replace(' ', ' x ', seen.split(' = ')[0].count(' '))}, more than cluster.max_workers=8;"
    )
    assert text in line


def test_copies_cut_at_least_the_state() -> None:
    """Zero is left open: two copies mean at least stage 1, which recorded steps do not take; one copy 0."""
    with pytest.raises(ConfigError) as caught:
        job(kernels={"cuda_graphs": True}, layout={"replicate": 2})
    assert "saw true with layout.zero=1, which communicates within the passes" in str(caught.value)
    assert job(kernels={"cuda_graphs": True}).layout.zero == "auto"


@pytest.mark.parametrize(("workers", "least"), [(7, 1), (8, 4), (9, 4)])
def test_replicas_that_make_the_micro_batches_of_a_list(workers: int, least: int) -> None:
    """Eight rows in two micro-batches of one: four replicas, on eight workers."""
    layout = {"schedule": "custom", "actions": ONE_F_ONE_B, "micro_batch": 1}
    config = job(layout={**layout, "dp": 4}, data={"global_batch": 8})
    fewer = config.cluster.model_copy(update={"max_workers": workers // 2})
    assert _least_dp(config.model_copy(update={"cluster": fewer}), 1) == least
    assert _least_dp(job(data={"global_batch": 8}), 3) == 3


def test_a_list_that_cannot_be_read_is_the_only_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        job(layout={"schedule": "custom", "actions": ["0F0"]}, kernels={"compile": True})
    assert len(caught.value.problems) == 1


def test_offloading_activations_needs_blocks() -> None:
    assert check(own({"offload_activations": True})) == []
    (problem,) = check(own({"offload_activations": True}, blocks=(), pipeline=()))
    assert (problem.key, problem.text) == (
        "layout.offload_activations",
        "saw true, but mine:build has no repeated block; say in model.plan.blocks which are",
    )


def test_what_a_model_of_your_own_cannot_be_cut_into() -> None:
    two = LayoutProblem("layout.tp", (), "saw 2; only 4 was tried")
    assert layout_problems(own(), Layout(tp=2)) == [two]
    assert layout_problems(own(), Layout(tp=4)) == layout_problems(own(), Layout()) == []
    assert layout_problems(own(tensor_degrees=()), Layout()) == []
    unchained = LayoutProblem("layout.pp", (), "saw 2; its blocks are no chain")
    assert layout_problems(own(pipeline=()), Layout(pp=2)) == [unchained]
    text = "saw 3, more than the model's blocks: 2; every stage needs a layer"
    assert layout_problems(own(), Layout(pp=3)) == [LayoutProblem("layout.pp", ("model.layers",), text)]
    assert layout_problems(own(), Layout(pp=2)) == layout_problems(job(model=OWN), Layout(pp=9)) == []


def test_recorded_steps_name_all_that_communicates() -> None:
    config = job(kernels={"cuda_graphs": True})
    assert layout_problems(config, Layout(dp=2)) == []
    text = "saw true with layout.tp=2, layout.pp=2, layout.cp=2, layout.zero=1, which communicates within the"
    assert layout_problems(config, Layout(dp=2, tp=2, pp=2, cp=2, zero=1)) == [
        LayoutProblem(
            "kernels.cuda_graphs",
            ("layout.tp", "layout.pp", "layout.cp", "layout.zero"),
            f"{text} passes; use dp alone, or false",
        )
    ]


def test_selective_recomputation_needs_blocks_that_gather_no_experts() -> None:
    """Under ZeRO-1 already: experts that are cut over two ranks each are gathered within a block."""
    config = job(model=MIXTURE)
    cases: list[tuple[Zero, int, int, bool]] = [
        (0, 2, 4, True),
        (1, 1, 4, True),
        (1, 2, 2, True),
        (1, 2, 4, False),
    ]
    for zero, ep, dp, fits in cases:
        layout = Layout(dp=dp, ep=ep, zero=zero, recompute="selective")
        assert (layout_problems(config, layout) == []) is fits
        assert layout_problems(config, replace(layout, recompute="full")) == []


def test_what_a_schedule_says_of_one_stage() -> None:
    """Nothing: stages per rank and a split backward pass are a pipeline's."""
    config = job(layout={"schedule": "zbv", "virtual_stages": "auto"})
    assert [virtual_stages(config, pp) for pp in (1, 2)] == [1, 2]
    assert [virtual_stages(job(), pp) for pp in (1, 2)] == [1, 1]
    split = [splits_backward(config, Layout(pp=pp, schedule="zbv", virtual_stages=pp)) for pp in (1, 2)]
    assert split == [False, True]
    assert not splits_backward(job(), Layout(pp=2))


def test_the_smallest_micro_batch() -> None:
    listed = {"schedule": "custom", "actions": ONE_F_ONE_B}
    free = job(layout=listed, data={"global_batch": 8})
    assert [least_micro_batch(free, dp) for dp in (1, 2, 3, 4)] == [4, 2, 2, 1]
    assert [least_micro_batch(job(), dp) for dp in (1, 4)] == [1, 1]


# --- degrees that fit ----------------------------------------------------------------------------------


def test_degrees_are_shown_with_context_where_it_is_shared() -> None:
    assert str(Degrees(4, 2, 1, 1)) == "dp=4 tp=2 pp=1"
    assert str(Degrees(1, 1, 3, 2)) == "dp=1 tp=1 pp=3 cp=2"


@pytest.mark.parametrize("workers", [1, 6, 8])
@pytest.mark.parametrize(
    "config",
    [
        job(model={"kv_heads": 4, "layers": 3}, data={"global_batch": 4}, layout={"cp": "auto"}),
        job(model={"kv_heads": 4, "layers": 3}, data={"global_batch": 4}),
        job(model={**MIXTURE, "layers": 8}, layout={"ep": 2, "cp": "auto"}),
        own({"schedule": "gpipe"}),
        own({"schedule": "gpipe"}, pipeline=()),
    ],
    ids=["cp", "no cp", "ep", "own", "own in one stage"],
)
def test_fitting_degrees_are_those_without_a_problem(config: JobConfig, workers: int) -> None:
    ep = 1 if config.layout.ep == "auto" else config.layout.ep
    every = itertools.product(range(1, workers + 1), repeat=4)
    expected = {
        (dp, tp, pp, cp)
        for dp, tp, pp, cp in every
        if dp * tp * pp * cp <= workers
        and (cp == 1 or config.layout.cp != 1)
        and not layout_problems(
            config,
            Layout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, schedule=config.layout.schedule),
        )
    }
    found = fitting_degrees(config, workers)
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_nearest_is_the_product_of_ratios() -> None:
    """Four is nearer to three than two is; of those as far away the larger come first."""
    config = job(model={"kv_heads": 4, "layers": 4, "heads": 4})
    assert nearest_layouts(config, Degrees(1, 1, 3, 1), 8, count=1) == ["dp=1 tp=1 pp=3"]
    assert nearest_layouts(config, Degrees(1, 3, 1, 1), 8, count=5) == [
        "dp=1 tp=4 pp=1",  # 4/3
        "dp=1 tp=2 pp=1",  # 3/2
        "dp=1 tp=4 pp=2",  # 8/3, of 8 workers
        "dp=2 tp=4 pp=1",
        "dp=1 tp=2 pp=2",  # 3, of 4
    ]
