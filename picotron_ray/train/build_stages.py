"""The pipeline stages of one rank: built on the meta device, parallelized, then given storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
from torch import nn

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.kernels import (
    Backend,
    attention_backends,
    attention_problem,
    compiles,
    compiles_whole,
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
from picotron_ray.parallel.compiled_code import CODE
from picotron_ray.parallel.data.fsdp import pad_shards
from picotron_ray.parallel.mesh import Mesh
from picotron_ray.parallel.parallelize import parallelize
from picotron_ray.parallel.precision.switches import PrecisionSwitches
from picotron_ray.parallel.stage_plan import StagePlan
from picotron_ray.planner.model_sizes import stage_bounds
from picotron_ray.train.determinism import choose_algorithms, prepare_cublas
from picotron_ray.train.precision.precision import autocast_dtype, master_dtype, set_matrix_products


def build_stages(
    job: JobConfig,
    mesh: Mesh,
    definition: ModelDefinition,
    device: torch.device,
    switches: PrecisionSwitches | None = None,
    on_built: Callable[[], None] = lambda: None,
) -> tuple[dict[int, nn.Module], tuple[str, ...]]:
    """Build this rank's stages, weights undefined.

    Args:
        switches: the parts that adaptive precision can set to full precision. None: there are none.
        on_built: called after each stage.

    Returns:
        The stages by number, and what was applied to them, one phrase each.

    Raises:
        LayoutError: the layout cannot be applied.
    """
    layout, stages = mesh.layout, mesh.layout.rank_stages(mesh.at.pp)
    models: dict[int, nn.Module] = {}
    applied: list[str] = []
    of_a_stage: tuple[str, ...] = ()
    if layout.pp > 1:
        indices = " and ".join(str(stage + 1) for stage in stages)
        applied.append(f"pipeline stage {indices} of {layout.stages}, {layout.schedule}")
    set_matrix_products(job)
    prepare_cublas(job, os.environ)
    applied += choose_algorithms(job)
    if compiles(job):
        CODE.begin(layout)
    bounds = stage_bounds(job.model, layout.cut)
    for stage in stages:
        model = definition.stage(bounds, stage).to(master_dtype(job))
        closed = norm_kernel(job, device.type) == "closed-form"
        norms = definition.close_norms(model) if closed else 0
        of_a_stage = (f"{norms} norms with gradients in closed form",) if norms else ()
        still = definition.freeze(model)
        of_a_stage += (f"{still} parameters frozen",) if still else ()
        plan = _stage_plan(job, definition, model, device, layout, stage, switches)
        of_a_stage += parallelize(model, mesh, plan)
        definition.materialise(model, device)
        if not layout.zero:  # FSDP gathers each parameter into storage of its own
            lay_together(model)
        pad_shards(model)
        models[stage] = model
        on_built()
    return models, (*applied, *of_a_stage)


def _stage_plan(
    job: JobConfig,
    definition: ModelDefinition,
    model: nn.Module,
    device: torch.device,
    layout: Layout,
    stage: int,
    switches: PrecisionSwitches | None,
) -> StagePlan:
    attention = AttentionPlan(
        definition.attention,
        attention_backend(job, device),
        job.data.sequence_length,
        job.model.sliding_window if windowed(job) else None,
        job.model.attention_softcap,
        job.model.full_attention_every,
    )
    problem = overlap_problem(job, device.type)
    if problem:
        raise LayoutError(f"kernels.tp_overlap: {problem}")
    return StagePlan(
        definition.styles,
        definition.blocks(model),
        attention,
        mixtures=definition.mixtures,
        positions=definition.positions,
        untrained=frozenset(spec.name for spec in definition.table if not spec.sharded),
        compiled=job.kernels.compile,
        one_graph=compiles_whole(job, device.type, layout),
        grouped=groups_experts(job, device.type, layout.tp),
        fused_linear=definition.fused_linear if job.kernels.projections == "fused" else (),
        functions={
            name: at for name, at in definition.functions.items() if getattr(job.kernels, name) == "compiled"
        },
        loss_chunk=job.kernels.loss_chunk if job.kernels.loss == "linear" else None,
        fp8=job.precision == "fp8",
        overlap=job.kernels.tp_overlap,
        device=device,
        tie=definition.tie,
        stage=stage,
        autocast=autocast_dtype(job),
        switches=switches,
    )


def attention_backend(job: JobConfig, device: torch.device) -> Backend:
    """Return the attention backend that runs.

    Raises:
        LayoutError: the one that the job asks for does not run here.
    """
    problem = attention_problem(job, device.type)
    if problem:
        raise LayoutError(f"kernels.attention: {problem}")
    asked = job.kernels.attention
    return attention_backends(job, device.type)[0] if asked == "auto" else asked


def mixtures_of(
    models: Mapping[int, nn.Module], definition: ModelDefinition
) -> list[tuple[int, MixtureOfExperts]]:
    """List layer number and module of every mixture of experts on this rank."""
    if not definition.mixtures:
        return []
    layers = {spec.name: spec.layer for spec in definition.table}
    return [
        (layers[f"{name}.router.weight"] or 0, module)
        for model in models.values()
        for name, module in model.named_modules()
        if isinstance(module, MixtureOfExperts)
    ]
