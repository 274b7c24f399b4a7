"""Rules of ``precision: fp8`` and its section."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.compute import Fp8Config
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.fp8 import least_multiple, product_widths, unshared_widths
from picotron_ray.config.support.kernels import hidden_widths
from picotron_ray.layout.layout import Layout

Broken = tuple[str, tuple[str, ...], str]
"""As `layout.LayoutProblem`."""


def _fp8(job: JobConfig) -> Iterator[Problem]:
    if job.precision != "fp8":
        for key, plain in Fp8Config():
            if (asked := getattr(job.fp8, key)) != plain:
                text = f"saw {asked} with precision={job.precision}, which has none; drop it or use"
                yield Problem(f"fp8.{key}", f"{text} precision=fp8", ("precision",))
        return
    if job.model.builder is not None:
        text = "saw fp8 with model.builder, whose linear layers are not looked into; use bf16"
        yield Problem("precision", text, ("model.builder",))
    if job.kernels.compile is False:
        text = "saw false with precision=fp8, whose casts are slower than what products gain unless they are"
        yield Problem("kernels.compile", f"{text} compiled; leave it at auto, or use bf16", ("precision",))
    if job.fp8.gather == "fp8":
        yield from _gather(job)


def _gather(job: JobConfig) -> Iterator[Problem]:
    scaling = job.fp8.scaling
    if scaling != "tensorwise":
        whose = {"rowwise": "rows of a shard", "mxfp8": "32 values"}[scaling]
        text = (
            f"saw fp8 with fp8.scaling={scaling}, whose scales are of {whose} and would have to travel too;"
        )
        yield Problem("fp8.gather", f"{text} use bf16, or fp8.scaling=tensorwise", ("fp8.scaling",))
    if job.layout.zero == 0:
        text = "saw fp8 with layout.zero=0, which gathers no weights; leave it at auto"
        yield Problem("fp8.gather", text, ("layout.zero",))


def width_problems(job: JobConfig, cp: int, tp: int) -> Iterator[Broken]:
    """Refuse degrees that leave widths of which fp8 has no products."""
    if job.precision != "fp8" or job.model.builder is not None:
        return
    sizes = product_widths(job, tp) | {"tokens of a row": job.data.sequence_length // cp}
    least = least_multiple(job)
    odd = [f"{key}: {size}" for key, size in sizes.items() if size % least]
    if odd:
        axes = " ".join(f"{name}={degree}" for name, degree in (("tp", tp), ("cp", cp)) if degree > 1)
        saw = "fp8" if job.fp8.scaling != "mxfp8" else "mxfp8"
        text = f"saw {saw}{f' with {axes}' if axes else ''}, which multiplies multiples of {least}, but"
        against = ("layout.tp", "layout.cp", "model.hidden_size", "model.heads", "data.sequence_length")
        yield "precision", (*against, *hidden_widths(job)), f"{text} {', '.join(odd)}; use bf16"


def gather_problems(job: JobConfig, layout: Layout) -> Iterator[Broken]:
    """Refuse shards of unequal size where weights are to be gathered in 8 bits."""
    if job.precision != "fp8" or job.fp8.gather != "fp8" or not layout.zero or job.model.builder is not None:
        return
    odd = [f"{key}: {size}" for key, size in unshared_widths(job, layout).items()]
    if odd:
        text = f"saw fp8 over {layout.shards} shards, which do not divide {', '.join(odd)}; use auto or bf16"
        yield "fp8.gather", ("layout.dp", "layout.cp", "layout.replicate", *hidden_widths(job)), text


RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (_fp8,)
