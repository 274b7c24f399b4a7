"""Parallelize one pipeline stage of a model: an ordered list of steps, each of which changes it in place.

The caller has cut the pipeline stage (it builds only its own layers, on the meta device) and gives it storage
afterwards. A step does what the plan and the mesh ask for, or nothing, or raises.

No step wraps a module, so that the names of parameters stay canonical. A step registers hooks, or replaces a
module's parameters, its attributes or its ``forward``. ``forward`` is a chain: what is applied later lies
further outside. On a block with everything, from the outside in::

    hooks of FSDP                      around forward: weights are gathered before all that follows
      copy of outputs that are views   FSDP: its hook on the output must not meet a view
        activation offload
          recomputation
            compiled block
              forward of the model     with tensor parallelism's forwards and hooks in its submodules

Autocast, where there is any, lies around the whole stage's ``forward``, and a precision switch around that of
each part.

In mixed precision weights, the residual stream and what travels are in 16 bits. FSDP gathers weights so (12).
What it does not hold gets copies in 16 bits once the stage has storage, after all of this
(`precision.compute_weights`). Masters, moments and gradients are fp32.

The order, and the damage if two steps change places:

1. ``fp8`` replaces linear modules by torchao's. After tensor parallelism it would drop the hooks and forwards
   that communicate.
2. ``fused projections`` set a module's ``fused_linear``. After tensor parallelism they would drop the one
   that gathers its input (``tp_overlap``).
3. ``tensor parallel`` cuts parameters, and *discards* the ``forward`` of row-parallel layers and embeddings.
   All that wraps a ``forward`` comes later, or would be lost.
4. ``expert parallel`` cuts parameters too, along another dimension.
5. ``attention kernel`` sets the kernel of one rank's whole rows.
6. ``context parallel`` replaces that kernel. Before it, ranks would attend to their own tokens only.
7. ``linear loss`` and 8. ``compiled functions`` set attributes that a compiled block reads at its first call.
9. ``compiled blocks`` compile ``forward`` alone (see `parallel.compiled_code`). Around recomputation, the
   compiler and no longer the layout would decide which activations are kept.
10. ``recompute`` lies inside offload: hooks on saved tensors nest, and the innermost decides. Offload inside
   it would save, and move, what recomputation exists to drop.
11. ``activation offload`` thus sees only the inputs of recomputed blocks.
12. ``data parallel`` takes over the parameters as they are: whatever cuts, replaces or ties them afterwards
   leaves FSDP with tensors that nobody uses.
13. ``autocast`` surrounds the stages of a model of the user's own, and those under adaptive precision.
14. ``precision switches`` leave autocast for the parts that need it: around all that computes.

``tests/gloo/parallel/test_parallelize.py`` holds this order. CUDA graphs record finished stages, and come
after all of this (``train.passes``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from picotron_ray.comm.wire_bytes import EXPERTS, GRADIENTS, PARAMETERS
from picotron_ray.layout.recompute_policy import recomputed
from picotron_ray.models.parameters import SequenceShard
from picotron_ray.parallel.attention.sinks import row_kernel
from picotron_ray.parallel.compiled_code import compile_blocks, telling
from picotron_ray.parallel.context.context_parallel import apply_context_parallel
from picotron_ray.parallel.data.fsdp import FsdpUnits, apply_fsdp
from picotron_ray.parallel.data.fsdp_collectives import choose_collectives
from picotron_ray.parallel.expert.expert_parallel import apply_expert_parallel
from picotron_ray.parallel.loss.linear_cross_entropy import LinearCrossEntropy
from picotron_ray.parallel.memory.activation_checkpointing import apply_recompute
from picotron_ray.parallel.memory.activation_offload import apply_activation_offload
from picotron_ray.parallel.memory.activation_quantization import apply_activation_quantization
from picotron_ray.parallel.mesh import Mesh
from picotron_ray.parallel.precision.autocast import apply_autocast
from picotron_ray.parallel.precision.fp8 import apply_fp8, gather_in_fp8
from picotron_ray.parallel.shard_boxes import chunk
from picotron_ray.parallel.stage_plan import StagePlan
from picotron_ray.parallel.tensor.overlap import Overlap, overlapped_products
from picotron_ray.parallel.tensor.ring_overlap import RingOverlap
from picotron_ray.parallel.tensor.tensor_parallel import apply_tensor_parallel, named_modules


def parallelize(model: nn.Module, mesh: Mesh, plan: StagePlan) -> tuple[str, ...]:
    """Cut ``model`` (one pipeline stage, on the meta device) in place for ``mesh``.

    Returns:
        What was applied, one phrase each, for the log.

    Raises:
        LayoutError: a dimension does not divide, or an extra is missing.

    Example:
        >>> from picotron_ray.layout.layout import Layout
        >>> from picotron_ray.parallel.attention.backends import AttentionPlan
        >>> from picotron_ray.parallel.mesh import make_mesh
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> mesh = make_mesh(Layout(recompute="full"), rank=0, device_type="cpu")
        >>> attention = AttentionPlan(modules=(), backend="math", length=8)
        >>> parallelize(model, mesh, StagePlan(styles=(), blocks=list(model), attention=attention))
        ('recompute full: 2 of 2 blocks',)
    """
    applied: list[str] = []
    for step in STEPS:
        applied += step.apply(model, mesh, plan)
    return tuple(applied)


class ModelStep(NamedTuple):
    """One change to a stage: ``apply`` yields a phrase for each thing that it did."""

    name: str
    apply: Callable[[nn.Module, Mesh, StagePlan], Iterator[str]]


def _fp8(model: nn.Module, mesh: Mesh, plan: StagePlan) -> Iterator[str]:
    if plan.fp8 is not None:
        yield f"{apply_fp8(plan.blocks, plan.fp8)} linear layers in fp8, {plan.fp8}"


def _fused_projections(model: nn.Module, mesh: Mesh, plan: StagePlan) -> Iterator[str]:
    modules = named_modules(model, plan.fused_linear)
    for module in modules:
        module.fuse()
    if modules:
        yield f"projections of {len(modules)} modules fused"


def _tensor_parallel(model: nn.Module, mesh: Mesh, plan: StagePlan) -> Iterator[str]:
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


def _overlap(mesh: Mesh, tp: dist.ProcessGroup, plan: StagePlan) -> Overlap | None:
    """Return the method that hides tensor parallelism's communication; the stages of a rank share it."""
    if mesh.overlap is None and plan.overlap == "ring":
        mesh.overlap = RingOverlap(tp)
    elif mesh.overlap is None and plan.overlap == "symmetric-memory":
        from picotron_ray.parallel.tensor.symmetric_memory import SymmetricOverlap

        mesh.overlap = found = SymmetricOverlap(tp, plan.device)
        mesh.on_close.append(found.close)
    return mesh.overlap


