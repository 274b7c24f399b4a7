"""Kernels that a device offers, for a precision, the widths of a model and a layout. Torch-free."""

from __future__ import annotations

from typing import Literal

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.precision import COMPUTE_BYTES
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.registry import family_of

WIDEST_HEAD = 256
"""Width of the widest heads of FlashAttention-2 and of cuDNN."""

CUDNN_HEAD = 128
"""Width of the widest heads for which cuDNN's kernel is taken unasked: it was timed on heads of 64."""

Backend = Literal["flash", "efficient", "cudnn", "flash-attn", "math"]
Norm = Literal["eager", "closed-form", "compiled"]


def windowed(job: JobConfig) -> bool:
    """Whether a token sees fewer than all tokens before it in its row."""
    window = job.model.sliding_window
    return window is not None and window < job.data.sequence_length


def has_sinks(job: JobConfig) -> bool:
    """Whether heads have sinks, which enter by a kernel's log-sum-exp."""
    return job.model.builder is None and family_of(job.model).sinks


def attention_backends(job: JobConfig, device: str, parts: int = 1, *, hopper: bool = False) -> list[Backend]:
    """List the ``kernels.attention`` of a device (``cpu`` or ``cuda``), the one of ``auto`` first.

    All of them give their log-sum-exp too, for parts of rows (context parallelism). Masks and windows need
    those that take them, adaptive precision those that fp32 has too, or flash where `by_type` says so, and
    ``kernels.deterministic`` those whose backward pass has a deterministic way. Sinks are for all but cuDNN,
    whose log-sum-exp nobody compared over whole rows. Scores are capped by the
    formulas and by the package flash-attn, which auto does not take: it may not be there.

    Args:
        parts: of a row that attention has keys of.
        hopper: whether a CUDA device has compute capability 9.0 or later, where cuDNN comes before flash.
    """
    adaptive = job.adaptive_precision.error_bound is not None
    if job.meta.on:  # the others have no second derivative, or none that vmap knows
        return ["math"]
    if job.model.attention_softcap is not None:
        packaged = device == "cuda" and "flash-attn" in _on_cuda(job) and not adaptive
        return ["math", "flash-attn"] if packaged else ["math"]
    if device == "cpu":
        return ["flash", "math"]
    without: set[Backend] = set()
    if job.data.keeps_documents_apart or windowed(job) or job.kernels.deterministic or has_sinks(job):
        without.add("cudnn")
    if adaptive:
        without |= {"cudnn", "flash-attn"} if by_type(job, parts) else {"flash", "cudnn", "flash-attn"}
    offered = [backend for backend in _on_cuda(job) if backend not in without]
    hopper = hopper and parts == 1 and job.model.head_size <= CUDNN_HEAD
    first = [backend for backend in offered if hopper and backend == "cudnn"]
    return first + [backend for backend in offered if backend not in first]


def by_type(job: JobConfig, parts: int) -> bool:
    """Whether parts in low precision may have flash, and those in fp32 efficient: both without masks."""
    masks = job.data.keeps_documents_apart or windowed(job)
    return job.adaptive_precision.error_bound is not None and parts == 1 and not masks


def full_backend(job: JobConfig, device: str, parts: int, backend: Backend) -> Backend | None:
    """Return the backend of parts in fp32 beside ``backend``, under adaptive precision; None: the same."""
    return "efficient" if device == "cuda" and backend == "flash" and by_type(job, parts) else None


def _on_cuda(job: JobConfig) -> list[Backend]:
    """List those that compute in the job's precision, with heads of its size."""
    if job.precision == "fp64":
        return ["math"]
    low = job.precision in ("bf16", "fp16", "fp8")
    if job.model.head_size % (8 if low else 4):  # loads are of 16 bytes
        return ["math"]
    if low and job.model.head_size <= WIDEST_HEAD:
        return ["flash", "cudnn", "flash-attn", "efficient", "math"]
    return ["efficient", "math"]


def attention_problem(job: JobConfig, device: str, parts: int | None = None) -> str | None:
    """Explain why ``kernels.attention`` cannot be had there; None where it can."""
    asked, cp = job.kernels.attention, job.layout.cp
    if parts is None:  # before there is a layout
        parts = cp if isinstance(cp, int) and job.layout.context != "ulysses" else 1
    offered = attention_backends(job, device, parts)
    if asked == "auto" or asked in offered:
        return None
    cuda, heads = device == "cuda", job.model.head_size
    said = {
        f"{device} with precision {job.precision}": True,
        "document masks": job.data.keeps_documents_apart,
        f"meta.strategy={job.meta.strategy}": job.meta.on,
        "a sliding window": cuda and windowed(job),
        "scores that are capped": job.model.attention_softcap is not None,
        "attention sinks": cuda and has_sinks(job),
        "kernels.deterministic": cuda and job.kernels.deterministic,
        f"heads of {heads}": cuda and (heads % 8 > 0 or heads > WIDEST_HEAD),
    }
    where = " and ".join(words for words, met in said.items() if met)
    return f"saw {asked}, expected auto or one of {', '.join(offered)} on {where}"


