"""The model of one rank in one generation, and the parts of a step that compute.

The engine is what a generation builds and throws away: stages of the model cut for the layout, their
optimizer moments, and the mesh. It knows no files and no recovery. Gradients are the sum over all tokens
of the global batch divided by their number, exact whatever the rows per replica; rows of weight 0 only
fill shapes.

Order per step: ``gradients_of`` (``forward_backward`` → ``reduce`` → ``clip``) → ``optimizer_step``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.checkpoint.torch_state import Encoded, StateTensor
from picotron_ray.comm.all_reduce import sum_
from picotron_ray.comm.process_groups import ProcessGroups
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, Shard
from picotron_ray.models.definition import definition_of
from picotron_ray.parallel.data.ddp import replicated
from picotron_ray.parallel.data.fsdp import before_backward, let_go
from picotron_ray.parallel.data.grad_norm import clip_, global_norm
from picotron_ray.parallel.local_shards import LocalParameter, chunk, cut, local_gradient, local_parameters
from picotron_ray.parallel.loss.cross_entropy import token_losses, weighted_sum
from picotron_ray.parallel.mesh import Mesh, make_mesh
from picotron_ray.parallel.pipeline.tied_embeddings import TiedEnds
from picotron_ray.train.build_stages import build_stages, mixtures_of
from picotron_ray.train.cuda_graphs import HELD_BACK, StepGraph, clear
from picotron_ray.train.expert_balance import Balance, Load
from picotron_ray.train.micro_batches import Inputs, MicroBatch
from picotron_ray.train.optim.optimizer import build_optimizer
from picotron_ray.train.precision.adaptive import AdaptivePrecision, Policy
from picotron_ray.train.precision.gradient_variability import GradientSwings
from picotron_ray.train.precision.loss_scaler import LossScaler
from picotron_ray.train.precision.precision import check_precision, master_dtype

if TYPE_CHECKING:
    from picotron_ray.parallel.pipeline.pipeline import Pipeline

OnPhase = Callable[[str], None]


def silent(phase: str) -> None:
    """An ``on_phase`` that tells nobody."""


class Engine:
    """See the module. Built by `build_engine`; weights are undefined until `initialise` or a restore.

    Fields:
        step: number of updates that the weights have seen.
        applied: what the layout made of the model, one phrase each.
    """

    def __init__(
        self, job: JobConfig, mesh: Mesh, device: torch.device, swings: GradientSwings | None = None
    ) -> None:
        self.job, self.layout, self.device = job, mesh.layout, device
        self.step = 0
        # moments taken over from another run have seen its updates: the bias correction must know
        self._inherited_updates = (job.init_from.step or 0) if job.init_from.optimizer_state else 0
        self._mesh: Mesh | None = mesh
        at = mesh.at
        self._first_group = self.layout.state_group(mesh.rank) == 0
        self._owns_loss = at.pp == self.layout.last_stage_rank and at.tp == 0
        self._definition = definition_of(job.model, job.seed)
        self._tp_group = mesh.group("tp")
        self._first_token, _ = chunk(job.model.vocab_size, self.layout.tp, at.tp)
        self._loss_group = self._tp_group if self._definition.sequence_parallel else None
        self._losses_in_head = job.kernels.loss == "linear"
        weighted = bool(self._definition.mixtures)
        self._inputs = Inputs(job, self.layout, at.cp, device, weighted=weighted)
        self._models, self.applied = build_stages(job, mesh, self._definition, device)
        self._parameters = [
            parameter
            for model in self._models.values()
            for parameter in local_parameters(model, self._definition.specs, mesh)
        ]
        ends = (mesh.group("pp"), self.layout.other_end(at.pp))
        self._ends = TiedEnds(self._parameters, self._definition.copies.values(), *ends)
        summed = [parameter for parameter in self._parameters if parameter.spec.trained]
        self._trained = [parameter for parameter in summed if not self._ends.follows(parameter)]
        self._graph = StepGraph(self._passes, device) if job.kernels.cuda_graphs else None
        with nullcontext() if self._graph is None else self._graph.stream():
            self._replicated = replicated((p.parameter, self._sum_group(p, mesh)) for p in summed)
        names = {name for model in self._models.values() for name, _ in model.named_parameters()}
        table = [spec for spec in self._definition.table if spec.name in names]
        self._optimizer = build_optimizer(job, self._trained, table, mesh.layout, mesh.rank, device)
        self.applied += self._optimizer.applied
        self._scaler = LossScaler(device) if job.precision == "fp16" else None
        self._balance = Balance(mixtures_of(self._models, self._definition), mesh.group("data"))
        self._adaptive = self._adaptation(swings or GradientSwings())
        self._gradients: list[Tensor] = []
        self._pipeline = self._build_pipeline(mesh) if self.layout.pp > 1 else None
        if self._graph is not None:
            self.applied += ("micro-batches replayed from a CUDA graph",)

    def _sum_group(self, parameter: LocalParameter, mesh: Mesh) -> dist.ProcessGroup | None:
        """The ranks over which a gradient is summed where FSDP does not do it."""
        own = parameter.spec.expert and self.layout.ep > 1
        if self.layout.zero:
            return mesh.group("copy") if own and mesh.experts is None else None
        return mesh.group("edp" if own else "data")

    def _adaptation(self, swings: GradientSwings) -> AdaptivePrecision | None:
        config = self.job.adaptive_precision
        if config.error_bound is None:
            return None
        table = self._definition.table
        found = AdaptivePrecision(config, table, self._trained, self.layout, self.device, swings)
        found.install(self._models.values(), master_dtype(self.job))
        return found

    def _build_pipeline(self, mesh: Mesh) -> Pipeline:
        from picotron_ray.parallel.pipeline.pipeline import Pipeline

        group = mesh.group("pp")
        assert group is not None
        sequence = self.job.data.sequence_length // self.layout.cp
        parts = self.layout.tp if self._definition.sequence_parallel else 1
        shape = (self.layout.micro_batch, sequence // parts, self._definition.hidden_size)
        hidden = torch.empty(shape, dtype=master_dtype(self.job), device="meta", requires_grad=True)
        held, actions = (self._models, self.layout, group), self.job.layout.actions
        return Pipeline(*held, hidden, sequence, self._loss_sum, self.device, actions)

    # --- a step --------------------------------------------------------------------------------------

    def _loss_sum(self, output: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Args: output: logits, or the targets' losses where the head makes them."""
        if not self._losses_in_head:
            output = token_losses(output, targets, self._loss_group, self._first_token)
        return weighted_sum(output, weights)

    def gradients_of(self, batch: StepBatch, on_phase: OnPhase = silent) -> tuple[float, float]:
        """Make the gradients of a batch, ready for `optimizer_step`.

        fp16 computes the batch again, with a smaller loss scale, where its gradients overflow.

        Returns what `forward_backward` and `clip` do.
        """
        if self._scaler is not None:
            self._scaler.begin()
        while True:
            loss = self.forward_backward(batch, on_phase)
            self.reduce(on_phase)
            norm = self.clip(on_phase)
            if self._scaler is None or self._scaler.fits(norm):
                return loss, norm

    def forward_backward(self, batch: StepBatch, on_phase: OnPhase = silent) -> float:
        """Accumulate the gradient of all micro-batches of this replica.

        Returns this rank's sum of weighted token losses in nats; 0.0 on ranks that do not own the loss
        (all but tp rank 0 of the last stage), so that a sum over all ranks is the batch's.
        """
        scale = (self._scaler.scale if self._scaler is not None else 1.0) / batch.global_tokens
        self._clear_gradients(len(batch.tokens))
        self._balance.begin(scale)
        on_phase("forward")
        if self._pipeline is not None:
            total = self._pipeline.step(*self._inputs.whole(batch), scale)
        else:
            total = self._accumulate(list(self._inputs.micro_batches(batch)), scale, on_phase)
        return float(total) if self._owns_loss else 0.0

    def _clear_gradients(self, passes: int) -> None:
        """Begin a step in which ``passes`` micro-batches add to the gradients."""
        self._gradients = []
        if self._graph is not None:
            clear(parameter.parameter for parameter in self._trained)
        else:
            for parameter in self._parameters:
                parameter.parameter.grad = None
        for copies in self._replicated:
            copies.begin(passes if self._graph is None else HELD_BACK)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], scale: float, on_phase: OnPhase) -> Tensor:
        if self._graph is not None:
            return self._replay(self._graph, micro_batches, scale)
        sums = []
        (model,) = self._models.values()

        def between() -> None:
            on_phase("backward")
            if self.layout.zero and len(micro_batches) > 1 and number in (1, len(micro_batches)):
                before_backward(model, self.layout.zero, last=number > 1)

        for number, micro_batch in enumerate(micro_batches, 1):
            if number > 1:
                on_phase("forward")
            sums.append(self._passes(micro_batch, scale, between))
        return torch.stack(sums).sum()

    def _replay(self, graph: StepGraph, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
        if not graph.recorded:
            graph.record(micro_batches[0], scale)
            self._clear_gradients(len(micro_batches))
        return torch.stack([graph.replay(micro_batch, scale) for micro_batch in micro_batches]).sum()

    def _passes(
        self, micro_batch: MicroBatch, scale: float | Tensor, between: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Forward and backward of a micro-batch; returns its loss."""
        inputs, targets, weights, named = micro_batch
        loss = self._loss_sum(self._output(inputs, named), targets, weights)
        between()
        (loss * scale).backward()
        return loss.detach()

    def _output(self, inputs: Tensor, named: dict[str, Tensor]) -> Tensor:
        (model,) = self._models.values()
        found: Tensor = model(inputs, **named)
        return found

    def reduce(self, on_phase: OnPhase = silent) -> None:
        """Finish the sums: those under way over dp and cp, of tied ends, over tp of what is partial."""
        on_phase("reduce")
        for copies in self._replicated:
            copies.finish()
        cut = self._definition.sequence_parallel
        found = [local_gradient(parameter, self.layout, cut) for parameter in self._trained]
        self._gradients = [gradient for gradient, _ in found]
        self._ends.sum_(self._trained, self._gradients)
        partial = [gradient for gradient, is_partial in found if is_partial]
        if partial:
            assert self._tp_group is not None
            sum_(partial, self._tp_group)
        if self._scaler is not None:
            self._scaler.unscale_(self._gradients)
        self._balance.reduce()

    def clip(self, on_phase: OnPhase = silent) -> float:
        """Clip to ``optimizer.clip_norm``; returns the global norm before clipping."""
        on_phase("clip")
        counted = [parameter.counted for parameter in self._trained]
        norm = global_norm(self._gradients, counted, self.layout, self.device)
        if self._adaptive is not None:
            self._adaptive.observe(self._gradients)
        if self.job.optimizer.clip_norm is not None and math.isfinite(norm):
            clip_(self._gradients, norm, self.job.optimizer.clip_norm)
        return norm

    def optimizer_step(self, rate: float) -> None:
        """Update weights and moments in place with learning rate ``rate``."""
        self._optimizer.step(self._gradients, rate, self._inherited_updates + self.step + 1)
        self._ends.follow()
        self._balance.step()
        if self._adaptive is not None:
            self._adaptive.step()
        if self._scaler is not None:
            self._scaler.step()
        self.step += 1

    def expert_loads(self) -> dict[int, Load]:
        """How the experts of this stage were used in the step that was reduced last, by layer number."""
        return self._balance.loads()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[StepBatch]) -> tuple[float, int]:
        """This rank's sum of token losses and number of tokens; (0.0, 0) on ranks that own no loss."""
        total, tokens_seen = 0.0, 0
        for batch in batches:
            if self._pipeline is not None:
                total += float(self._pipeline.evaluate(self._inputs.micro_batches(batch)))
            else:
                for inputs, targets, weights, named in self._inputs.micro_batches(batch):
                    total += float(self._loss_sum(self._output(inputs, named), targets, weights))
            tokens_seen += int((batch.weights > 0).sum()) * (batch.tokens.shape[-1] - 1) // self.layout.cp
        for model in self._models.values():
            let_go(model)
        return (total, tokens_seen) if self._owns_loss else (0.0, 0)

    def adapt(self, batches: Sequence[StepBatch]) -> Policy | None:
        """Decide which parts compute in low precision (`AdaptivePrecision.decide`); all ranks together.

        Returns None where the job does not ask for it.
        """
        if self._adaptive is None:
            return None
        return self._adaptive.decide(batches, lambda some: self.evaluate(some)[0])

    # --- state ---------------------------------------------------------------------------------------

    def _state_tensor(self, name: str, parameter: LocalParameter, tensor: Tensor | Encoded) -> StateTensor:
        dtype = str(tensor.dtype).removeprefix("torch.")
        shard = Shard(name, dtype, parameter.spec.shape, parameter.box)
        return StateTensor(shard, tensor, parameter.primary)

    def weights(self) -> list[StateTensor]:
        """Weights of this rank, without moments: live storage."""
        return [self._state_tensor(p.spec.name, p, p.local) for p in self._parameters]

    def state(self) -> list[StateTensor]:
        """Weights and moments of this rank: live storage, the same for the engine's whole life."""
        tensors = self.weights()
        for moment, values in self._optimizer.moments.items():
            tensors += [
                self._state_tensor(f"{moment}/{p.spec.name}", p, values[p.spec.name])
                for p in self._trained
                if p.spec.name in values
            ]
        if self._scaler is not None:
            tensors.append(self._scale_state(self._scaler.state))
        return tensors

    def _scale_state(self, tensor: Tensor) -> StateTensor:
        """The loss scale, which all ranks hold alike; the first state group speaks for it."""
        shape = tuple(tensor.shape)
        shard = Shard("scaler/loss_scale", "float32", shape, Box((0,), shape))
        return StateTensor(shard, tensor, self._first_group)

    def gradients(self) -> list[StateTensor]:
        """The gradients as they are now: raw after `reduce`, clipped after `clip`."""
        return [
            self._state_tensor(p.spec.name, p, g) for p, g in zip(self._trained, self._gradients, strict=True)
        ]

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Set the weights of step 0: a function of seed and name alone, the same at every layout."""
        initial = self._definition.initial(seed)
        for parameter in self._parameters:
            parameter.local.copy_(cut(initial(parameter.spec), parameter.box))
        for values in self._optimizer.moments.values():
            for value in values.values():
                value.zero_()
        if self._scaler is not None:
            self._scaler.initialise()
        self.step = 0

    def set_step(self, step: int) -> None:
        """Say how many updates the restored state has seen (the optimizer's only scalar)."""
        self.step = step

    def close(self) -> None:
        """Drop every reference to the model and the process groups; the engine is unusable afterwards.

        Modules and hooks form cycles: the caller collects garbage once, before it closes the groups.
        """
        if self._pipeline is not None:
            self._pipeline.close()
        for copies in self._replicated:
            copies.close()
        if self._graph is not None:
            self._graph.close()
        if self._mesh is not None:
            self._mesh.close()
        self._pipeline = self._mesh = self._graph = None
        self._models.clear()
        self._replicated.clear()
        self._tp_group = self._loss_group = None
        self._parameters, self._trained, self._gradients = [], [], []
        del self._optimizer, self._balance, self._adaptive, self._ends


def build_engine(
    job: JobConfig,
    layout: Layout,
    rank: int,
    groups: ProcessGroups | None,
    device: torch.device,
    swings: GradientSwings | None = None,
) -> Engine:
    """Build one rank's engine; all ranks of the generation together.

    Args:
        groups: connected process groups; None only for a layout of one process.
        swings: what this process saw of the gradients in earlier generations, for adaptive precision.

    Raises LayoutError where layout or precision cannot be applied, PeerLostError where a peer is gone.
    """
    check_precision(job, device)
    if groups is None:
        if layout.world_size != 1:
            raise LayoutError(f"layout {layout} needs {layout.world_size} processes, saw one without groups")
        return Engine(job, make_mesh(layout, rank, device.type), device, swings)
    if groups.world_size != layout.world_size:
        raise LayoutError(f"layout {layout} needs {layout.world_size} processes, saw {groups.world_size}")
    with groups.guard("build"), groups.forming():
        mesh = make_mesh(layout, rank, device.type, groups.timeout)
    return Engine(job, mesh, device, swings)
