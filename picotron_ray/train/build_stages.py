"""The stages of the model that one rank holds: built on the meta device, cut to the layout, given storage."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.kernels import (
    Backend,
    attention_backends,
    attention_problem,
    groups_experts,
    norm_kernel,
    overlap_problem,
    windowed,
)
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.models.definition import ModelDefinition
from picotron_ray.models.layers.fused_linear import lay_together
from picotron_ray.models.layers.moe import MixtureOfExperts
from picotron_ray.parallel.attention.backends import AttentionPlan
from picotron_ray.parallel.data.fsdp import pad_shards
from picotron_ray.parallel.mesh import Mesh
from picotron_ray.parallel.parallelize import Plan, parallelize
from picotron_ray.train.precision.precision import apply_precision, master_dtype, set_matrix_products


def build_stages(
    job: JobConfig, mesh: Mesh, definition: ModelDefinition, device: torch.device
) -> tuple[dict[int, nn.Module], tuple[str, ...]]:
    """This rank's stages by number, weights undefined, and what was applied to them, one phrase each.

    Raises LayoutError where the layout cannot be applied.
    """
    layout, stages = mesh.layout, mesh.layout.rank_stages(mesh.at.pp)
    models: dict[int, nn.Module] = {}
    applied: list[str] = []
    said: tuple[str, ...] = ()
    if layout.pp > 1:
        numbers = " and ".join(str(stage + 1) for stage in stages)
        applied.append(f"pipeline stage {numbers} of {layout.stages}, {layout.schedule}")
    set_matrix_products(job)
    for stage in stages:
        model = definition.stage(layout.stages, stage).to(master_dtype(job))
        closed = norm_kernel(job, device.type) == "closed-form"
        norms = definition.close_norms(model) if closed else 0
        said = (f"{norms} norms with gradients in closed form",) if norms else ()
        said += parallelize(model, mesh, _plan(job, definition, model, device, layout, stage))
        definition.materialise(model, device)
        if not layout.zero:  # FSDP gathers each parameter into storage of its own
            lay_together(model)
        pad_shards(model)
        apply_precision(model, job, device, layout.zero)
        models[stage] = model
    return models, (*applied, *said)


def _plan(
    job: JobConfig,
    definition: ModelDefinition,
    model: nn.Module,
    device: torch.device,
    layout: Layout,
    stage: int,
) -> Plan:
    backend = attention_backend(job, device, layout)
    problem = overlap_problem(job, device.type)
    if problem:
        raise LayoutError(f"kernels.tp_overlap: {problem}")
    return Plan(
        definition.styles,
        definition.blocks(model),
        AttentionPlan(
            definition.attention,
            backend,
            job.data.sequence_length,
            job.model.sliding_window if windowed(job) else None,
        ),
        mixtures=definition.mixtures,
        positions=definition.positions,
        untrained=frozenset(spec.name for spec in definition.table if not spec.trained),
        compiled=job.kernels.compile,
        grouped=groups_experts(job, device.type, layout.tp),
        joint=definition.joint if job.kernels.projections == "fused" else (),
        functions={
            name: at for name, at in definition.functions.items() if getattr(job.kernels, name) == "compiled"
        },
        loss_chunk=job.kernels.loss_chunk if job.kernels.loss == "linear" else None,
        fp8=job.precision == "fp8",
        overlap=job.kernels.tp_overlap,
        device=device,
        tie=definition.tie,
        stage=stage,
    )


def attention_backend(job: JobConfig, device: torch.device, layout: Layout) -> Backend:
    """The implementation of attention that runs; LayoutError where the one asked for does not."""
    problem = attention_problem(job, device.type, layout.cp)
    if problem:
        raise LayoutError(f"kernels.attention: {problem}")
    asked = job.kernels.attention
    return attention_backends(job, device.type, layout.cp)[0] if asked == "auto" else asked


def mixtures_of(
    models: Mapping[int, nn.Module], definition: ModelDefinition
) -> list[tuple[int, MixtureOfExperts]]:
    """Layer number and module of every mixture of experts on this rank."""
    if not definition.mixtures:
        return []
    layers = {spec.name: spec.layer for spec in definition.table}
    return [
        (layers[f"{name}.router.weight"] or 0, module)
        for model in models.values()
        for name, module in model.named_modules()
        if isinstance(module, MixtureOfExperts)
    ]
