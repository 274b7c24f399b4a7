"""Kernels that a device offers, at the borders of what each of them takes."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.experts import expert_chunks, pads_experts, rows_sent
from picotron_ray.config.support.kernels import (
    attention_backends,
    attention_masks,
    attention_problem,
    full_backend,
    groups_experts,
    norm_kernel,
    overlap_problem,
    ungrouped_widths,
    windowed,
)
from picotron_ray.layout.layout import Layout


def job(precision: str = "bf16", **sections: dict[str, Any]) -> JobConfig:
    """Heads of 8 and rows of 32 tokens; changes are not judged by the rules between keys."""
    found = JobConfig()
    sections = {
        "model": {"hidden_size": 32, "heads": 4, "kv_heads": 4, **sections.pop("model", {})},
        "data": {"sequence_length": 32, **sections.pop("data", {})},
        **sections,
    }
    changed = {name: getattr(found, name).model_copy(update=update) for name, update in sections.items()}
    return found.model_copy(update={"precision": precision, **changed})


DOCUMENTS = {"document_masks": True}
MIXTURE = job().model.moe.model_copy(update={"experts": 4, "intermediate_size": 16})


def test_a_window_as_long_as_the_row_hides_nothing() -> None:
    found = {window: windowed(job(model={"sliding_window": window})) for window in (None, 31, 32, 33)}
    assert found == {None: False, 31: True, 32: False, 33: False}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (job(), "flash cudnn flash-attn efficient math"),
        (job("fp8"), "flash cudnn flash-attn efficient math"),
        (job(data=DOCUMENTS), "flash flash-attn efficient math"),
        (job(model={"sliding_window": 8}), "flash flash-attn efficient math"),
        (job(adaptive_precision={"error_bound": 0.1}), "flash efficient math"),
        (job(adaptive_precision={"error_bound": 0.1}, data=DOCUMENTS), "efficient math"),
        (job(adaptive_precision={"error_bound": 0.1}, model={"sliding_window": 8}), "efficient math"),
        (job("fp32"), "efficient math"),
        (job("fp64"), "math"),
        (job("fp32", model={"head_dim": 4}), "efficient math"),
        (job("fp32", model={"head_dim": 5}), "math"),
        (job(model={"head_dim": 4}), "math"),
        (job("fp16", model={"head_dim": 9}), "math"),
        (job(model={"head_dim": 16}), "flash cudnn flash-attn efficient math"),
    ],
)
def test_attention_on_cuda(config: JobConfig, expected: str) -> None:
    assert attention_backends(config, "cuda") == expected.split()
    assert attention_backends(config, "cpu") == ["flash", "math"]
    adaptive = config.adaptive_precision.error_bound is not None
    for backend in attention_backends(config, "cuda"):
        full = "efficient" if adaptive and backend == "flash" else None
        assert full_backend(config, "cuda", 1, backend) == full
        assert full_backend(config, "cpu", 1, backend) is None


def test_adaptive_precision_over_parts_of_rows_has_one_kernel() -> None:
    assert attention_backends(job(adaptive_precision={"error_bound": 0.1}), "cuda", 2) == [
        "efficient",
        "math",
    ]


@pytest.mark.parametrize(
    ("asked", "config", "device", "line"),
    [
        ("auto", job("fp64"), "cuda", None),
        ("flash", job(), "cuda", None),
        ("flash", job("fp32"), "cuda", "auto or one of efficient, math on cuda with precision fp32"),
        (
            "cudnn",
            job(model={"sliding_window": 8, "head_dim": 12}),
            "cuda",
            "auto or one of math on cuda with precision bf16 and a sliding window and heads of 12",
        ),
        (
            "cudnn",
            job(data=DOCUMENTS),
            "cuda",
            "auto or one of flash, flash-attn, efficient, math on cuda with precision bf16 and"
            " document masks",
        ),
        (
            "efficient",
            job("fp32", model={"sliding_window": 8, "head_dim": 12}),
            "cpu",
            "auto or one of flash, math on cpu with precision fp32",
        ),
        (
            "cudnn",
            job(model={"head_dim": 9}),
            "cuda",
            "auto or one of math on cuda with precision bf16 and heads of 9",
        ),
        ("flash-attn", job("fp32"), "cuda", "auto or one of efficient, math on cuda with precision fp32"),
    ],
)
def test_what_attention_cannot_do(asked: str, config: JobConfig, device: str, line: str | None) -> None:
    kernels = config.kernels.model_copy(update={"attention": asked})
    found = attention_problem(config.model_copy(update={"kernels": kernels}), device)
    assert found == (line and f"saw {asked}, expected {line}")


def test_flash_attn_is_cudas() -> None:
    asked = job(kernels={"attention": "flash-attn"})
    assert attention_problem(asked, "cuda") is None
    assert attention_problem(asked, "cpu") == (
        "saw flash-attn, expected auto or one of flash, math on cpu with precision bf16"
    )


@pytest.mark.parametrize(("context", "parts"), [("ring", 3), ("all-gather", 3), ("ulysses", 1)])
def test_parts_of_rows_that_attention_has(context: Any, parts: int) -> None:
    assert Layout(cp=3, context=context).row_parts == parts


@pytest.mark.parametrize(
    ("sections", "precision", "asked", "device", "cp", "masks"),
    [
        ({"data": DOCUMENTS}, "bf16", "auto", "cpu", 1, True),
        ({"data": DOCUMENTS}, "bf16", "auto", "auto", 1, True),
        ({"data": DOCUMENTS}, "bf16", "auto", "cuda", 1, False),  # flash
        ({"data": DOCUMENTS}, "fp32", "auto", "cuda", 1, True),  # efficient
        ({"data": DOCUMENTS}, "fp64", "auto", "cuda", 1, True),  # math, the only one
        ({"data": DOCUMENTS}, "bf16", "flash", "cuda", 1, False),
        ({"data": DOCUMENTS}, "bf16", "flash", "cpu", 1, True),
        ({"data": DOCUMENTS}, "bf16", "flash-attn", "auto", 1, False),
        ({"data": DOCUMENTS}, "bf16", "math", "cuda", 1, True),
        ({"data": DOCUMENTS}, "bf16", "math", "cuda", 2, False),
        ({"model": {"sliding_window": 8}}, "bf16", "math", "cuda", 1, True),
        ({"model": {"sliding_window": 8, "builder": "mine:build"}}, "bf16", "math", "cuda", 1, False),
        ({}, "bf16", "math", "cuda", 1, False),
    ],
)
def test_masks_as_tensors(
    sections: dict[str, Any], precision: str, asked: str, device: str, cp: int, masks: bool
) -> None:
    config = job(precision, kernels={"attention": asked}, cluster={"device": device}, **sections)
    assert attention_masks(config, cp) is masks


def test_overlap_by_symmetric_memory_is_not_on_cpus() -> None:
    ring, symmetric = (job(kernels={"tp_overlap": name}) for name in ("ring", "symmetric-memory"))
    assert overlap_problem(symmetric, "cpu") == (
        "saw symmetric-memory, but workers run on CPUs, where torch has none; use ring or none"
    )
    assert overlap_problem(symmetric, "cuda") is overlap_problem(symmetric, "auto") is None
    assert overlap_problem(ring, "cpu") is None


@pytest.mark.parametrize(
    ("sections", "on_cpu", "on_cuda"),
    [
        ({}, "closed-form", "eager"),
        ({"kernels": {"compile": True}}, "eager", "eager"),
        ({"model": {"builder": "mine:build"}}, "eager", "eager"),
        ({"kernels": {"norm": "compiled"}}, "compiled", "compiled"),
        ({"kernels": {"norm": "closed-form"}}, "closed-form", "closed-form"),
    ],
)
def test_norms(sections: dict[str, Any], on_cpu: str, on_cuda: str) -> None:
    assert (norm_kernel(job(**sections), "cpu"), norm_kernel(job(**sections), "cuda")) == (on_cpu, on_cuda)


def test_widths_that_no_grouped_product_takes() -> None:
    """Rows of 16 bytes: 8 values in bf16, 4 in fp32."""
    inner = "model.moe.intermediate_size"
    mixture = {"moe": MIXTURE}
    assert ungrouped_widths(job(model=mixture), 1) == ungrouped_widths(job(model=mixture), 2) == {}
    assert ungrouped_widths(job(model=mixture), 4) == {inner: 4}
    assert ungrouped_widths(job("fp32", model=mixture), 4) == {}
    assert ungrouped_widths(job("fp32", model={**mixture, "hidden_size": 34}), 8) == {
        "model.hidden_size": 34,
        inner: 2,
    }


def test_rows_are_padded_and_chunked_where_it_pays() -> None:
    def mixture(factor: float | None = None, device: str = "cuda", **kernels: Any) -> Any:
        moe = MIXTURE.model_copy(update={"experts": 8, "capacity_factor": factor})
        return job("bf16", model={"moe": moe}, kernels=kernels, cluster={"device": device})

    assert pads_experts(mixture(1.25), "cuda", 2)
    assert not pads_experts(mixture(1.25), "cpu", 2)
    assert not pads_experts(mixture(1.75), "cuda", 2)
    assert not pads_experts(mixture(), "cuda", 2)
    assert pads_experts(mixture(expert_exchange="padded"), "cpu", 2)
    assert not pads_experts(mixture(1.25, expert_exchange="exact"), "cuda", 2)
    assert [rows_sent(mixture(1.25), ep) for ep in (1, 2)] == [1.0, 1.25]
    assert rows_sent(mixture(expert_exchange="padded"), 4) == 4.0
    assert rows_sent(mixture(0.5, expert_exchange="padded"), 4) == 1.0
    assert rows_sent(mixture(), 4) == 1.0
    assert [expert_chunks(mixture(), "cuda", ep) for ep in (2, 4)] == [2, 1]
    assert expert_chunks(mixture(), "cpu", 2) == 1
    assert expert_chunks(mixture(expert_chunks=3), "cpu", 2) == 3


def test_experts_are_grouped_where_they_can_be_or_are_asked_to() -> None:
    def grouped(asked: str, device: str = "cuda", precision: str = "bf16", tp: int = 1) -> bool:
        return groups_experts(job(precision, model={"moe": MIXTURE}, kernels={"experts": asked}), device, tp)

    assert grouped("auto")
    assert not grouped("auto", device="cpu")
    assert not grouped("auto", precision="fp64")
    assert not grouped("auto", tp=4)
    assert grouped("grouped", device="cpu", tp=4)
    assert not grouped("loop")