def attention_masks(job: JobConfig, parts: int) -> bool:
    """Whether attention keeps masks as tensors; true where the device is not known yet.

    Args:
        parts: of a row that attention has keys of; over parts, and with sinks, masks are made as they are
            used and not kept.
    """
    if parts > 1 or job.model.builder is not None or not (job.data.keeps_documents_apart or windowed(job)):
        return False
    if has_sinks(job):
        return False
    asked = job.kernels.attention
    if asked == "auto" and (job.cluster.device == "cuda" or job.model.attention_softcap is not None):
        asked = attention_backends(job, "cuda")[0]
    # flash-attn and CUDA's flash are told where documents start and how far a query looks back
    return asked != "flash-attn" and (asked != "flash" or job.cluster.device != "cuda")


def overlap_problem(job: JobConfig, device: str) -> str | None:
    """Explain why ``kernels.tp_overlap`` cannot be had on a device (``auto``: not known yet)."""
    if job.kernels.tp_overlap == "symmetric-memory" and device == "cpu":
        return "saw symmetric-memory, but workers run on CPUs, where torch has none; use ring or none"
    return None


def norm_kernel(job: JobConfig, device: str) -> Norm:
    """Choose the kernel of RMSNorm on a device; auto is the closed form where torch has no kernel."""
    asked, model = job.kernels.norm, job.model
    if asked != "auto":
        return asked
    able = (
        model.builder is None
        and not job.meta.on
        and family_of(model).norms == "RMSNorm"
        and job.kernels.compile is not True
    )
    return "closed-form" if able and device == "cpu" else "eager"


def hidden_widths(job: JobConfig) -> dict[str, int]:
    """List widths of hidden layers, by key."""
    moe = job.model.moe
    if not moe.experts:
        return {"model.intermediate_size": job.model.intermediate_size}
    shared = moe.shared_intermediate_size
    return {
        **({"model.intermediate_size": job.model.intermediate_size} if moe.first_dense_layers else {}),
        "model.moe.intermediate_size": moe.intermediate_size,
        **({"model.moe.shared_intermediate_size": shared} if shared else {}),
    }


GROUPED_ROW_BYTES = 16
"""Of which every row of a grouped product's matrices is a multiple (torch, GroupedMMUtils.h: strides)."""


def ungrouped_widths(job: JobConfig, tp: int) -> dict[str, int]:
    """Find the widths, by key, of a tensor-parallel rank's experts that no grouped product takes."""
    item = COMPUTE_BYTES[job.precision]
    inner = "model.moe.intermediate_size"
    widths = {"model.hidden_size": job.model.hidden_size, inner: job.model.moe.intermediate_size // tp}
    return {key: width for key, width in widths.items() if width * item % GROUPED_ROW_BYTES}


def groups_experts(job: JobConfig, device: str, tp: int) -> bool:
    """Whether the products of experts are grouped on a device; by auto only where they can be."""
    asked = job.kernels.experts
    able = device == "cuda" and job.precision != "fp64" and not ungrouped_widths(job, tp)
    return asked == "grouped" or (asked == "auto" and able)


def compiled_by(job: JobConfig) -> str:
    """Return the key by which blocks are compiled whatever the layout; empty: there is none.

    The casts of fp8 layers are fused into few kernels by the compiler alone.
    """
    if job.kernels.compile is True:
        return "kernels.compile"
    return "precision" if job.precision == "fp8" and job.kernels.compile == "auto" else ""


COMPILED_BY = {"kernels.compile": "kernels.compile=true", "precision": "precision=fp8"}
"""By the key of `compiled_by`, the setting."""


def compiles(job: JobConfig) -> bool:
    """Whether workers of this job, settled for their device (`fast_path`), compile something."""
    return job.kernels.compile is True or "compiled" in (job.kernels.norm, job.kernels.activation)


def compiles_whole(job: JobConfig, device: str, layout: Layout) -> bool:
    """Whether a compiled block is one graph: nothing inside communicates, or waits for a number."""
    counts_documents = (
        job.data.keeps_documents_apart and not attention_masks(job, layout.row_parts) and device == "cuda"
    )
    return layout.tp == layout.cp == 1 and not job.model.moe.experts and not counts_documents
