"""What ``auto`` comes to for compiled blocks, projections and the loss."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.fast_path import compiles_blocks, settled
from picotron_ray.config.support.kernels import attention_backends
from picotron_ray.config.validation.check import check
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.search import choose_layout
from picotron_ray.planner.sent_bytes import sent_bytes

ONE = Layout(micro_batch=4)


def job(**sections: Any) -> JobConfig:
    return parse_job({"precision": "bf16", "data": {"global_batch": 8}, **sections})


def came(at: JobConfig, device: str, layout: Layout = ONE) -> tuple[object, str, str]:
    kernels = settled(at, device, layout).kernels
    return kernels.compile, kernels.projections, kernels.loss


def test_by_device() -> None:
    assert came(job(), "cuda") == (True, "fused", "logits")
    for device in ("cpu", "auto", "meta"):
        assert came(job(), device) == (False, "separate", "logits")
    wide = job(model={"vocab_size": 128256, "hidden_size": 64, "layers": 2})
    assert came(wide, "cuda") == (True, "fused", "linear")
    assert came(wide, "cpu") == (False, "separate", "logits")


def test_what_was_asked_for_stays() -> None:
    for device in ("cpu", "cuda"):
        asked = job(kernels={"compile": False, "projections": "separate", "loss": "linear"})
        assert came(asked, device) == (False, "separate", "linear")
        assert came(job(kernels={"compile": True, "projections": "fused"}), device)[:2] == (True, "fused")


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, micro_batch=4),
        Layout(cp=2, micro_batch=4),
        Layout(micro_batch=4, recompute="selective"),
        Layout(micro_batch=4, recompute="int8"),
        Layout(micro_batch=4, offload_activations=True),
        Layout(pp=2, schedule="zbv", virtual_stages=2, micro_batch=2),
    ],
    ids=str,
)
def test_layouts_in_which_blocks_stay_eager(layout: Layout) -> None:
    assert came(job(), "cuda", layout)[0] is False


@pytest.mark.parametrize(
    "layout", [Layout(dp=2, zero=3), Layout(pp=2, micro_batch=2), Layout(recompute="full")]
)
def test_layouts_in_which_they_are_compiled(layout: Layout) -> None:
    assert came(job(), "cuda", layout)[0] is True


@pytest.mark.parametrize(
    "sections",
    [
        {"precision": "fp64"},
        {"precision": "fp32"},
        {"kernels": {"norm": "compiled"}},
        {"kernels": {"activation": "compiled"}},
        {"kernels": {"deterministic": True}, "cluster": {"device": "cuda"}},
        {"kernels": {"cuda_graphs": True}, "cluster": {"device": "cuda"}},
        {"adaptive_precision": {"error_bound": 0.1}},
    ],
    ids=str,
)
def test_jobs_whose_blocks_stay_eager(sections: dict[str, Any]) -> None:
    assert came(job(**sections), "cuda")[0] is False


def test_fp8_is_compiled_in_every_layout_on_cuda() -> None:
    asked = job(precision="fp8", cluster={"device": "cuda"}, data={"sequence_length": 64, "global_batch": 8})
    for layout in (Layout(), Layout(tp=2), Layout(cp=2), Layout(dp=2, zero=3)):
        assert came(asked, "cuda", layout)[0] is True
    with pytest.raises(LayoutError, match="precision: saw fp8, which is compiled, but no compiler was found"):
        settled(asked, "cuda", Layout(), missing="no compiler was found")


@pytest.mark.parametrize("recompute", ["auto", "none", "full", "selective"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize(
    "kernels", [{}, {"norm": "compiled"}, {"activation": "compiled"}, {"loss": "linear"}], ids=str
)
def test_what_auto_comes_to_breaks_no_rule(recompute: str, precision: str, kernels: dict[str, str]) -> None:
    at = job(
        precision=precision, kernels=kernels, layout={"recompute": recompute}, cluster={"device": "cuda"}
    )
    layout = Layout(micro_batch=4, recompute="none" if recompute == "auto" else recompute)
    assert not check(settled(at, "cuda", layout))


def test_a_plan_on_cuda_leaves_selection_to_eager_blocks() -> None:
    """Selective recomputation and compiled blocks exclude each other: compiled ones are worth more."""
    at = job(cluster={"device": "cuda"})
    layout = choose_layout(at, 1).layout
    assert compiles_blocks(at, "cuda", layout)


def test_hopper_takes_cudnn_where_it_can() -> None:
    plain, masked = job(model={"hidden_size": 64}), job(data={"document_masks": True, "global_batch": 8})
    assert attention_backends(plain, "cuda", hopper=True)[0] == "cudnn"
    assert attention_backends(plain, "cuda")[0] == "flash"
    assert "cudnn" not in attention_backends(masked, "cuda", hopper=True)
    broad = job(model={"hidden_size": 512, "heads": 2, "kv_heads": 2})
    assert attention_backends(broad, "cuda", hopper=True)[0] == "flash"
    assert attention_backends(plain, "cuda", 2, hopper=True)[0] == "flash"


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(dp=2, zero=3)], ids=str)
def test_weights_that_do_not_lie_together_are_not_joined(layout: Layout) -> None:
    assert came(job(), "cuda", layout)[1] == "separate"
    mixture = job(model={"moe": {"experts": 4, "intermediate_size": 32}})
    assert came(mixture, "cuda")[1] == "separate"
    assert came(job(), "cuda", Layout(dp=2, micro_batch=2))[1] == "fused"


def test_a_chunk_that_is_said_is_applied() -> None:
    for device in ("cpu", "cuda"):
        assert came(job(kernels={"loss_chunk": 64}), device)[2] == "linear"


TP = Layout(tp=2, micro_batch=4)


@pytest.mark.parametrize(
    ("sections", "device", "layout", "method"),
    [
        ({}, "cuda", TP, "ring"),
        ({}, "cpu", TP, "none"),
        ({}, "cuda", ONE, "none"),
        ({"precision": "fp32"}, "cuda", TP, "ring"),
        ({"precision": "fp8", "cluster": {"device": "cuda"}}, "cuda", TP, "none"),
        ({"kernels": {"compile": True}}, "cuda", TP, "none"),
        ({"comm": {"activations": "mesh"}}, "cuda", TP, "none"),
        ({"model": {"builder": "mine:build"}}, "cuda", TP, "none"),
        ({}, "cuda", Layout(tp=2, pp=2, schedule="zbv", virtual_stages=2, micro_batch=2), "none"),
        ({"kernels": {"tp_overlap": "none"}}, "cuda", TP, "none"),
        ({"kernels": {"tp_overlap": "ring"}}, "cpu", TP, "ring"),
    ],
    ids=str,
)
def test_what_overlaps_tensor_parallelism(
    sections: dict[str, Any], device: str, layout: Layout, method: str
) -> None:
    kernels = settled(job(**sections), device, layout).kernels
    assert kernels.tp_overlap == method
    assert settled(job(**sections), device).kernels.tp_overlap == job(**sections).kernels.tp_overlap


def test_a_ring_by_auto_keeps_less_and_sends_more() -> None:
    at = [job(cluster={"device": "cuda"}, kernels={"tp_overlap": name}) for name in ("auto", "ring", "none")]
    kept = [memory_estimate(one, TP).total_bytes for one in at]
    sent = [sent_bytes(one, TP, 0)["tp"] for one in at]
    assert kept[0] == kept[1] < kept[2]
    assert sent[0] == sent[1] > sent[2]
