"""The gradients of one rank, from the start of a step until they are summed over all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.all_reduce import sum_
from picotron_ray.comm.reducers.choose import ReductionPlan
from picotron_ray.comm.reducers.watched import Hash
from picotron_ray.comm.wire_bytes import GRADIENTS, SENT, ring_share
from picotron_ray.layout.layout import Layout
from picotron_ray.models.definition import ModelDefinition
from picotron_ray.parallel.data.ddp import DEFAULT, ReplicatedGradients, replicated
from picotron_ray.parallel.local_shards import LocalParameter, local_gradient
from picotron_ray.parallel.mesh import Mesh
from picotron_ray.parallel.pipeline.tied_embeddings import TiedEmbeddings

NEVER = sys.maxsize
"""Micro-batches that the sums over replicas wait for where no hook runs: more than any step has."""


class Gradients:
    """Gradients that backward passes add to the parameters, and their sums.

    Args:
        parameters: all that this rank holds.
        plan: how they travel between replicas.

    Fields:
        trained: the parameters that have an update of their own.
        values: of `trained`, local and summed over all ranks, once `reduce` was called.
        owed: by name, the error feedback of parameters whose sums are compressed: live storage.
        applied: what is not plain about the sums, one phrase each.
    """

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        definition: ModelDefinition,
        mesh: Mesh,
        plan: ReductionPlan = DEFAULT,
    ) -> None:
        self._parameters, self._layout = parameters, mesh.layout
        self._sequence_parallel, self._tp = definition.sequence_parallel, mesh.group("tp")
        other_end = mesh.layout.other_end(mesh.at.pp)
        self._ends = TiedEmbeddings(parameters, definition.copies.values(), mesh.group("pp"), other_end)
        summed = [parameter for parameter in parameters if parameter.spec.trained]
        self.trained = [parameter for parameter in summed if not self._ends.follows(parameter)]
        chosen = {p.parameter for p in summed if plan.compressed and _is_compressible(p, definition)}
        copies: dict[Tensor, Tensor] = {p.parameter: p.narrow for p in summed if p.narrow is not None}
        pairs = ((p.parameter, _sum_group(p, mesh)) for p in summed)
        self._replicated = replicated(pairs, plan, chosen, copies)
        names: dict[Tensor, str] = {p.parameter: p.spec.name for p in summed}
        self.owed: Mapping[str, Tensor] = {
            names[parameter]: owed for copies in self._replicated for parameter, owed in copies.owed
        }
        self.applied = _applied(plan, self._replicated, self.owed)
        self.values: list[Tensor] = []
        by_fsdp = [p for p in summed if mesh.layout.zero and _sum_group(p, mesh) is None]
        self._sent_to_copies = sent_to_copies(by_fsdp, mesh.layout)

    def clear(self, micro_batches: int, step: int = 0, scale: float = 1.0) -> None:
        """Begin a step in which ``micro_batches`` add to the gradients.

        Args:
            step: its number, the same on all ranks.
            scale: factor of its gradients (fp16).
        """
        self.values = []
        for parameter in self._parameters:
            parameter.parameter.grad = None
            if parameter.narrow is not None:
                parameter.narrow.grad = None
        for copies in self._replicated:
            copies.begin(micro_batches, step, scale)

    def reduce(self) -> None:
        """Finish the sums: over dp and cp (under way since backward), of tied ends, over tp if partial."""
        for copies in self._replicated:
            copies.finish()
        SENT.add(GRADIENTS, self._sent_to_copies)
        found = [local_gradient(p, self._layout, self._sequence_parallel) for p in self.trained]
        self.values = [gradient for gradient, _ in found]
        self._ends.sum_(self.trained, self.values)
        partial = [gradient for gradient, is_partial in found if is_partial]
        if partial:
            assert self._tp is not None
            sum_(partial, self._tp)

    def use(self, plan: ReductionPlan) -> None:
        """Sum over replicas by another exact plan from the next `clear` on; all ranks alike."""
        for copies in self._replicated:
            copies.use(plan)

    def time(self, on: bool) -> None:
        """Measure what sums of replicas cost the step, or not."""
        for copies in self._replicated:
            copies.time(on)

    @property
    def cost(self) -> tuple[int, float]:
        """Bytes that a step sums over replicas, and seconds that it waited for these sums."""
        costs = [cost for copies in self._replicated for cost in copies.costs]
        return sum(nbytes for nbytes, _ in costs), sum(seconds for _, seconds in costs)

    def watch(self, digest: Hash | None, written: Callable[[str], None] = lambda place: None) -> None:
        """Watch what replicas sum, or (None) no longer.

        Args:
            written: hears where a gradient was written into while it was summed, in words.
        """
        names = {parameter.parameter: parameter.spec.name for parameter in self._parameters}
        first = 0
        for copies in self._replicated:

            def heard(number: int, parameters: list[Tensor], base: int = first) -> None:
                for parameter in parameters:
                    written(f"{names[parameter]} (bucket {base + number})")  # type: ignore[index]

            copies.watch(digest, heard)
            first += copies.counts[0]

    def commit(self) -> None:
        """Hear that the step's update is applied: what its sums left out is owed from now on."""
        for copies in self._replicated:
            copies.commit()

    def agree_on_owed(self) -> None:
        """Make error feedback the same on all replicas; all ranks call it."""
        for copies in self._replicated:
            copies.agree()

    def update_copies(self) -> None:
        """Give copies of tied weights the values that their originals have after an update."""
        self._ends.follow()

    def close(self) -> None:
        """Drop hooks, parameters and process groups."""
        for copies in self._replicated:
            copies.close()
        self._replicated.clear()
        self._parameters, self.trained, self.values, self._tp = [], [], [], None
        self.owed = {}
        del self._ends


