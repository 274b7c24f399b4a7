"""Forward and backward passes of a step's micro-batches: as a plain loop, as a CUDA graph, in a pipeline.

All three add the same gradients to the same parameters. `choose_passes` chooses one when an engine is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from picotron_ray.config.import_path import import_object
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.models.definition import ModelDefinition
from picotron_ray.parallel.data.fsdp import prepare_backward
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.parallel.loss.cross_entropy import at_least_fp32, token_losses, weighted_sum
from picotron_ray.parallel.mesh import Mesh
from picotron_ray.parallel.shard_boxes import chunk
from picotron_ray.train.cuda_graphs import StepGraph
from picotron_ray.train.gradients import Gradients, StaticGradients
from picotron_ray.train.meta.choose import meta_passes
from picotron_ray.train.micro_batches import MicroBatch, MicroBatcher
from picotron_ray.train.precision.precision import compute_dtype, master_dtype
from picotron_ray.train.reduction_plan import reduction_plan

if TYPE_CHECKING:
    from picotron_ray.parallel.pipeline.pipeline import LossFunction, Pipeline

OnAction = Callable[[str, int], None]
"""Hears what begins within a phase of a step (`config.schema.telemetry`), and for which stage; -1: none."""
OnPhase = Callable[[str], None]
"""Hears the name of each phase of a step as it begins."""


def silent(phase: str) -> None:
    """Ignore the phase: an ``on_phase`` that tells nobody."""


def unwatched(phase: str, stage: int) -> None:
    """Ignore the action: an ``on_action`` that tells nobody."""


class Passes(Protocol):
    """Forward and backward of all micro-batches of a step.

    Fields:
        applied: what is not plain about them, one phrase each.
    """

    applied: tuple[str, ...]

    def run(self, batch: StepBatch, scale: float, on_phase: OnPhase) -> Tensor:
        """Add the gradients of ``scale`` times the loss to the parameters.

        Returns:
            This rank's loss sum, unscaled; 0 on all pipeline stages but the last.
        """
        ...

    def losses(self, batch: StepBatch) -> Iterator[Tensor]:
        """Yield loss sums of forward passes alone."""
        ...

    def watch(self, on_action: OnAction) -> None:
        """Let ``on_action`` hear what pipeline stages do; called before the first step."""

    def close(self) -> None:
        """Drop models, graphs and process groups."""


class MicroBatchPass:
    """Forward and backward of one micro-batch through a model that lies whole on its ranks."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        self.model, self.loss = model, loss

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Return the loss, with its graph."""
        inputs, targets, weights, named = micro_batch
        return self.loss(self.model(inputs, **named), targets, weights)

    def __call__(self, micro_batch: MicroBatch, scale: Tensor) -> Tensor:
        """Run forward and backward; return the loss, unscaled."""
        loss = self.forward(micro_batch)
        (loss * scale).backward()
        return loss.detach()


class LoopPasses:
    """One micro-batch after the other."""

    applied: tuple[str, ...] = ()

    def __init__(self, compute: MicroBatchPass, batcher: MicroBatcher, zero: int) -> None:
        self.compute, self._batcher, self._zero = compute, batcher, zero

    def run(self, batch: StepBatch, scale: float, on_phase: OnPhase) -> Tensor:
        """Run each micro-batch forward and backward."""
        micro_batches = list(self._batcher.micro_batches(batch))
        sums = []
        for number, micro_batch in enumerate(micro_batches, 1):
            if number > 1:
                on_phase("forward")
            loss = self.compute.forward(micro_batch)
            on_phase("backward")
            if self._zero and len(micro_batches) > 1 and number in (1, len(micro_batches)):
                prepare_backward(self.compute.model, self._zero, last=number > 1)
            (loss * scale).backward()
            sums.append(loss.detach())
        return torch.stack(sums).sum()

    def losses(self, batch: StepBatch) -> Iterator[Tensor]:
        """Yield one loss sum per micro-batch."""
        for micro_batch in self._batcher.micro_batches(batch):
            yield self.compute.forward(micro_batch)

    def watch(self, on_action: OnAction) -> None:
        """Do nothing: there are no stages."""

    def close(self) -> None:
        """Drop the model."""
        del self.compute


class GraphPasses:
    """A micro-batch's passes recorded once, and replayed with the others."""

    applied: tuple[str, ...] = ("micro-batches replayed from a CUDA graph",)

    def __init__(
        self, compute: MicroBatchPass, batcher: MicroBatcher, graph: StepGraph, gradients: Gradients
    ) -> None:
        self.compute, self._batcher, self._graph, self._gradients = compute, batcher, graph, gradients

    def run(self, batch: StepBatch, scale: float, on_phase: OnPhase) -> Tensor:
        """Replay each micro-batch; record the first one before."""
        micro_batches = list(self._batcher.micro_batches(batch))
        if not self._graph.recorded:
            self._graph.record(micro_batches[0], scale)
            self._gradients.clear(len(micro_batches))
        return torch.stack([self._graph.replay(micro_batch, scale) for micro_batch in micro_batches]).sum()

    def losses(self, batch: StepBatch) -> Iterator[Tensor]:
        """Yield one loss sum per micro-batch."""
        for micro_batch in self._batcher.micro_batches(batch):
            yield self.compute.forward(micro_batch)

    def watch(self, on_action: OnAction) -> None:
        """Do nothing: there are no stages."""

    def close(self) -> None:
        """Drop the graph and the model."""
        self._graph.close()
        del self.compute, self._gradients


