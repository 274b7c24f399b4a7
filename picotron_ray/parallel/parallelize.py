"""Apply a layout to one pipeline stage of a model, in one fixed order.

fp8, tensor, expert and context parallelism, compilation, recomputation, offload, then FSDP.

The caller has cut the pipeline stage (it builds only its own layers, on the meta device). What was asked
for is applied or refused; what was applied is returned, for the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from picotron_ray.layout.recompute_policy import recomputed
from picotron_ray.models.parameters import SequenceShard, Style
from picotron_ray.parallel.attention.backends import AttentionPlan, attention_kernel
from picotron_ray.parallel.context.context_parallel import apply_context_parallel
from picotron_ray.parallel.data.fsdp import FsdpUnits, apply_fsdp
from picotron_ray.parallel.expert.expert_parallel import apply_expert_parallel
from picotron_ray.parallel.fp8 import apply_fp8
from picotron_ray.parallel.local_shards import chunk
from picotron_ray.parallel.loss.linear_cross_entropy import LinearCrossEntropy
from picotron_ray.parallel.memory.activation_checkpointing import apply_recompute
from picotron_ray.parallel.memory.activation_offload import apply_activation_offload
from picotron_ray.parallel.mesh import Mesh
from picotron_ray.parallel.tensor.overlap import Overlap, OverlapMethod, overlapped_products
from picotron_ray.parallel.tensor.ring_overlap import RingOverlap
from picotron_ray.parallel.tensor.tensor_parallel import apply_tensor_parallel, named_modules

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a stage's modules are to each parallelism.

    Fields:
        styles: what tensor parallelism does to which module.
        blocks: the modules that FSDP gathers one at a time.
        attention: which modules are attention, and what computes it.
        mixtures: the modules that are mixtures of experts, by name.
        positions: the modules that add learned positions, by name.
        untrained: names of parameters that no gradient moves, which FSDP leaves whole.
        compiled: whether torch.compile makes the blocks' kernels.
        grouped: whether the products of a mixture's experts are grouped.
        joint: the modules whose projections are one product, by name.
        functions: what is compiled by itself, by name: (modules, their field).
        loss_chunk: tokens of which the head makes losses at a time; None: it makes logits.
        fp8: whether the linear layers of blocks compute in fp8.
        overlap: what hides tensor parallelism's communication in blocks.
        device: on which the model will compute.
        tie: shares again what the model shares, once its parameters were cut. FSDP has to see that: of two
            parameters that became one later, it would gather one from where the other no longer lies.
        stage: the number of the pipeline stage.
    """

    styles: Sequence[tuple[str, Style]]
    blocks: Sequence[nn.Module]
    attention: AttentionPlan
    mixtures: Sequence[str] = ()
    positions: Sequence[str] = ()
    untrained: frozenset[str] = frozenset()
    compiled: bool = False
    grouped: bool = False
    joint: Sequence[str] = ()
    functions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    loss_chunk: int | None = None
    fp8: bool = False
    overlap: OverlapMethod = "none"
    device: torch.device = CPU
    tie: Callable[[nn.Module], None] = lambda model: None
    stage: int = 0