def _expert_parallel(model: nn.Module, mesh: Mesh, plan: StagePlan) -> Iterator[str]:
    layout, mixtures = mesh.layout, named_modules(model, plan.mixtures)
    ep = mesh.group("ep") if layout.ep > 1 else None
    names = {module: name for name, module in model.named_modules()} if layout.expert_order else {}
    orders = [layout.experts_of(plan.mixture_layers[names[m]]) for m in mixtures] if names else []
    collectives = mesh.collectives(EXPERTS)
    apply_expert_parallel(mixtures, ep, mesh.group("cp"), layout.tp, collectives, plan.exchange, orders)
    if mixtures:
        how = f", {plan.exchange}" if ep is not None else ""
        how += f", {sum(map(bool, orders))} placed by load" if ep is not None and any(orders) else ""
        yield f"expert parallel over {layout.ep}, {len(mixtures)} modules{how}"
    if plan.grouped and mixtures:
        for mixture in mixtures:
            mixture.experts.grouped = True
        yield "grouped experts"


def _attention_kernel(model: nn.Module, mesh: Mesh, plan: StagePlan) -> Iterator[str]:
    modules = named_modules(model, plan.attention.modules)
    if modules:
        kernel = row_kernel(plan.attention, compiled=plan.compiled)
        for module in modules:
            module.kernel = kernel
        yield str(plan.attention)


def _context_parallel(model: nn.Module, mesh: Mesh, plan: StagePlan) -> Iterator[str]:
    cp, layout = mesh.group("cp"), mesh.layout
    if cp is None:
        return
    count = apply_context_parallel(model, cp, plan.attention, layout.context, compiled=plan.compiled)
    for module in named_modules(model, plan.positions):
        module.shard = SequenceShard(plan.attention.length, cp.size(), cp.rank())
    yield f"context parallel over {layout.cp}, {layout.context}, {count} modules"


def _linear_loss(model: nn.Module, mesh: Mesh, plan: StagePlan) -> Iterator[str]:
    heads = named_modules(model, [glob for glob, style in plan.styles if style == "vocab_head"])
    if plan.loss_chunk is None or not heads:
        return
    tp = mesh.group("tp")
    for head in heads:
        first = chunk(head.out_features, tp.size(), tp.rank())[0] if tp is not None else 0
        head.losses = LinearCrossEntropy(plan.loss_chunk, tp, first, head.softcap)
    yield f"linear cross-entropy of {plan.loss_chunk} tokens at a time"


