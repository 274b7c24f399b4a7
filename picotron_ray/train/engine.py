"""The model of one rank in one generation, and the parts of a step that compute.

The engine is what a generation builds and throws away: a stage of the model cut for the layout, its
optimizer moments, and the mesh. It knows no files and no recovery. Gradients are the sum over all tokens
of the global batch divided by their number, exact whatever the rows per replica; rows of weight 0 only
fill shapes.

Order per step: ``forward_backward`` → ``reduce`` → ``clip`` → ``optimizer_step``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from picotron_ray.checkpoint.canonical import Box, Shard
from picotron_ray.checkpoint.dcp import StateTensor
from picotron_ray.comm.groups import ProcessGroups
from picotron_ray.comm.reduce import sum_
from picotron_ray.config.job import JobConfig
from picotron_ray.config.kernels import Backend, attention_backends, attention_problem
from picotron_ray.config.layout import Layout
from picotron_ray.data.batch import StepBatch
from picotron_ray.errors import LayoutError
from picotron_ray.models.definition import definition_of
from picotron_ray.models.plan import SequenceShard
from picotron_ray.parallel.attention import AttentionPlan
from picotron_ray.parallel.data import settle
from picotron_ray.parallel.loss import weighted_loss_sum
from picotron_ray.parallel.mesh import Mesh, make_mesh
from picotron_ray.parallel.norm import clip_, global_norm
from picotron_ray.parallel.parallelize import LocalParameter, local_gradient, local_parameters, parallelize
from picotron_ray.train.optimizer import Optimizer
from picotron_ray.train.precision import apply_precision, master_dtype

if TYPE_CHECKING:
    from picotron_ray.parallel.pipeline import Pipeline

OnPhase = Callable[[str], None]


def silent(phase: str) -> None:
    """An ``on_phase`` that tells nobody."""


class Engine:
    """See the module. Built by `build_engine`; weights are undefined until `initialise` or a restore.

    Fields:
        step: number of updates that the weights have seen.
        applied: what the layout made of the model, one phrase each.
    """

    def __init__(self, job: JobConfig, mesh: Mesh, device: torch.device) -> None:
        self.job, self.layout, self.device = job, mesh.layout, device
        self.step = 0
        # moments taken over from another run have seen its updates: the bias correction must know
        self._inherited_updates = (job.init_from.step or 0) if job.init_from.optimizer_state else 0
        self._mesh: Mesh | None = mesh
        at = mesh.at
        self._last = at.pp == self.layout.pp - 1
        self._owns_loss = self._last and at.tp == 0
        self._definition = definition_of(job.model, job.seed)
        self._tp_group, self._tp_index = mesh.group("tp"), at.tp
        self._loss_group = self._tp_group if self._definition.sequence_parallel else None
        self._data_group = mesh.group("data") if not self.layout.zero else None
        self._kept = self._kept_tokens(mesh)
        self._model: nn.Module | None = self._build(mesh)
        blocks = self._definition.blocks(self._model)
        self.applied = parallelize(
            self._model,
            blocks,
            mesh,
            self._definition.styles,
            AttentionPlan(
                self._definition.attention,
                attention_backend(job, device, mesh.layout),
                job.data.sequence_length,
            ),
        )
        self._materialise(self._model)
        self._parameters = list(local_parameters(self._model, self._definition.table, mesh))
        self._optimizer = Optimizer(job.optimizer, self._parameters)
        self._gradients: list[Tensor] = []
        self._pipeline = self._build_pipeline(mesh) if self.layout.pp > 1 else None

    def _build(self, mesh: Mesh) -> nn.Module:
        """This rank's stage, without storage."""
        return self._definition.stage(self.layout.pp, mesh.at.pp).to(master_dtype(self.job))

    def _materialise(self, model: nn.Module) -> None:
        self._definition.materialise(model, self.device)
        settle(model)
        apply_precision(model, self.job, self.device)

    def _kept_tokens(self, mesh: Mesh) -> Tensor | None:
        """Positions of a row that this rank computes; None: all."""
        if self.layout.cp == 1:
            return None
        shard = SequenceShard(self.job.data.sequence_length, self.layout.cp, mesh.at.cp)
        return torch.tensor(shard.positions(), device=self.device)

    def _build_pipeline(self, mesh: Mesh) -> Pipeline:
        from picotron_ray.parallel.pipeline import Pipeline

        group = mesh.group("pp")
        assert group is not None
        assert self._model is not None
        sequence = self.job.data.sequence_length // self.layout.cp
        parts = self.layout.tp if self._definition.sequence_parallel else 1
        shape = (self.layout.micro_batch, sequence // parts, self._definition.hidden_size)
        hidden = torch.empty(shape, dtype=master_dtype(self.job), device="meta", requires_grad=True)
        return Pipeline(
            self._model, self.layout, mesh.at.pp, group, hidden, sequence, self._loss_sum, self.device
        )

    # --- a step --------------------------------------------------------------------------------------

    def _loss_sum(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return weighted_loss_sum(logits, targets, weights, self._loss_group, self._tp_index)

    def _on_device(self, batch: StepBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs and targets ``[micro_batches, micro_batch, local tokens]``, weights without the last."""
        tokens = torch.from_numpy(batch.tokens).to(self.device, non_blocking=True)
        weights = torch.from_numpy(batch.weights).to(self.device, master_dtype(self.job), non_blocking=True)
        inputs, targets = tokens[..., :-1], tokens[..., 1:]
        if self._kept is not None:
            inputs, targets = inputs[..., self._kept], targets[..., self._kept]
        return inputs, targets, weights

    def forward_backward(self, batch: StepBatch, on_phase: OnPhase = silent) -> float:
        """Accumulate the gradient of all micro-batches of this replica.

        Returns this rank's sum of weighted token losses in nats; 0.0 on ranks that do not own the loss
        (all but tp rank 0 of the last stage), so that a sum over all ranks is the batch's.
        """
        assert self._model is not None
        inputs, targets, weights = self._on_device(batch)
        scale = 1.0 / batch.global_tokens
        self._gradients = []
        for parameter in self._model.parameters():
            parameter.grad = None
        on_phase("forward")
        if self._pipeline is not None:
            total = self._pipeline.step(inputs, targets, weights, scale)
        else:
            total = self._accumulate(inputs, targets, weights, scale, on_phase)
        return float(total) if self._owns_loss else 0.0

    def _accumulate(
        self, inputs: Tensor, targets: Tensor, weights: Tensor, scale: float, on_phase: OnPhase
    ) -> Tensor:
        assert self._model is not None
        sums = []
        for number, (fed, wanted, row_weights) in enumerate(zip(inputs, targets, weights, strict=True)):
            if number:
                on_phase("forward")
            loss = self._loss_sum(self._model(fed), wanted, row_weights)
            on_phase("backward")
            (loss * scale).backward()
            sums.append(loss.detach())
        return torch.stack(sums).sum()

    def reduce(self, on_phase: OnPhase = silent) -> None:
        """Finish the gradients: sum over tp what is partial, and over dp and cp where FSDP has not."""
        on_phase("reduce")
        cut = self._definition.sequence_parallel
        found = [local_gradient(parameter, self.layout, cut) for parameter in self._parameters]
        self._gradients = [gradient for gradient, _ in found]
        partial = [gradient for gradient, is_partial in found if is_partial]
        if partial:
            assert self._tp_group is not None
            sum_(partial, self._tp_group)
        if self._data_group is not None:
            sum_(self._gradients, self._data_group)

    def clip(self, on_phase: OnPhase = silent) -> float:
        """Clip to ``optimizer.clip_norm``; returns the global norm before clipping."""
        on_phase("clip")
        counted = [parameter.counted for parameter in self._parameters]
        norm = global_norm(self._gradients, counted, self.layout, self.device)
        if self.job.optimizer.clip_norm is not None:
            clip_(self._gradients, norm, self.job.optimizer.clip_norm)
        return norm

    def optimizer_step(self, rate: float) -> None:
        """Update weights and moments in place with learning rate ``rate``."""
        self._optimizer.step(self._gradients, rate, self._inherited_updates + self.step + 1)
        self.step += 1

    @torch.no_grad()
    def evaluate(self, batches: Sequence[StepBatch]) -> tuple[float, int]:
        """This rank's sum of token losses and number of tokens; (0.0, 0) on ranks that own no loss."""
        assert self._model is not None
        total, tokens_seen = 0.0, 0
        for batch in batches:
            micro_batches = list(zip(*self._on_device(batch), strict=True))
            if self._pipeline is not None:
                total += float(self._pipeline.evaluate(micro_batches))
            else:
                for inputs, targets, weights in micro_batches:
                    total += float(self._loss_sum(self._model(inputs), targets, weights))
            tokens_seen += int((batch.weights > 0).sum()) * (batch.tokens.shape[-1] - 1) // self.layout.cp
        return (total, tokens_seen) if self._owns_loss else (0.0, 0)

    # --- state ---------------------------------------------------------------------------------------

    def _state_tensor(self, name: str, parameter: LocalParameter, tensor: Tensor) -> StateTensor:
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
                self._state_tensor(f"{moment}/{p.spec.name}", p, value)
                for p, value in zip(self._parameters, values, strict=True)
            ]
        return tensors

    def gradients(self) -> list[StateTensor]:
        """The gradients as they are now: raw after `reduce`, clipped after `clip`."""
        return [
            self._state_tensor(p.spec.name, p, g)
            for p, g in zip(self._parameters, self._gradients, strict=True)
        ]

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Set the weights of step 0: a function of seed and name alone, the same at every layout."""
        initial = self._definition.initial(seed)
        for parameter in self._parameters:
            parameter.local.copy_(cut(initial(parameter.spec), parameter.box))
        for values in self._optimizer.moments.values():
            for value in values:
                value.zero_()
        self.step = 0

    def set_step(self, step: int) -> None:
        """Say how many updates the restored state has seen (the optimizer's only scalar)."""
        self.step = step

    def close(self) -> None:
        """Drop every reference to the model and the process groups; the engine is unusable afterwards.

        Modules and hooks form cycles: the caller collects garbage once, after it has closed the groups.
        """
        if self._pipeline is not None:
            self._pipeline.close()
        if self._mesh is not None:
            self._mesh.close()
        self._pipeline = self._model = self._mesh = None
        self._tp_group = self._data_group = self._loss_group = None
        self._parameters, self._gradients = [], []
        del self._optimizer


def attention_backend(job: JobConfig, device: torch.device, layout: Layout) -> Backend:
    """The implementation of attention that runs; LayoutError where the one asked for does not."""
    problem = attention_problem(job, device.type, layout.cp)
    if problem:
        raise LayoutError(f"kernels.attention: {problem}")
    asked = job.kernels.attention
    return attention_backends(job, device.type, layout.cp)[0] if asked == "auto" else asked


def preload(job: JobConfig) -> None:
    """Import now what a layout of this job may need, so that no recovery waits for it."""
    if job.layout.pp != 1:
        import picotron_ray.parallel.pipeline  # noqa: F401


def cut(full: Tensor, box: Box) -> Tensor:
    """The part of a full tensor that ``box`` names, as a view."""
    for dim, (start, length) in enumerate(zip(box.offset, box.size, strict=True)):
        full = full.narrow(dim, start, length)
    return full


def build_engine(
    job: JobConfig, layout: Layout, rank: int, groups: ProcessGroups | None, device: torch.device
) -> Engine:
    """Build one rank's engine; all ranks of the generation together.

    Args:
        groups: connected process groups; None only for a layout of one process.

    Raises LayoutError where the layout cannot be applied, PeerLostError where a peer is gone.
    """
    if groups is None:
        if layout.world_size != 1:
            raise LayoutError(f"layout {layout} needs {layout.world_size} processes, saw one without groups")
        return Engine(job, make_mesh(layout, rank, device.type), device)
    if groups.world_size != layout.world_size:
        raise LayoutError(f"layout {layout} needs {layout.world_size} processes, saw {groups.world_size}")
    with groups.guard("build"), groups.forming():
        mesh = make_mesh(layout, rank, device.type, groups.timeout)
    return Engine(job, mesh, device)
