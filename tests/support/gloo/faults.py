"""Faults that a process plants in itself, which the comparison with one process has to find."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from picotron_ray.comm.communicators import Communicators
from picotron_ray.layout.schedule_rows import PipelineShape
from picotron_ray.parallel.attention import lse_kernels

Undo = Callable[[], Any]

ELSEWHERE = {
    "offload": "train_jobs.offload_jobs",
    "overlap": "parallel_jobs.tensor_overlap_jobs",
    "tied": "parallel_jobs.tied_jobs",
    "muon": "train_jobs.muon_jobs",
}
"""Modules with a table ``PLANTS`` of their own, by what comes before the dash of a fault's name."""


def planted(kind: str, rank: int) -> Undo:
    """Double one reduction in this process, or break something else; returns the function that undoes it."""
    family, _, name = kind.partition("-")
    if kind not in PLANTS and family in ELSEWHERE:
        undo: Undo = importlib.import_module(f"tests.support.gloo.{ELSEWHERE[family]}").PLANTS[name]()
        return undo
    return PLANTS[kind](rank)


def replace(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute; returns the function that sets it back."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, original)


def one_document_on_rank_1(rank: int) -> Undo:
    """Rank 1 alone takes every row for one document."""
    import picotron_ray.train.micro_batches as inputs

    kept = inputs.document_numbers
    return replace(inputs, "document_numbers", lambda x, end: kept(x, end) * (rank != 1))


def double_partial_gradients(_: int) -> Undo:
    import picotron_ray.train.gradients as gradients

    kept = gradients.sum_

    def doubled(tensors: Any, group: Any) -> None:
        kept(tensors, group)
        torch._foreach_mul_(tensors, 2.0)

    return replace(gradients, "sum_", doubled)


def copies_that_never_meet(_: int) -> Undo:
    import picotron_ray.train.passes as passes

    kept = passes.prepare_backward

    def alone(model: Any, zero: int, last: bool) -> None:
        kept(model, zero, last)
        model.set_requires_all_reduce(False)

    return replace(passes, "prepare_backward", alone)


def double_shards(_: int) -> Undo:
    import picotron_ray.parallel.data.fsdp as data
    import picotron_ray.train.build_stages as stages

    kept = stages.parallelize

    def applied(model: Any, *rest: Any) -> Any:
        found = kept(model, *rest)
        for module in model.modules():
            if isinstance(module, data.FSDPModule):
                module.set_gradient_divide_factor(0.5)
        return found

    return replace(stages, "parallelize", applied)


def emulated_fp8(_: int) -> Undo:
    """No fault: fp8 where no device has it."""
    import picotron_ray.parallel.precision.fp8 as fp8
    import picotron_ray.train.engine as engine

    undo = replace(engine, "check_precision", lambda job, device: None)
    undo_emulate = replace(fp8, "EMULATE", True)
    return lambda: (undo(), undo_emulate())


def wider_scales(_: int) -> Undo:
    import picotron_ray.train.optim.quantized_state as quantized

    kept = quantized.encode

    def wider(*given: Any) -> Any:
        codes, scales = kept(*given)
        return codes, scales * 1.02

    return replace(quantized, "encode", wider)


def double_pipeline_losses(_: int) -> Undo:
    from picotron_ray.parallel.pipeline.pipeline import Pipeline

    kept = Pipeline._micro_loss
    return replace(Pipeline, "_micro_loss", lambda self, output, target: kept(self, output, target) * 2.0)


def double_norm(_: int) -> Undo:
    import picotron_ray.parallel.data.grad_norm as norm

    return double_all_reduce(norm)


def double_vocabulary(_: int) -> Undo:
    import picotron_ray.parallel.loss.cross_entropy as loss

    return double_all_reduce(loss, dist.ReduceOp.SUM)


def exchange_micro_batches(rank: int) -> Any:
    """Rank 0 alone takes micro-batches 0 and 1 in its row of a list of actions for each other."""
    import picotron_ray.parallel.pipeline.pipeline as pipeline

    kept = pipeline.schedule_of

    def exchanged(name: str, actions: tuple[str, ...]) -> Any:
        found = kept(name, actions)
        assert found.rows is not None
        first, *rest = found.rows(PipelineShape(0, 0, 0))  # a list is the same whatever the shape
        wrong = tuple(a._replace(micro_batch={0: 1, 1: 0}.get(a.micro_batch, a.micro_batch)) for a in first)
        return dataclasses.replace(found, rows=lambda shape: (wrong if rank == 0 else first, *rest))

    return replace(pipeline, "schedule_of", exchanged)


def first_micro_batch_for_ever() -> Undo:
    """A replay computes again what was recorded."""
    from picotron_ray.train.cuda_graphs import StepGraph

    kept = StepGraph.replay
    return replace(StepGraph, "replay", lambda self, _, scale: kept(self, self._fed, scale))


def double_buckets(chosen: Callable[[torch.Tensor], bool]) -> Any:
    """What is summed over ranks that hold the same comes out doubled, where all of a bucket is chosen."""
    from picotron_ray.parallel.data.ddp import GradientBucket

    kept = GradientBucket.wait

    def doubled(self: GradientBucket) -> None:
        kept(self)
        if all(chosen(parameter) for parameter in self.parameters):
            torch._foreach_mul_([parameter.grad for parameter in self.parameters], 2.0)

    return replace(GradientBucket, "wait", doubled)


def double_expert_replicas() -> Any:
    return double_buckets(lambda parameter: parameter.dim() == 3)


def lose_returning_gradients() -> Any:
    import picotron_ray.parallel.expert.shipment as shipment

    kept = shipment._Sends.backward

    def lost(ctx: Any, *given: torch.Tensor) -> Any:
        rows, *rest = kept(ctx, *given)
        return rows * 0.5, *rest

    return replace(shipment._Sends, "backward", staticmethod(lost))


def double_auxiliary() -> Any:
    import picotron_ray.models.layers.moe as moe

    kept = moe._Auxiliary.backward

    def doubled(ctx: Any, gradient: torch.Tensor) -> Any:
        x, loss, rest = kept(ctx, gradient)
        return x, loss * 2.0, rest

    return replace(moe._Auxiliary, "backward", staticmethod(doubled))


def count_local_tokens_only() -> Any:
    import picotron_ray.parallel.expert.expert_parallel as expert

    return replace(expert.SequenceSpread, "totals", lambda self, counts: counts)


def double_key_gradients(kind: str) -> Any:
    """What other context-parallel ranks found for this rank's keys comes home doubled."""
    import picotron_ray.parallel.context.context_parallel as context

    if kind == "gathered":
        original = context.reduce_scatter_sequence
        context.reduce_scatter_sequence = lambda x, group: original(x, group) * 2.0
        return lambda: setattr(context, "reduce_scatter_sequence", original)
    shift = context.Shift

    class Doubled(shift):  # type: ignore[misc, valid-type]
        def __init__(self, x: torch.Tensor, group: Any, tag: int = 0) -> None:
            super().__init__(x * 2.0 if tag else x, group, tag)

    context.Shift = Doubled  # type: ignore[misc]
    return lambda: setattr(context, "Shift", shift)


def double_all_reduce(module: Any, only: Any = None) -> Any:
    """Replace ``dist`` in one module by one whose sums come out doubled."""
    original = module.dist

    class Doubled:
        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

        def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **rest: Any) -> None:
            original.all_reduce(tensor, op=op, **rest)
            if only is None or op == only:
                tensor.mul_(2.0)

    module.dist = Doubled()
    return lambda: setattr(module, "dist", original)