def _compiled_functions(model: nn.Module, mesh: Mesh, plan: StagePlan) -> Iterator[str]:
    for name, (glob, attribute) in plan.functions.items():
        modules = named_modules(model, [glob])
        for module in modules:  # any shape: a change of layout, or evaluation, makes no new kernel
            compiled = torch.compile(getattr(module, attribute), dynamic=True)
            setattr(module, attribute, telling(f"kernels.{name}: saw compiled, which", "eager", compiled))
        yield f"{name} of {len(modules)} modules compiled"


def _compiled_blocks(model: nn.Module, mesh: Mesh, plan: StagePlan) -> Iterator[str]:
    if plan.compiled:
        names = {id(module): name for name, module in model.named_modules()}
        blocks = {names[id(block)]: block for block in plan.blocks}
        compile_blocks(blocks, one_graph=plan.one_graph)
        yield f"{len(blocks)} blocks compiled" + (", each as one graph" if plan.one_graph else "")


def _recompute(model: nn.Module, mesh: Mesh, plan: StagePlan) -> Iterator[str]:
    kinds = recomputed(mesh.layout.recompute, len(plan.blocks), plan.stage)
    mixtures = named_modules(model, plan.mixtures)
    inside = [[m.router for m in mixtures if any(m is part for part in b.modules())] for b in plan.blocks]
    count = apply_recompute(plan.blocks, kinds, inside)
    packed = apply_activation_quantization(plan.blocks, kinds)
    if mesh.layout.recompute != "none":
        told = f"recompute {mesh.layout.recompute}: {count} of {len(kinds)} blocks"
        yield told + (f" again, {packed} in 8 bits" if packed else "")


def _activation_offload(model: nn.Module, mesh: Mesh, plan: StagePlan) -> Iterator[str]:
    if mesh.layout.offload_activations:
        apply_activation_offload(plan.blocks)
        yield f"activations of {len(plan.blocks)} blocks offloaded"


def _data_parallel(model: nn.Module, mesh: Mesh, plan: StagePlan) -> Iterator[str]:
    """Shard by FSDP. Plain replicas stay as they are: `parallel.data.ddp` sums their gradients."""
    layout = mesh.layout
    if mesh.sharded is not None:
        whole = frozenset(p for name, p in model.named_parameters() if name in plan.untrained)
        mixtures = named_modules(model, plan.mixtures)
        experts = [m.experts for m in mixtures] if layout.ep > 1 else []
        routers = [m.router for m in mixtures]
        if plan.fp8_gather:
            yield f"{gather_in_fp8(plan.blocks, layout.shards)} weights gathered in fp8"
        dims = {p: plan.zero_dims[name] for name, p in model.named_parameters() if name in plan.zero_dims}
        parts = plan.blocks, experts, mesh.experts, whole, routers, plan.compute, dims
        units = FsdpUnits(*parts, plan.embedding, plan.head, plan.zero_blocks)
        apply_fsdp(model, units, mesh.sharded, layout.zero)
        choose_collectives(model, mesh.collectives(PARAMETERS), mesh.collectives(GRADIENTS), plan.reduce)
        copies = f", {layout.replicate} copies" if layout.replicate > 1 else ""
        grouped = f", {plan.zero_blocks} blocks at a time" if plan.zero_blocks > 1 else ""
        yield f"FSDP2 over {layout.shards}{copies}, zero {layout.zero}{grouped}"
    elif layout.replicas > 1:
        yield f"replicated over {layout.replicas}"


def _autocast(model: nn.Module, mesh: Mesh, plan: StagePlan) -> Iterator[str]:
    """Yield no phrase: the job's precision says it."""
    if plan.autocast is not None:
        gathers = mesh.layout.zero == 3
        last = plan.stage == mesh.layout.stages - 1  # whose logits nobody receives
        apply_autocast(model, plan.device, plan.autocast, None if last else plan.compute, gathers=gathers)
    yield from ()


def _precision_switches(model: nn.Module, mesh: Mesh, plan: StagePlan) -> Iterator[str]:
    """Yield no phrase: their positions are decided later, and logged then."""
    if plan.switches is not None:
        plan.switches.install(model)
    yield from ()


STEPS: tuple[ModelStep, ...] = (
    ModelStep("fp8", _fp8),
    ModelStep("fused projections", _fused_projections),
    ModelStep("tensor parallel", _tensor_parallel),
    ModelStep("expert parallel", _expert_parallel),
    ModelStep("attention kernel", _attention_kernel),
    ModelStep("context parallel", _context_parallel),
    ModelStep("linear loss", _linear_loss),
    ModelStep("compiled functions", _compiled_functions),
    ModelStep("compiled blocks", _compiled_blocks),
    ModelStep("recompute", _recompute),
    ModelStep("activation offload", _activation_offload),
    ModelStep("data parallel", _data_parallel),
    ModelStep("autocast", _autocast),
    ModelStep("precision switches", _precision_switches),
)
"""In the order in which they are applied; see the module for the reasons."""
