"""Rules of learning from tasks: what tasks and strategies need, and what was not shown with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.meta import SINUSOIDS, MetaConfig
from picotron_ray.layout.layout import Layout

AT = "meta.strategy"
OF_DATA = ("sequence_length", "global_batch", "prefetch_steps")
"""Keys of ``data`` that tasks know."""


def meta_layout_problem(job: JobConfig, layout: Layout) -> tuple[str, str] | None:
    """Return the key of a layout that a job with tasks cannot have, and why; None: it can have it.

    A task adapts a whole model on one rank: data parallelism spreads tasks, nothing cuts one.
    """
    if not job.meta.on:
        return None
    asked = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep")}
    for name, degree in asked.items():
        if degree > 1:
            return f"layout.{name}", f"saw {degree} with {AT}={job.meta.strategy}; use {name}=1, and dp"
    if layout.zero:
        text = f"saw {layout.zero} with {AT}={job.meta.strategy}, whose inner steps need whole weights; use 0"
        return "layout.zero", text
    if layout.recompute != "none":
        text = f"saw {layout.recompute} with {AT}={job.meta.strategy}, whose gradients keep all; use none"
        return "layout.recompute", text
    return None


def _unused(job: JobConfig) -> Iterator[Problem]:
    """Refuse keys of ``meta`` without a strategy, and of ``data`` that tasks do not know."""
    if not job.meta.on:
        for key, value in job.meta:
            if value != getattr(MetaConfig(), key):
                text = f"saw {value} with {AT}=none, which has no tasks; say a strategy, or drop it"
                yield Problem(f"meta.{key}", text, (AT,))
        return
    plain = DataConfig()
    for key in DataConfig.model_fields:
        value = getattr(job.data, key)
        if key not in OF_DATA and value != getattr(plain, key):
            text = f"saw {value!r} with {AT}={job.meta.strategy}, whose rows are tasks (meta.tasks); drop it"
            yield Problem(f"data.{key}", text, (AT,))


def _tasks(job: JobConfig) -> Iterator[Problem]:
    meta, model = job.meta, job.model
    if not meta.on:
        return
    if meta.tasks == SINUSOIDS and model.builder is None:
        text = "saw sinusoids, which are numbers, with a model of token ids; use sequences, or say"
        yield Problem("meta.tasks", f"{text} model.builder=picotron_ray.models.regressor:build", (AT,))


def _not_shown(job: JobConfig) -> Iterator[Problem]:
    """Refuse what has no second derivative, or was not shown with inner steps."""
    meta = job.meta
    if not meta.on:
        return
    learned, kernels, optimizer = meta.strategy == "metasgd", job.kernels, job.optimizer
    wrong: tuple[tuple[str, object, bool, str], ...] = (
        ("precision", job.precision, job.precision not in ("fp64", "fp32", "tf32"), "fp32, tf32 or fp64"),
        (
            "adaptive_precision.error_bound",
            job.adaptive_precision.error_bound,
            job.adaptive_precision.error_bound is not None,
            "null",
        ),
        ("model.moe.experts", job.model.moe.experts, job.model.moe.experts > 0, "a dense model"),
        ("model.loss", job.model.loss, job.model.loss is not None, "none: tasks say what is predicted"),
        ("kernels.norm", kernels.norm, kernels.norm not in ("auto", "eager"), "auto or eager"),
        ("kernels.activation", kernels.activation, kernels.activation != "eager", "eager"),
        ("kernels.projections", kernels.projections, kernels.projections == "fused", "separate"),
        ("kernels.loss", kernels.loss, kernels.loss == "linear", "auto or logits"),
        ("kernels.compile", "true", kernels.compile is True, "auto or false"),
        ("kernels.cuda_graphs", "true", kernels.cuda_graphs, "false"),
        ("evaluate.sets", "sets", len(job.evaluate.sets) > 0, "none: held-out tasks are evaluated"),
        ("layout.offload_activations", "true", job.layout.offload_activations, "false"),
        ("optimizer.name", optimizer.name, learned and optimizer.name == "muon", "adamw or sgd"),
        ("optimizer.moments", optimizer.moments, learned and optimizer.moments != "full", "full"),
        ("optimizer.offload", "true", learned and optimizer.offload, "false"),
        ("init_from.optimizer_state", "true", learned and job.init_from.optimizer_state, "false"),
    )
    for key, value, refused, expected in wrong:
        if refused:
            yield Problem(key, f"saw {value} with {AT}={meta.strategy}, expected {expected}", (AT,))


RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (_unused, _tasks, _not_shown)