def cold_communicators() -> Undo:
    """Communicators begin with whatever the step calls first."""
    original = Communicators.warm
    Communicators.warm = lambda self: None  # type: ignore[method-assign]
    return lambda: setattr(Communicators, "warm", original)


def kernels_of_cuda() -> Undo:
    """Kernels with log-sum-exp that take what CUDA's flash attention takes: one type of half precision."""
    original = lse_kernels.CpuFlash.forward

    def forward(self: Any, q: Any, k: Any, v: Any, key_mask: Any) -> Any:
        kinds = {x.dtype for x in (q, k, v)}
        if len(kinds) > 1 or not kinds <= {torch.bfloat16, torch.float16}:
            raise RuntimeError(f"FlashAttention only supports fp16 and bf16, saw {kinds}")
        return original(self, q, k, v, key_mask)

    lse_kernels.CpuFlash.forward = forward  # type: ignore[method-assign]
    return lambda: setattr(lse_kernels.CpuFlash, "forward", original)


def rows_of_cuda() -> Undo:
    """No fault: adaptive precision with CUDA's kernels over whole rows, its attentions of layer 1 in fp32.

    Flash refuses fp32 as CUDA's does; what stands for ``efficient`` refuses 16 bits, which are not for it.
    """
    import picotron_ray.parallel.attention.sinks as kernels
    import picotron_ray.train.build_stages as stages
    from picotron_ray.parallel.precision.switches import PrecisionSwitches

    kept, full, begin = kernels.attention_kernel, stages.full_backend, PrecisionSwitches.__init__
    takes = {"flash": {torch.bfloat16, torch.float16}, "efficient": {torch.float32}}

    def kernel(backend: Any, **options: Any) -> Any:
        attend = kept("math" if backend == "efficient" else backend, **options)

        def checked(q: Any, k: Any, v: Any, *rest: Any) -> Any:
            kinds = {x.dtype for x in (q, k, v)}
            if len(kinds) > 1 or not kinds <= takes[backend]:
                raise RuntimeError(f"{backend} takes {takes[backend]}, saw {kinds}")
            return attend(q, k, v, *rest)

        return checked

    def first_choice(self: Any, *given: Any) -> None:
        begin(self, *given)
        self.set({part for part in self._parts if not part.startswith("layers.1.att")})

    stack = ExitStack()
    stack.callback(replace(kernels, "attention_kernel", kernel))
    stack.callback(replace(stages, "full_backend", lambda job, _, *rest: full(job, "cuda", *rest)))
    stack.callback(replace(PrecisionSwitches, "__init__", first_choice))
    return stack.close