def parallelize(model: nn.Module, mesh: Mesh, plan: Plan) -> tuple[str, ...]:
    """Cut ``model`` (one pipeline stage, on the meta device) in place for ``mesh``.

    Returns what was applied, one phrase each. Raises LayoutError where something does not divide.
    """
    applied: list[str] = []
    layout, attention = mesh.layout, plan.attention
    if plan.fp8:
        applied.append(f"{apply_fp8(plan.blocks)} linear layers in fp8")
    fused = named_modules(model, plan.joint)
    if fused:
        for module in fused:
            module.fuse()
        applied.append(f"projections of {len(fused)} modules fused")
    applied += _apply_tensor_parallel(model, mesh, plan)
    mixtures = named_modules(model, plan.mixtures)
    apply_expert_parallel(mixtures, mesh.group("ep") if layout.ep > 1 else None, mesh.group("cp"), layout.tp)
    if mixtures:
        applied.append(f"expert parallel over {layout.ep}, {len(mixtures)} modules")
    if plan.grouped and mixtures:
        for mixture in mixtures:
            mixture.experts.grouped = True
        applied.append("grouped experts")
    modules = named_modules(model, attention.modules)
    if modules:
        kernel = attention_kernel(attention.backend, compiled=plan.compiled)
        for module in modules:
            module.kernel = kernel
        applied.append(str(attention))
    cp = mesh.group("cp")
    if cp is not None:
        count = apply_context_parallel(model, cp, attention, layout.context)
        for module in named_modules(model, plan.positions):
            module.shard = SequenceShard(attention.length, cp.size(), cp.rank())
        applied.append(f"context parallel over {layout.cp}, {layout.context}, {count} modules")
    applied += _apply_kernels(model, plan, mesh.group("tp"))
    kinds = recomputed(layout.recompute, len(plan.blocks), plan.stage)
    inside = [[m.router for m in mixtures if any(m is part for part in b.modules())] for b in plan.blocks]
    count = apply_recompute(plan.blocks, kinds, inside)
    if layout.recompute != "none":
        applied.append(f"recompute {layout.recompute}: {count} of {len(kinds)} blocks")
    if layout.offload_activations:
        apply_activation_offload(plan.blocks, recasts=layout.zero == 3)
        applied.append(f"activations of {len(plan.blocks)} blocks offloaded")
    if mesh.sharded is not None:
        whole = frozenset(p for name, p in model.named_parameters() if name in plan.untrained)
        experts = [mixture.experts for mixture in mixtures] if layout.ep > 1 else []
        apply_fsdp(model, FsdpUnits(plan.blocks, experts, mesh.experts, whole), mesh.sharded, layout.zero)
        copies = f", {layout.replicate} copies" if layout.replicate > 1 else ""
        applied.append(f"FSDP2 over {layout.shards}{copies}, zero {layout.zero}")
    elif layout.replicas > 1:
        applied.append(f"replicated over {layout.replicas}")
    return tuple(applied)


def _apply_tensor_parallel(model: nn.Module, mesh: Mesh, plan: Plan) -> Iterator[str]:
    """Cut the model over tp; what was applied, one phrase each."""
    tp = mesh.group("tp")
    if tp is None:
        if plan.overlap != "none":
            yield f"no tensor parallelism that {plan.overlap} could overlap"
        return
    overlap = _overlap(mesh, tp, plan)
    means = None if overlap is None else overlapped_products(overlap, plan.compiled)
    count, overlapped = apply_tensor_parallel(model, tp, plan.styles, means)
    plan.tie(model)
    kind = "tensor" if any(style == "sum_rowwise" for _, style in plan.styles) else "tensor and sequence"
    yield f"{kind} parallel over {mesh.layout.tp}, {count} modules"
    if plan.overlap != "none":
        yield f"communication of {overlapped} of them overlapped by {plan.overlap}"


def _overlap(mesh: Mesh, tp: dist.ProcessGroup, plan: Plan) -> Overlap | None:
    """What hides tensor parallelism's communication; the stages of a rank share it."""
    if mesh.overlap is None and plan.overlap == "ring":
        mesh.overlap = RingOverlap(tp)
    elif mesh.overlap is None and plan.overlap == "symmetric-memory":
        from picotron_ray.parallel.tensor.symmetric_memory import SymmetricOverlap

        mesh.overlap = found = SymmetricOverlap(tp, plan.device)
        mesh.on_close.append(found.close)
    return mesh.overlap


def _apply_kernels(model: nn.Module, plan: Plan, tp: dist.ProcessGroup | None) -> Iterator[str]:
    """Let the modules compute as the plan says; what was applied, one phrase each."""
    heads = named_modules(model, [glob for glob, style in plan.styles if style == "vocab_head"])
    if plan.loss_chunk is not None and heads:
        for head in heads:
            first = chunk(head.out_features, tp.size(), tp.rank())[0] if tp is not None else 0
            head.losses = LinearCrossEntropy(plan.loss_chunk, tp, first)
        yield f"linear cross-entropy of {plan.loss_chunk} tokens at a time"
    for name, (glob, attribute) in plan.functions.items():
        modules = named_modules(model, [glob])
        for module in modules:  # any shape: what layouts and evaluation change makes no kernel anew
            setattr(module, attribute, torch.compile(getattr(module, attribute), dynamic=True))
        yield f"{name} of {len(modules)} modules compiled"
    if plan.compiled:
        compile_blocks(plan.blocks)
        yield f"{len(plan.blocks)} blocks compiled"


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Let torch.compile make the kernels of every block, at its first call.

    ``forward`` alone: what FSDP hooks on around it stays outside, and so does recomputation. Shapes are
    static; a block that cannot be one graph (collectives inside) becomes several.
    """
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=False)
