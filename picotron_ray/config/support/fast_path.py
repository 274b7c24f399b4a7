"""The fast path of a device: what ``auto`` comes to for blocks, projections, tp and the loss. Torch-free.

By `bench gpu` on an H100 (docs/gpu): SmolLM-1.7B's blocks compiled and its projections fused train half as
fast again; the linear cross-entropy costs time and saves logits, which are large where vocabularies are.
"""

from __future__ import annotations

from picotron_ray.config.schema.compute import KernelsConfig, OverlapMethod
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.kernels import compiled_by, compiles_whole
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import is_quantized, is_selective
from picotron_ray.layout.schedules import schedule_of

LARGE_VOCABULARY = 1 << 16
"""Tokens from which on logits take more memory than they save time."""


def compiles_blocks(job: JobConfig, device: str, layout: Layout) -> bool:
    """Whether blocks are compiled in a layout; by auto on CUDA: fp8, and what is one graph there."""
    asked = job.kernels.compile
    if asked != "auto":
        return asked
    if compiled_by(job):  # fp8, which CPUs do not have; what emulates it there compiles nothing
        return device == "cuda"
    if device != "cuda" or not _may_compile(job):
        return False
    return compiles_whole(job, device, layout) and not _looks_inside(job, layout)


def _may_compile(job: JobConfig) -> bool:
    """Whether ``kernels.compile: auto`` may come to true on CUDA, in some layout."""
    kernels = job.kernels
    bars = (
        job.model.builder is not None,  # nobody has seen that it can be traced
        job.precision not in ("bf16", "fp16"),  # others are for proofs, or have kernels of their own
        kernels.cuda_graphs or kernels.deterministic,
        kernels.norm not in ("auto", "eager"),
        kernels.activation != "eager",
        job.adaptive_precision.error_bound is not None,
        job.meta.on,
    )
    return not any(bars)


def _looks_inside(job: JobConfig, layout: Layout) -> bool:
    """Whether a layout treats activations within blocks, or splits their backward pass."""
    inside = is_selective(layout.recompute) or is_quantized(layout.recompute) or layout.offload_activations
    return inside or _splits_backward(job, layout)


def _splits_backward(job: JobConfig, layout: Layout) -> bool:
    return layout.pp > 1 and schedule_of(layout.schedule, job.layout.actions).splits_backward


def fuses_projections(job: JobConfig, device: str, layout: Layout) -> bool:
    """Whether projections of one input are one product; by auto on CUDA, where their weights lie together.

    ZeRO and stacks of experts have each weight in storage of its own: joining them makes a copy, which blocks
    keep for backward.
    """
    asked, kernels = job.kernels.projections, job.kernels
    if asked != "auto":
        return asked == "fused"
    bars = (
        job.model.builder is not None,
        job.precision in ("fp64", "fp8"),
        kernels.activation == "compiled",
        job.adaptive_precision.error_bound is not None,
        layout.zero > 0,
        job.model.moe.experts > 0,
        job.meta.on,  # weights of an inner step lie anywhere
    )
    return device == "cuda" and not any(bars)


def overlap_method(job: JobConfig, device: str, layout: Layout) -> OverlapMethod:
    """Choose what hides tensor parallelism's transfers; by auto the ring on CUDA, where nothing bars it.

    Compiled blocks hold the backend's collectives, and so does a way that was asked for.
    """
    asked = job.kernels.tp_overlap
    if asked != "auto":
        return asked
    bars = (
        job.model.builder is not None,
        job.precision == "fp8",
        job.kernels.compile is True,
        job.comm.activations != "auto",
        _splits_backward(job, layout),
    )
    return "ring" if device == "cuda" and layout.tp > 1 and not any(bars) else "none"


def linear_loss(job: JobConfig, device: str) -> bool:
    """Whether the loss is taken with the head's product; by auto on CUDA for large vocabularies.

    And wherever its chunk was said.
    """
    asked, model = job.kernels.loss, job.model
    if asked != "auto":
        return asked == "linear"
    if job.kernels.loss_chunk != KernelsConfig().loss_chunk:
        return True
    large = model.builder is None and model.vocab_size >= LARGE_VOCABULARY
    return device == "cuda" and large and not job.meta.on


def settled(job: JobConfig, device: str, layout: Layout | None = None, missing: str = "") -> JobConfig:
    """Return the job with a definite loss on a device; in a layout, with every kernel definite.

    Args:
        missing: what the compiler lacks here. By auto nothing is compiled then.

    Raises:
        LayoutError: it was asked for, and lacks something.
    """
    kernels: dict[str, object] = {"loss": "linear" if linear_loss(job, device) else "logits"}
    if layout is not None:
        kernels["projections"] = "fused" if fuses_projections(job, device, layout) else "separate"
        kernels["tp_overlap"] = overlap_method(job, device, layout)
        kernels["compile"] = compiles_blocks(job, device, layout) and not missing
        if job.kernels.compile is True and missing:
            raise LayoutError(f"kernels.compile: saw true, but {missing}; install one, or use auto")
        if job.precision == "fp8" and device == "cuda" and missing:
            raise LayoutError(
                f"precision: saw fp8, which is compiled, but {missing}; install one, or use bf16"
            )
    return job.model_copy(update={"kernels": job.kernels.model_copy(update=kernels)})