def flash_of_cuda() -> Undo:
    """No fault: CUDA's FlashAttention over parts of rows, by emulated operators. A mask is an error."""
    import picotron_ray.parallel.context.context_parallel as context
    from picotron_ray.parallel.attention.flash_operators import TorchFlash
    from picotron_ray.parallel.attention.lse_flash import FlashKernel
    from picotron_ray.parallel.attention.tile_documents import TileDocuments
    from tests.support.gloo.emulated_attention import emulated

    def masked(_: TileDocuments) -> torch.Tensor:
        raise AssertionError("a dense mask")

    stack = ExitStack()
    stack.enter_context(emulated())
    stack.callback(replace(context, "lse_kernel", lambda *_: FlashKernel(TorchFlash())))
    stack.callback(replace(TileDocuments, "same", property(masked)))
    return stack.close


def double_exchanged_gradients() -> Undo:
    import picotron_ray.parallel.context.ulysses as ulysses

    kept = ulysses._Exchange.backward
    return replace(ulysses._Exchange, "backward", staticmethod(lambda ctx, g: (kept(ctx, g)[0] * 2.0, None)))


def longer_windows() -> Undo:
    """Queries of a chunk see one key more of the chunks before it."""
    import picotron_ray.parallel.context.ring_attention as tiles

    kept = tiles._tile
    return replace(
        tiles, "_tile", lambda q, k, window: kept(q, k, window if q == k else window and window + 1)
    )


PLANTS: dict[str, Callable[[int], Undo]] = {
    "cuda-flash": lambda _: flash_of_cuda(),
    "exchange": lambda _: double_exchanged_gradients(),
    "longer-window": lambda _: longer_windows(),
    "cuda-kernels": lambda _: kernels_of_cuda(),
    "rows-of-cuda": lambda _: rows_of_cuda(),
    "cold": lambda _: cold_communicators(),
    "documents": one_document_on_rank_1,
    "tp-partial": double_partial_gradients,
    "dp": lambda _: double_buckets(lambda parameter: True),
    "copies": copies_that_never_meet,
    "fsdp": double_shards,
    "fp8": emulated_fp8,
    "scales": wider_scales,
    "norm": double_norm,
    "vocab": double_vocabulary,
    "pipeline": double_pipeline_losses,
    "graph": lambda _: first_micro_batch_for_ever(),
    "actions": exchange_micro_batches,
    "ring": lambda _: double_key_gradients("ring"),
    "gathered": lambda _: double_key_gradients("gathered"),
    "edp": lambda _: double_expert_replicas(),
    "dispatch": lambda _: lose_returning_gradients(),
    "auxiliary": lambda _: double_auxiliary(),
    "load": lambda _: count_local_tokens_only(),
}