class PipelinePasses:
    """All micro-batches through this rank's stages, in the order of a pipeline schedule."""

    applied: tuple[str, ...] = ()

    def __init__(self, pipeline: Pipeline, batcher: MicroBatcher) -> None:
        self.pipeline, self._batcher = pipeline, batcher

    def run(self, batch: StepBatch, scale: float, on_phase: OnPhase) -> Tensor:
        """Run the schedule."""
        return self.pipeline.step(*self._batcher.whole(batch), scale)

    def losses(self, batch: StepBatch) -> Iterator[Tensor]:
        """Yield the loss sum of all micro-batches."""
        yield self.pipeline.evaluate(self._batcher.micro_batches(batch))

    def watch(self, on_action: OnAction) -> None:
        """Let ``on_action`` hear what the stages do."""
        self.pipeline.on_action = on_action

    def close(self) -> None:
        """Drop the schedules, which hold the models and the group."""
        self.pipeline.close()


def choose_passes(
    job: JobConfig,
    mesh: Mesh,
    definition: ModelDefinition,
    models: Mapping[int, nn.Module],
    parameters: Sequence[LocalParameter],
    device: torch.device,
) -> tuple[Passes, Gradients]:
    """Choose the passes that a layout and a job ask for, and the gradients that they add to."""
    if job.meta.on:
        return meta_passes(job, mesh, definition, models, parameters, device)
    batcher = MicroBatcher(job, mesh.layout, mesh.at.cp, device, weighted=bool(definition.mixtures))
    loss, plan = loss_function(job, mesh, definition), reduction_plan(job.comm, mesh)
    if mesh.layout.pp > 1:
        pipeline = _pipeline(job, mesh, definition, models, loss, device)
        gradients = Gradients(parameters, definition, mesh, plan)
        return PipelinePasses(pipeline, batcher), gradients
    (model,) = models.values()
    compute = MicroBatchPass(model, loss)
    if not job.kernels.cuda_graphs:
        gradients = Gradients(parameters, definition, mesh, plan)
        return LoopPasses(compute, batcher, mesh.layout.zero), gradients
    graph = StepGraph(compute, device)
    with graph.stream():  # on which hooks of the backward pass have to be made
        static = StaticGradients(parameters, definition, mesh, plan)
    return GraphPasses(compute, batcher, graph, static), static


def loss_function(job: JobConfig, mesh: Mesh, definition: ModelDefinition) -> LossFunction:
    """Return the sum of weighted token losses, from logits or from the losses that a linear head makes.

    A loss of the user's own sees whole rows of logits over the whole vocabulary: the config refuses it where
    they are cut.
    """

    def counted(losses: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        if job.data.leaves_out:
            losses = losses * (targets >= 0)
        return weighted_sum(losses, weights)

    if job.kernels.loss == "linear":
        return counted
    if job.model.loss is not None:
        own = import_object("model.loss", job.model.loss)
        return lambda logits, targets, weights: counted(own(at_least_fp32(logits), targets), targets, weights)
    group = mesh.group("tp") if definition.sequence_parallel else None
    first, _ = chunk(job.model.vocab_size, mesh.layout.tp, mesh.at.tp)

    def of_logits(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        known = targets.clamp(min=0) if job.data.leaves_out else targets
        return counted(token_losses(logits, known, group, first), targets, weights)

    return of_logits


def _pipeline(
    job: JobConfig,
    mesh: Mesh,
    definition: ModelDefinition,
    models: Mapping[int, nn.Module],
    loss: LossFunction,
    device: torch.device,
) -> Pipeline:
    from picotron_ray.parallel.pipeline.pipeline import Pipeline  # takes a while to import

    layout, group = mesh.layout, mesh.group("pp")
    assert group is not None
    sequence = job.data.sequence_length // layout.cp
    parts = layout.tp if definition.sequence_parallel else 1
    rows = layout.micro_batch_rows(mesh.at.dp, job.data.global_batch)
    shape = (rows, sequence // parts, definition.hidden_size)
    dtype = compute_dtype(job) or master_dtype(job)
    hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    return Pipeline(models, layout, group, hidden, sequence, loss, device, job.layout.actions)
