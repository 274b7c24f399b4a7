"""The pipeline stages of one rank: built on the meta device, parallelized, then given storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
from torch import nn

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.experts import expert_chunks, pads_experts
from picotron_ray.config.support.fast_path import overlap_method
from picotron_ray.config.support.fp8 import gathers_in_fp8
from picotron_ray.config.support.kernels import (
    Backend,
    attention_backends,
    attention_problem,
    compiles,
    compiles_whole,
    full_backend,
    groups_experts,
    has_sinks,
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
from picotron_ray.parallel.expert.expert_parallel import EXACT, ExpertExchange
from picotron_ray.parallel.mesh import Mesh
from picotron_ray.parallel.parallelize import parallelize
from picotron_ray.parallel.precision.compute_weights import ComputeWeights
from picotron_ray.parallel.precision.switches import PrecisionSwitches
from picotron_ray.parallel.shard_boxes import zero_dim
from picotron_ray.parallel.stage_plan import StagePlan
from picotron_ray.parallel.tensor.tensor_parallel import named_modules
from picotron_ray.planner.model_sizes import stage_bounds
from picotron_ray.train.determinism import choose_algorithms, prepare_cublas
from picotron_ray.train.precision.precision import (
    autocast_dtype,
    compute_dtype,
    master_dtype,
    set_matrix_products,
)

ROUTER = ".router.weight"
"""A mixture's own parameter, which every mixture has."""


def build_stages(
    job: JobConfig,
    mesh: Mesh,
    definition: ModelDefinition,
    device: torch.device,
    switches: PrecisionSwitches | None = None,
    on_built: Callable[[], None] = lambda: None,
    weights: ComputeWeights | None = None,
) -> tuple[dict[int, nn.Module], tuple[str, ...]]:
    """Build this rank's stages, weights undefined.

    Args:
        switches: the parts that adaptive precision can set to full precision. None: there are none.
        on_built: called after each stage.
        weights: puts copies in 16 bits in the place of what FSDP does not hold. None: nothing does.

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
        CODE.begin((layout, layout.expert_order))
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
        if weights is not None:
            weights.take(model, [m.router for m in named_modules(model, definition.mixtures)])
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
    backend = attention_backend(job, device, layout)
    attention = AttentionPlan(
        definition.attention,
        backend,
        job.data.sequence_length,
        job.model.sliding_window if windowed(job) else None,
        job.model.attention_softcap,
        job.model.full_attention_every,
        full_backend(job, device.type, layout.row_parts, backend),
        has_sinks(job),
    )
    problem = overlap_problem(job, device.type)
    if problem:
        raise LayoutError(f"kernels.tp_overlap: {problem}")
    ends = definition.ends(model)
    return StagePlan(
        definition.styles,
        definition.blocks(model),
        attention,
        mixtures=definition.mixtures,
        mixture_layers=mixture_layers(definition),
        positions=definition.positions,
        embedding=ends.embedding,
        head=ends.head,
        untrained=frozenset(spec.name for spec in definition.table if not spec.sharded),
        zero_dims={spec.name: dim for spec in definition.table if (dim := zero_dim(spec, layout))},
        zero_blocks=job.comm.zero_blocks,
        compiled=job.kernels.compile is True,
        one_graph=compiles_whole(job, device.type, layout),
        grouped=groups_experts(job, device.type, layout.tp),
        exchange=_expert_exchange(job, device, layout),
        fused_linear=definition.fused_linear if job.kernels.projections == "fused" else (),
        functions={
            name: at for name, at in definition.functions.items() if getattr(job.kernels, name) == "compiled"
        },
        loss_chunk=job.kernels.loss_chunk if job.kernels.loss == "linear" else None,
        fp8=job.fp8.scaling if job.precision == "fp8" else None,
        fp8_gather=gathers_in_fp8(job, layout),
        overlap=overlap_method(job, device.type, layout),
        device=device,
        tie=definition.tie,
        stage=stage,
        compute=compute_dtype(job),
        reduce=torch.bfloat16 if job.comm.reduce_dtype == "bf16" else None,
        autocast=autocast_dtype(job),
        switches=switches,
    )


def _expert_exchange(job: JobConfig, device: torch.device, layout: Layout) -> ExpertExchange:
    if layout.ep == 1:
        return EXACT
    return ExpertExchange(
        pads_experts(job, device.type, layout.ep, layout.cp),
        expert_chunks(job, device.type, layout.ep),
        layout.widest_rows(job.data.global_batch),
    )


def attention_backend(job: JobConfig, device: torch.device, layout: Layout) -> Backend:
    """Return the attention backend that runs.

    Raises:
        LayoutError: the one that the job asks for does not run here.
    """
    problem = attention_problem(job, device.type, layout.row_parts)
    if problem:
        raise LayoutError(f"kernels.attention: {problem}")
    asked = job.kernels.attention
    if asked != "auto":
        return asked
    return attention_backends(job, device.type, layout.row_parts, hopper=_is_hopper(device))[0]


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def mixture_layers(definition: ModelDefinition) -> dict[str, int]:
    """Layer number of each mixture of experts, by its canonical name."""
    routers = (spec for spec in definition.table if spec.name.endswith(ROUTER))
    return {spec.name.removesuffix(ROUTER): spec.layer or 0 for spec in routers}


def mixtures_of(
    models: Mapping[int, nn.Module], definition: ModelDefinition
) -> list[tuple[int, MixtureOfExperts]]:
    """List layer number and module of every mixture of experts on this rank."""
    if not definition.mixtures:
        return []
    layers = mixture_layers(definition)
    return [
        (layers[name], module)
        for model in models.values()
        for name, module in model.named_modules()
        if isinstance(module, MixtureOfExperts)
    ]
