"""How a rank's stages are built: which steps, in which order, and what is said of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.models.build import definition_of
from picotron_ray.models.definition import StageEnds
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.train import build_stages as module
from picotron_ray.train.build_stages import attention_backend, build_stages, mixtures_of
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, MIXTURE, MODEL, make_job

LOOPED = Layout(pp=2, virtual_stages=2, schedule="interleaved-1f1b")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Steps that were taken; parallelizing a stage says its number."""
    found: list[Any] = []

    def note(name: str, result: Any = None) -> Any:
        return lambda *given: found.append(name) or result

    monkeypatch.setattr(module, "stage_bounds", lambda model, stages: ("bounds", stages))
    monkeypatch.setattr(module, "_stage_plan", lambda *given: given[5])
    monkeypatch.setattr(module, "parallelize", lambda model, mesh, stage: (f"stage {stage} cut",))
    for name in ("set_matrix_products", "lay_together", "pad_shards"):
        monkeypatch.setattr(module, name, note(name))
    return found


@pytest.mark.parametrize("norms", [0, 2])
@pytest.mark.parametrize(
    ("layout", "rank", "stages", "said"),
    [
        (Layout(), 0, [0], ()),
        (Layout(dp=2, zero=1), 1, [0], ()),
        (Layout(pp=2), 1, [1], ("pipeline stage 2 of 2, 1f1b",)),
        (LOOPED, 1, [1, 3], ("pipeline stage 2 and 4 of 4, interleaved-1f1b",)),
    ],
)
def test_every_stage_is_built_alike(
    monkeypatch: pytest.MonkeyPatch,
    log: list[Any],
    norms: int,
    layout: Layout,
    rank: int,
    stages: list[int],
    said: tuple[str, ...],
) -> None:
    monkeypatch.setattr(module, "norm_kernel", lambda job, device: "closed-form" if norms else "plain")
    mesh: Any = SimpleNamespace(layout=layout, at=layout.coordinates(rank))

    def stage(bounds: Any, number: int) -> nn.Module:
        assert bounds == ("bounds", layout.stages)
        return nn.Linear(number + 1, 1)

    definition: Any = SimpleNamespace(
        stage=stage,
        close_norms=lambda model: log.append("close_norms") or norms,
        freeze=lambda model: 0,
        materialise=lambda model, device: log.append(("materialise", device)),
    )
    models, applied = build_stages(make_job("sgd", 4), mesh, definition, CPU)
    assert {number: model.in_features for number, model in models.items()} == {n: n + 1 for n in stages}
    assert all(model.weight.dtype == torch.float64 for model in models.values())
    closed = (f"{norms} norms with gradients in closed form",) if norms else ()
    assert applied == (*said, *closed, f"stage {stages[-1]} cut")
    each = [*["close_norms"][: norms > 0], ("materialise", CPU), *["lay_together"][: layout.zero == 0]]
    assert log == ["set_matrix_products", *[*each, "pad_shards"] * len(stages)]


def test_the_attention_that_is_asked_for_or_the_first_that_runs() -> None:
    job = make_job("sgd", 4)

    def with_(attention: str) -> Any:
        return job.model_copy(update={"kernels": job.kernels.model_copy(update={"attention": attention})})

    assert [attention_backend(with_(name), CPU, Layout()) for name in ("math", "flash")] == ["math", "flash"]
    first = module.attention_backends(with_("auto"), "cpu")
    assert len(first) > 1
    assert attention_backend(with_("auto"), CPU, Layout()) == first[0]
    with pytest.raises(LayoutError, match=r"^kernels\.attention: saw cudnn"):
        attention_backend(with_("cudnn"), CPU, Layout())


def test_mixtures_by_the_number_of_their_layer() -> None:
    definition = definition_of(MIXTURE, 0)
    model = definition.stage(((0, MIXTURE.layers),), 0)  # type: ignore[arg-type]
    found = mixtures_of({0: model}, definition)
    assert [layer for layer, _ in found] == list(range(MIXTURE.layers))
    plain = definition_of(MODEL, 0)
    assert mixtures_of({0: model}, plain) == []


def test_what_a_job_asks_for_is_in_the_plan() -> None:
    table = [
        ParameterSpec(name, (2,), None, "head", None, True, 1.0, trained=name == "a") for name in ("a", "b")
    ]
    functions = {"norm": ("g", "n"), "activation": ("h", "a")}
    definition: Any = SimpleNamespace(
        attention=("at",), styles=(("x", "colwise"),), blocks=lambda model: [model], mixtures=("m",),
        table=table, positions=("p",), ends=lambda model: StageEnds((model,)), fused_linear=("f",),
        functions=functions, tie=print,
    )  # fmt: skip
    model = nn.Identity()

    def plan(job: Any) -> Any:
        return module._stage_plan(job, definition, model, CPU, Layout(), 3, None)

    plain = plan(make_job("sgd", 4))
    assert plain.untrained == {"b"}
    assert (plain.embedding, plain.head) == ((model,), ())
    assert (plain.fused_linear, plain.functions, plain.loss_chunk, plain.fp8) == ((), {}, None, None)
    assert (plain.blocks, plain.stage, plain.attention.window) == ([model], 3, None)
    kernels = KernelsConfig(projections="fused", norm="compiled", loss="linear", loss_chunk=7)
    window = MODEL.model_copy(update={"sliding_window": 3})
    asked = plan(make_job("sgd", 4, window, kernels=kernels, precision="fp8"))
    assert (asked.fused_linear, asked.functions) == (("f",), {"norm": ("g", "n")})
    assert (asked.loss_chunk, asked.fp8, asked.attention.window) == (7, "tensorwise", 3)
