"""The training step of one rank in one generation.

A step is ``gradients_of`` (``forward_backward`` → ``reduce`` → ``clip``), then ``optimizer_step``, or
``skip_step`` where its update is left out::

    loss, norm = engine.gradients_of(batch)
    engine.optimizer_step(rate)

A generation builds its engine and throws it away: the stages of the model cut for the layout, their optimizer
moments, and the mesh. The engine knows no files and no recovery.

Gradients are the sum over all tokens of the global batch divided by their number, exact whatever the number
of rows per replica. Rows of weight 0 only fill shapes.

Optional parts stand behind one interface each, and are chosen when the engine is built:

========================  =======================================================================
`passes.Passes`           a plain loop, a CUDA graph, or a pipeline schedule
`gradients.Gradients`     storage made anew in each step, or static for a graph
`loss_scaler.Scaling`     fp16's dynamic loss scale, or none
`adaptive.Adaptation`     adaptive precision, or the job's for all parts
`optim.optimizer`         moments beside the weights, in host memory, in 8 bits, or none; Muon
========================  =======================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron_ray.checkpoint.torch_state import ERROR_FEEDBACK, StateTensor
from picotron_ray.comm.process_groups import ProcessGroups
from picotron_ray.comm.reducers.watched import Hash
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.fast_path import compiles_blocks, settled
from picotron_ray.data.batch import StepBatch
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Shard
from picotron_ray.models.build import definition_of
from picotron_ray.models.finetune import is_adapter
from picotron_ray.parallel.compiled_code import missing_compiler
from picotron_ray.parallel.data.fsdp import free_gathered_weights
from picotron_ray.parallel.data.grad_norm import clip_, global_norm
from picotron_ray.parallel.local_shards import local_parameters
from picotron_ray.parallel.memory.pools import MemoryPools
from picotron_ray.parallel.mesh import Mesh, make_mesh
from picotron_ray.parallel.precision.switches import PrecisionSwitches
from picotron_ray.parallel.share_holders import holders_of
from picotron_ray.train.build_stages import build_stages, mixtures_of
from picotron_ray.train.disturbance import add_disturbances
from picotron_ray.train.expert_balance import ExpertBalance, ExpertLoad
from picotron_ray.train.meta.inner_rates import shifts_of
from picotron_ray.train.meta.passes import losses_of
from picotron_ray.train.optim.optimizer import build_optimizer
from picotron_ray.train.passes import OnAction, OnPhase, choose_passes, silent, unwatched
from picotron_ray.train.precision.adaptive import PrecisionPolicy, choose_adaptation, parts_of
from picotron_ray.train.precision.gradient_variability import GradientVariability
from picotron_ray.train.precision.loss_scaler import loss_scaling
from picotron_ray.train.precision.precision import check_precision, compute_weights, master_dtype
from picotron_ray.train.reduction_plan import applied_ways, collective_plans, selection_of
from picotron_ray.train.slowness import add_slowness
from picotron_ray.train.training_state import MadeWeights, TrainingState
from picotron_ray.train.way_selection import Cost


class Engine:
    """The model of one rank and its training step, built by `build_engine`.

    Weights are undefined until `initialise` or a restore.

    Fields:
        step: number of steps that the state has seen, those without an update included.
        skipped: number of them whose update was left out.
        applied: what the layout made of the model, one phrase each.
        expert_balance: of its mixtures, and the loads of their experts.
        adaptation: of the precision of its parts.
        compute_weights: copies of weights in 16 bits, beside what `weights` lists.
    """

    def __init__(
        self,
        job: JobConfig,
        mesh: Mesh,
        device: torch.device,
        variability: GradientVariability | None = None,
        on_built: Callable[[], None] = lambda: None,
        pools: MemoryPools | None = None,
    ) -> None:
        missing, self._pools = missing_compiler(device.type), pools or MemoryPools()
        lacks = compiles_blocks(job, device.type, mesh.layout) and missing
        job = settled(job, device.type, mesh.layout, missing)
        self.job, self.layout, self.rank, self.device = job, mesh.layout, mesh.rank, device
        self.step = self.skipped = 0
        # moments taken over from another run have seen its updates: the bias correction must know
        self._inherited_updates = (job.init_from.step or 0) if job.init_from.optimizer_state else 0
        self._mesh = mesh
        self._owns_loss = mesh.at.pp == self.layout.last_stage_rank and mesh.at.tp == 0
        definition = definition_of(job.model, job.seed)
        self._table = definition.table
        sizes = parts_of(definition.table) if job.adaptive_precision.error_bound is not None else {}
        switches = PrecisionSwitches(sizes, device, master_dtype(job))
        mesh.choose_collectives(collective_plans(job.comm))
        weights = self.compute_weights = compute_weights(job, mesh)
        self._models, self.applied = build_stages(job, mesh, definition, device, switches, on_built, weights)
        add_slowness(job, self.layout, self._models)
        add_disturbances(job, self._models, weights.master_of)
        parameters = [
            parameter
            for model in self._models.values()
            for parameter in local_parameters(model, definition.specs, mesh, weights.masters)
        ]
        with self._pools.of("gradient"):
            made = choose_passes(job, mesh, definition, self._models, parameters, device)
            self._passes, self._gradients = made
        overlap = job.kernels.tp_overlap != "none"
        own, shown = device.type != "cuda", job.metrics.enabled
        self._selection = selection_of(job.comm, mesh, self._gradients, overlap=overlap, own=own, shown=shown)
        trained = self._gradients.trained
        self._counted = [parameter.counted for parameter in trained]
        names = {name for model in self._models.values() for name, _ in model.named_parameters()}
        table = [spec for spec in definition.table if spec.name in names]
        with self._pools.of("optimizer"):
            self._optimizer = build_optimizer(job, trained, table, mesh.layout, mesh.rank, device)
        self._scaling = loss_scaling(job.precision, device)
        mixtures, by_load = mixtures_of(self._models, definition), job.layout.expert_placement == "by_load"
        self.expert_balance = ExpertBalance(mixtures, mesh.group("data"), keeps=by_load)
        variability = variability or GradientVariability()
        self.adaptation = choose_adaptation(
            job, sizes, switches, trained, self.layout, device, variability, self._scaling
        )
        moments = {**self._optimizer.moments, ERROR_FEEDBACK: self._gradients.owed, **shifts_of(trained)}
        self._state = TrainingState(definition, mesh, parameters, trained, moments, self._scaling)
        self._clip_norm = math.inf if (limit := job.optimizer.clip_norm) is None else limit
        self.applied += applied_ways(job.comm, mesh) + ((f"no block compiled: {missing}",) if lacks else ())
        self._on_action: OnAction = unwatched
        for part in (self._optimizer, self._passes, self._gradients, self._pools):
            self.applied += part.applied
        if uses := mesh.communicators:
            self.applied += (f"communicators: {len(uses)} ({', '.join(uses)})",)

    def watch(self, on_action: OnAction) -> None:
        """Let ``on_action`` hear what begins within phases of a step: passes of stages, and waiting."""
        self._on_action = on_action
        self._passes.watch(on_action)

    # --- a step --------------------------------------------------------------------------------------

    def gradients_of(self, batch: StepBatch, on_phase: OnPhase = silent) -> tuple[Tensor, Tensor]:
        """Compute the gradients of a batch, ready for `optimizer_step`.

        fp16 computes the batch again, with a smaller loss scale, where its gradients overflow.

        Returns:
            The loss sum of `forward_backward` and the norm of `clip`. The host does not wait for them:
            whoever reads them does (`step_sync.exchange`). fp16 waits for the norm.
        """
        self._scaling.begin()
        while True:
            loss = self.forward_backward(batch, on_phase)
            self.reduce(on_phase)
            norm = self.clip(on_phase)
            if self._scaling.fits(norm):
                return loss, norm

    def forward_backward(self, batch: StepBatch, on_phase: OnPhase = silent) -> Tensor:
        """Accumulate the gradient of all micro-batches of this replica.

        Returns:
            This rank's sum of weighted token losses in nats, fp64 scalar on the device. It is 0 on ranks that
            do not own the loss (all but tp rank 0 of the last stage), so that a sum over all ranks is the
            batch's.
        """
        scale = self._scaling.scale / batch.loss_tokens
        self._mesh.begin_step()
        self._selection.begin(self.step + 1)
        self._gradients.clear(len(batch.tokens), self.step + 1, self._scaling.scale)
        self.expert_balance.begin(self._scaling.scale / batch.global_tokens)  # a router counts all tokens
        self.compute_weights.refresh()
        on_phase("forward")
        total = self._passes.run(batch, scale, on_phase)
        return total.double() if self._owns_loss else total.new_zeros((), dtype=torch.float64)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return a group of the mesh by name (`Mesh.group`)."""
        return self._mesh.group(name)

    def reduce(self, on_phase: OnPhase = silent) -> None:
        """Sum the gradients over all ranks, and the load of experts over replicas."""
        on_phase("reduce")
        self.compute_weights.collect()
        self._gradients.reduce()
        self._scaling.unscale_(self._gradients.values)
        self.expert_balance.reduce()

    def clip(self, on_phase: OnPhase = silent) -> Tensor:
        """Clip to ``optimizer.clip_norm``; return the global norm before clipping, fp64 on the device."""
        on_phase("clip")
        gradients = self._gradients.values
        norm = global_norm(gradients, self._counted, self.layout, self.device, self._waits)
        self.adaptation.observe(gradients)
        clip_(gradients, norm, self._clip_norm)
        return norm

    def _waits(self, waits: bool) -> None:
        """Tell of waiting for the other ranks' norms: in a pipeline they may have stages to compute yet."""
        self._on_action(("bubble" if self.layout.pp > 1 else "sync") if waits else "clip", -1)

    def optimizer_step(self, rate: float) -> None:
        """Update weights and moments in place with learning rate ``rate``."""
        update = self._inherited_updates + self.step - self.skipped + 1
        self._optimizer.step(self._gradients.values, rate, update)
        self._gradients.update_copies()
        self._gradients.commit()
        self.expert_balance.step()
        self.adaptation.step()
        self._scaling.step()
        self.step += 1

    def comm_costs(self) -> tuple[Cost, ...]:
        """Tell what communication of the step cost this rank, for each of `way_selection.THINGS`."""
        return self._selection.costs()

    def choose_ways(self, costs: Sequence[Cost]) -> Mapping[str, tuple[float, float]]:
        """Take in the largest costs of all ranks; choose how things travel, where a job asks for it.

        Returns:
            Seconds of the step that were predicted and measured, by thing.
        """
        self._selection.decide(costs)
        return self._selection.figures()

    def settle(self) -> None:
        """Make the state the same on all replicas before it is kept; all ranks call it.

        Only error feedback of compressed gradients differs between them.
        """
        self._gradients.agree_on_owed()

    def skip_step(self) -> None:
        """Count a step without its update: weights, moments, expert biases and loss scale stay."""
        self.adaptation.step(moved=False)
        self.step += 1
        self.skipped += 1

    def expert_load(self) -> ExpertLoad:
        """Return the use of this stage's experts in the step that was reduced last."""
        return self.expert_balance.load()

    @torch.no_grad()
    def evaluate(
        self, batches: Sequence[StepBatch], averaged: bool = False, adapted: bool = True
    ) -> tuple[float, int]:
        """Return this rank's sum of token losses and number of tokens; (0.0, 0) where it owns no loss.

        Args:
            averaged: by the moving average of the weights. Nothing may read `state` meanwhile.
            adapted: of tasks; False: before the inner steps.
        """
        losses = losses_of(self._passes, adapted)
        total, tokens_seen = torch.zeros((), dtype=torch.float64, device=self.device), 0
        self.compute_weights.refresh()
        with self._optimizer.average.in_place(self._weights_moved) if averaged else nullcontext():
            for batch in batches:
                for loss in losses(batch):
                    total += loss
                tokens_seen += batch.tokens_of(self.layout.cp, self._mesh.at.cp)
            self._weights_moved()
        return (float(total), tokens_seen) if self._owns_loss else (0.0, 0)

    def _weights_moved(self) -> None:
        """Forget copies of weights, gathered ones too."""
        self._gradients.update_copies()
        for model in self._models.values():
            free_gathered_weights(model)
        self.compute_weights.refresh()

    def adapt(self, batches: Sequence[StepBatch]) -> PrecisionPolicy | None:
        """Choose the parts that compute in low precision, by held-out batches; None: nobody asked."""
        return self.adaptation.decide(batches, self)

    def weights(self, averages: bool = False) -> list[StateTensor]:
        """List this rank's weights, with their moving averages if asked, without moments: live storage."""
        return self._state.weights(averages)

    def imported(self, names: Collection[str]) -> list[StateTensor]:
        """As `weights` with averages, without adapters that ``names`` (an import's) does not have."""
        held = self.weights(averages=True)
        return [one for one in held if one.shard.name in names or not is_adapter(one.shard.name)]

    def state(self) -> list[StateTensor]:
        """List weights and moments of this rank: live storage, the same for the engine's whole life."""
        return self._state.tensors()

    def replicated(self) -> list[tuple[str, StateTensor]]:
        """List what other ranks may hold alike, each with a key that says which do (`replica_check`)."""
        return self._state.replicated()

    def replicated_gradients(self) -> list[tuple[str, StateTensor]]:
        """As `replicated`, of the gradients as they are now."""
        return self._state.replicated_gradients(self._gradients.values)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """List the modules of this rank's stages by their canonical names, in the order of the model."""
        for stage in sorted(self._models):
            yield from self._models[stage].named_modules()

    def watch_sums(self, digest: Hash | None, written: Callable[[str], None] = silent) -> None:
        """Watch whether anybody writes into gradients while replicas sum them (`Gradients.watch`)."""
        self._gradients.watch(digest, written)

    def share_holders(self, wrote: Layout | None, wanted: Sequence[Shard]) -> frozenset[int]:
        """State groups of layout ``wrote`` that hold anything of what is ``wanted``; empty: not known."""
        return holders_of(self.job.model, self._table, wrote, wanted)

    def gradients(self) -> list[StateTensor]:
        """List the gradients as they are now: raw after `reduce`, clipped after `clip`."""
        return self._state.gradients(self._gradients.values)

    def initialise(
        self, seed: int, moved: Callable[[], None] = lambda: None, made: MadeWeights | None = None
    ) -> None:
        """Set the weights of step 0: a function of seed and name alone, the same at every layout.

        Args:
            moved: called after each piece.
            made: weights of earlier engines of this model and seed; None: nobody keeps any.
        """
        self._state.initialise(seed, moved, made)
        self.step = self.skipped = 0

    def set_step(self, step: int, skipped: int = 0) -> None:
        """Say how many steps the restored state has seen, and how many of them without an update.

        Their difference is the optimizer's only scalar.
        """
        self.step, self.skipped = step, skipped

    def close(self) -> None:
        """Drop every reference to the model and the process groups; the engine is unusable afterwards.

        Modules and hooks form cycles: the caller collects garbage once, before it closes the groups.
        """
        self._selection.close()
        self._passes.close()
        self._gradients.close()
        self._mesh.close()
        self._models.clear()
        self.compute_weights.close()
        del self._passes, self._gradients, self._mesh, self._state
        del self._optimizer, self.expert_balance, self.adaptation
        self._pools.close()


