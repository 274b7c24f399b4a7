"""The model of one rank in one generation, and the parts of a step that compute.

The engine is what a generation builds and throws away: stages of the model cut for the layout, their
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
from picotron_ray.models.moe import MixtureOfExperts
from picotron_ray.models.plan import SequenceShard
from picotron_ray.parallel.attention import AttentionPlan
from picotron_ray.parallel.data import settle
from picotron_ray.parallel.loss import weighted_loss_sum
from picotron_ray.parallel.mesh import Mesh, make_mesh
from picotron_ray.parallel.norm import clip_, global_norm
from picotron_ray.parallel.parallelize import (
    LocalParameter,
    Plan,
    local_gradient,
    local_parameters,
    parallelize,
)
from picotron_ray.train.balance import Balance, Load
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
        self._owns_loss = at.pp == self.layout.last_stage_rank and at.tp == 0
        self._definition = definition_of(job.model, job.seed)
        self._tp_group, self._tp_index = mesh.group("tp"), at.tp
        self._loss_group = self._tp_group if self._definition.sequence_parallel else None
        self._data_group = mesh.group("data") if not self.layout.zero else None
        self._expert_group = mesh.group("edp") if not self.layout.zero else None
        self._kept = self._kept_tokens(mesh)
        self._models: dict[int, nn.Module] = {}
        self.applied = self._build(mesh)
        self._parameters = [
            parameter
            for model in self._models.values()
            for parameter in local_parameters(model, self._definition.table, mesh)
        ]
        self._trained = [parameter for parameter in self._parameters if parameter.spec.trained]
        self._optimizer = Optimizer(job.optimizer, self._trained)
        self._balance = Balance(self._mixtures(), mesh.group("data"))
        self._gradients: list[Tensor] = []
        self._pipeline = self._build_pipeline(mesh) if self.layout.pp > 1 else None

    def _build(self, mesh: Mesh) -> tuple[str, ...]:
        """Make this rank's stages; returns what was applied to them."""
        stages, applied = self.layout.rank_stages(mesh.at.pp), []
        if self.layout.pp > 1:
            numbers = " and ".join(str(stage + 1) for stage in stages)
            applied.append(f"pipeline stage {numbers} of {self.layout.stages}, {self.layout.schedule}")
        said: tuple[str, ...] = ()
        for stage in stages:
            model = self._definition.stage(self.layout.stages, stage).to(master_dtype(self.job))
            said = parallelize(model, mesh, self._plan(model))
            self._materialise(model)
            self._models[stage] = model
        return (*applied, *said)

    def _plan(self, model: nn.Module) -> Plan:
        definition = self._definition
        return Plan(
            definition.styles,
            definition.blocks(model),
            AttentionPlan(
                definition.attention,
                attention_backend(self.job, self.device, self.layout),
                self.job.data.sequence_length,
            ),
            definition.mixtures,
            frozenset(spec.name for spec in definition.table if not spec.trained),
        )

    def _mixtures(self) -> list[tuple[int, MixtureOfExperts]]:
        """Layer number and module of every mixture of experts on this rank."""
        if not self._definition.mixtures:
            return []
        layers = {spec.name: spec.layer for spec in self._definition.table}
        return [
            (layers[f"{name}.router.weight"] or 0, module)
            for model in self._models.values()
            for name, module in model.named_modules()
            if isinstance(module, MixtureOfExperts)
        ]

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
        sequence = self.job.data.sequence_length // self.layout.cp
        parts = self.layout.tp if self._definition.sequence_parallel else 1
        shape = (self.layout.micro_batch, sequence // parts, self._definition.hidden_size)
        hidden = torch.empty(shape, dtype=master_dtype(self.job), device="meta", requires_grad=True)
        return Pipeline(
            self._models,
            self.layout,
            group,
            hidden,
            sequence,
            self._loss_sum,
            self.device,
            routed=bool(self._definition.mixtures),
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
        inputs, targets, weights = self._on_device(batch)
        scale = 1.0 / batch.global_tokens
        self._gradients = []
        for model in self._models.values():
            model.zero_grad(set_to_none=True)
        self._balance.begin(scale)
        on_phase("forward")
        if self._pipeline is not None:
            total = self._pipeline.step(inputs, targets, weights, scale)
        else:
            total = self._accumulate(inputs, targets, weights, scale, on_phase)
        return float(total) if self._owns_loss else 0.0

    def _accumulate(
        self, inputs: Tensor, targets: Tensor, weights: Tensor, scale: float, on_phase: OnPhase
    ) -> Tensor:
        sums = []
        for number, (fed, wanted, row_weights) in enumerate(zip(inputs, targets, weights, strict=True)):
            if number:
                on_phase("forward")
            loss = self._loss_sum(self._logits(fed, row_weights), wanted, row_weights)
            on_phase("backward")
            (loss * scale).backward()
            sums.append(loss.detach())
        return torch.stack(sums).sum()

    def _logits(self, inputs: Tensor, weights: Tensor) -> Tensor:
        (model,) = self._models.values()
        routed = (weights,) if self._definition.mixtures else ()
        found: Tensor = model(inputs, *routed)
        return found

    def reduce(self, on_phase: OnPhase = silent) -> None:
        """Finish the gradients: sum over tp what is partial, and over dp and cp where FSDP has not."""
        on_phase("reduce")
        cut = self._definition.sequence_parallel
        found = [local_gradient(parameter, self.layout, cut) for parameter in self._trained]
        self._gradients = [gradient for gradient, _ in found]
        partial = [gradient for gradient, is_partial in found if is_partial]
        if partial:
            assert self._tp_group is not None
            sum_(partial, self._tp_group)
        for experts, group in ((False, self._data_group), (True, self._expert_group)):
            mine = [
                g
                for p, g in zip(self._trained, self._gradients, strict=True)
                if (p.spec.expert and self.layout.ep > 1) is experts
            ]
            if group is not None and mine:
                sum_(mine, group)
        self._balance.reduce()

    def clip(self, on_phase: OnPhase = silent) -> float:
        """Clip to ``optimizer.clip_norm``; returns the global norm before clipping."""
        on_phase("clip")
        counted = [parameter.counted for parameter in self._trained]
        norm = global_norm(self._gradients, counted, self.layout, self.device)
        if self.job.optimizer.clip_norm is not None:
            clip_(self._gradients, norm, self.job.optimizer.clip_norm)
        return norm

    def optimizer_step(self, rate: float) -> None:
        """Update weights and moments in place with learning rate ``rate``."""
        self._optimizer.step(self._gradients, rate, self._inherited_updates + self.step + 1)
        self._balance.step()
        self.step += 1

    def expert_loads(self) -> dict[int, Load]:
        """How the experts of this stage were used in the step that was reduced last, by layer number."""
        return self._balance.loads()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[StepBatch]) -> tuple[float, int]:
        """This rank's sum of token losses and number of tokens; (0.0, 0) on ranks that own no loss."""
        total, tokens_seen = 0.0, 0
        for batch in batches:
            micro_batches = list(zip(*self._on_device(batch), strict=True))
            if self._pipeline is not None:
                total += float(self._pipeline.evaluate(micro_batches))
            else:
                for inputs, targets, weights in micro_batches:
                    total += float(self._loss_sum(self._logits(inputs, weights), targets, weights))
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
                for p, value in zip(self._trained, values, strict=True)
            ]
        return tensors

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
        self._pipeline = self._mesh = None
        self._models.clear()
        self._tp_group = self._data_group = self._loss_group = self._expert_group = None
        self._parameters, self._trained, self._gradients = [], [], []
        del self._optimizer, self._balance


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