class StaticGradients(Gradients):
    """Gradients in storage that stays, as a CUDA graph writes to fixed addresses.

    Their sums begin in `reduce`: no hook of the backward pass runs in a replay.
    """

    def clear(self, micro_batches: int, step: int = 0, scale: float = 1.0) -> None:
        """Begin a step with gradients of zero, in place."""
        self.values = []
        for parameter in (trained.parameter for trained in self.trained):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()
        for copies in self._replicated:
            copies.begin(NEVER, step, scale)


def _sum_group(parameter: LocalParameter, mesh: Mesh) -> dist.ProcessGroup | None:
    """Return the ranks over which a gradient is summed; None where FSDP does it, or there is one rank."""
    own = parameter.spec.expert and mesh.layout.ep > 1
    if mesh.layout.zero:
        return mesh.group("copy") if own and mesh.experts is None else None
    return mesh.group("edp" if own else "data")


def _is_compressible(parameter: LocalParameter, definition: ModelDefinition) -> bool:
    """Whether a gradient may be compressed: a matrix whose sum over replicas is all that it needs.

    Vectors are small. Gradients of what tensor parallelism replicates are partial under sequence parallelism,
    and those of tied embeddings at two ends of a pipeline: other ranks' errors would differ. The answer does
    not depend on the layout, so that every layout has the same error feedback.
    """
    spec = parameter.spec
    tied = {name for copy, original in definition.copies.items() for name in (copy, original.name)}
    partial = definition.sequence_parallel and spec.tp_dim is None
    return len(spec.shape) > 1 and not partial and spec.name not in tied and not spec.copy


def sent_to_copies(parameters: Sequence[LocalParameter], layout: Layout) -> int:
    """Bytes of gradients that FSDP sums over copies of the state in a step, sent from this rank."""
    parts = [parameter.local.numel() * parameter.local.element_size() for parameter in parameters]
    return 2 * ring_share(sum(parts), layout.replicate)


def _applied(
    plan: ReductionPlan, found: Sequence[ReplicatedGradients], owed: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """Say how gradients travel where a job asks for something."""
    if plan == DEFAULT or not found:
        return ()
    count, early = (sum(numbers) for numbers in zip(*(copies.counts for copies in found), strict=True))
    name = plan.gradients + ("" if plan.topology == "auto" else f" over a {plan.topology}")
    if plan.gradients == "hierarchical":
        name += f" in neighbourhoods of {plan.inner}" if plan.inner > 1 else ": one level, no neighbours"
    if plan.compressed:
        name += f" of {len(owed)} tensors" if early else ": one replica, none sent"
    return (f"gradients {name}: {count} buckets, {early} of them beside the backward pass",)