def build_engine(
    job: JobConfig,
    layout: Layout,
    rank: int,
    groups: ProcessGroups | None,
    device: torch.device,
    variability: GradientVariability | None = None,
    on_built: Callable[[], None] = lambda: None,
    pools: MemoryPools | None = None,
) -> Engine:
    """Build one rank's engine; all ranks of the generation together.

    Args:
        groups: connected process groups; None only for a layout of one process.
        variability: of gradients that this process saw in earlier generations, for adaptive precision.
        on_built: called after each part.
        pools: for gradient buckets and optimizer state; None: there are none.

    Raises:
        LayoutError: layout or precision cannot be applied.
        PeerLostError: a peer is gone.

    Example:
        >>> from picotron_ray.config.load import load_job
        >>> job = load_job("tiny", ["precision=fp32"])
        >>> engine = build_engine(job, Layout(micro_batch=2), 0, None, torch.device("cpu"))
        >>> engine.initialise(seed=0)
        >>> len(engine.weights())
        21
    """
    check_precision(job, device)
    if groups is None:
        if layout.world_size != 1:
            raise LayoutError(f"layout {layout} needs {layout.world_size} processes, saw one without groups")
        return Engine(job, make_mesh(layout, rank, device.type), device, variability, on_built, pools)
    if groups.world_size != layout.world_size:
        raise LayoutError(f"layout {layout} needs {layout.world_size} processes, saw {groups.world_size}")
    with groups.guard("build"), groups.forming():
        mesh = make_mesh(layout, rank, device.type, groups.timeout, device, groups.nodes)
    on_built()
    return Engine(job, mesh, device, variability, on_built, pools)
