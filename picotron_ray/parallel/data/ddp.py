"""Replicated data parallelism: gradients are summed over the replicas while the backward pass goes on.

Gradients live in a few flat buckets, and each parameter's ``grad`` is a view of one. So nothing is packed or
unpacked, and one collective per bucket serves many tensors. Buckets are filled in the order in which the
backward pass finishes parameters (the reverse of their definition). Every rank starts their reductions in
that order (Li et al. 2020, PyTorch Distributed, section 3.2), once per step, with the last micro-batch. What
travels, and how, is a reducer's (`comm.reducers`).

Gradients are summed and never averaged, because the loss is divided once by the global token count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron_ray.comm.all_reduce import buckets
from picotron_ray.comm.collectives.exposed import ExposedTime
from picotron_ray.comm.collectives.pending import PENDING
from picotron_ray.comm.reducers.choose import ReductionPlan, make_reducer
from picotron_ray.comm.reducers.feedback import Feedback
from picotron_ray.comm.reducers.reducer import Reducer, Reduction
from picotron_ray.comm.reducers.watched import Hash, SumWatch

DEFAULT = ReductionPlan()


class GradientBucket:
    """Bucket of gradients that are summed together.

    Args:
        parameters: of one dtype and device, in the order in which they lie in the bucket.
        group: the ranks that hold the same parameters; None: this one alone.
        reducer: sums over ``group``.
    """

    def __init__(
        self, parameters: Sequence[Tensor], group: dist.ProcessGroup | None, reducer: Reducer
    ) -> None:
        self.parameters, self._group, self._reducer = list(parameters), group, reducer
        first = parameters[0]
        sizes = [parameter.numel() for parameter in parameters]
        self._flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._views = dict(zip(parameters, self._cut(self._flat), strict=True))
        ranks = 1 if group is None else group.size()
        self._feedback = None if reducer.exact else Feedback(self._flat, ranks)
        self._shapes = [parameter.shape for parameter in parameters]
        self._step = 0
        self._work: Reduction | None = None
        self._exposed = ExposedTime(first.device)
        self.watch: SumWatch | None = None
        self.waiting: set[Tensor] = set()

    @property
    def cost(self) -> tuple[int, float]:
        """Bytes of the bucket, and seconds that its sum has cost the step: in its start and at its end."""
        return self._flat.numel() * self._flat.element_size(), self._exposed.seconds

    def time(self, on: bool) -> None:
        """Measure what sums cost the step, or not; as it begins, they are."""
        self._exposed.on = on

    def use(self, reducer: Reducer) -> None:
        """Sum by another exact reducer from the next step on."""
        assert reducer.exact, "error feedback belongs to one reducer"
        self._reducer = reducer

    def _cut(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor, one per parameter."""
        pieces = flat.split([parameter.numel() for parameter in self.parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]

    @property
    def owed(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters and views of their error feedback; none where the reducer is exact."""
        if self._feedback is not None:
            yield from zip(self.parameters, self._cut(self._feedback.owed), strict=True)

    def begin(self, step: int, scale: float) -> None:
        """Begin a step: `clear`, and remember its number and the scale of its gradients."""
        self.clear()
        self._step = step
        self._exposed.begin()
        if self._feedback is not None:
            self._feedback.begin(scale)

    def commit(self) -> None:
        """Take over the step's error feedback: its update is applied."""
        if self._feedback is not None:
            self._feedback.commit()

    def agree(self) -> None:
        """Make error feedback the same on all ranks of the group; all of them call it."""
        if self._feedback is not None:
            self._feedback.agree(self._group)

    def clear(self) -> None:
        """Begin a step: zero the gradients and make them views of the bucket."""
        self._flat.zero_()
        self._work, self.waiting = None, set(self.parameters)
        for parameter, view in self._views.items():
            parameter.grad = view

    def move_back(self, parameter: Tensor) -> None:
        """Move a gradient that lies elsewhere back into the bucket.

        torch's pipeline stages drop gradients before their first step: those of all parameters of a module
        that FSDP knows, also of parameters that it was told to ignore. The next gradients have storage of
        their own.
        """
        gradient, view = parameter.grad, self._views[parameter]
        if gradient is not None and gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = view

    def start(self) -> None:
        """Start the sum, unless it is under way."""
        if self._work is None:
            PENDING.issue()
            with self._exposed.waiting():
                given = self._flat, self._shapes, self._feedback, self._step
                watch, reducer = self.watch, self._reducer
                self._work = reducer.start(*given) if watch is None else watch.start(reducer, *given)

    def wait(self) -> None:
        """Wait for the sum."""
        assert self._work is not None, "started before it is waited for"
        with self._exposed.waiting():
            self._work.wait()
        PENDING.end()
        self._work = None


class ReplicatedGradients:
    """Gradients of parameters that every rank of a group holds.

    Args:
        parameters: trained ones, in the order of their definition; the same on every rank of ``group``.
        group: None: this rank alone, whose compressed plan may have to take in what others left owed.
        bucket_bytes: limit of one bucket; a larger single parameter has one of its own. None: the plan's.
        plan: how they travel.
        copies: of parameters in 16 bits, with which modules compute, and whose gradients are added to the
            parameters' (`precision.compute_weights`).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None,
        bucket_bytes: int | None = None,
        *,
        plan: ReductionPlan = DEFAULT,
        copies: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        ordered = list(reversed(list(parameters)))
        total = sum(parameter.numel() * parameter.element_size() for parameter in ordered)
        self._group, self._total = group, total
        reducer = make_reducer(plan, group, total)
        self._reducers = {plan: reducer}
        limit = plan.bucket_limit if bucket_bytes is None else bucket_bytes
        self._buckets = [GradientBucket(part, group, reducer) for part in buckets(ordered, limit)]
        self._bucket = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._early = self._early_under(plan, reducer)
        self._started = 0
        self._passes = 0
        self._seen: dict[Tensor, int] = {}
        self._hooks = [
            (copies or {})
            .get(parameter, parameter)
            .register_post_accumulate_grad_hook(partial(self._heard, parameter))
            for parameter in self._bucket
        ]

    def _early_under(self, plan: ReductionPlan, reducer: Reducer) -> int:
        """Number of buckets that may start during the backward pass."""
        return round((plan.overlapped_share if reducer.overlaps else 0.0) * len(self._buckets))

    def use(self, plan: ReductionPlan) -> None:
        """Sum by another exact plan from the next `begin` on; buckets stay. All ranks alike."""
        if plan not in self._reducers:
            self._reducers[plan] = make_reducer(plan, self._group, self._total)
        reducer = self._reducers[plan]
        self._early = self._early_under(plan, reducer)
        for bucket in self._buckets:
            bucket.use(reducer)

    def time(self, on: bool) -> None:
        """Measure what sums cost the step, or not; as it begins, they are."""
        for bucket in self._buckets:
            bucket.time(on)

    def watch(self, digest: Hash | None, written: Callable[[int, list[Tensor]], None]) -> None:
        """Have every sum watched from the next one on; ``digest`` None: none any more.

        Args:
            written: hears the number of a bucket, and parameters whose gradients were written while it was
                summed.
        """

        def heard(number: int, bucket: GradientBucket, places: Sequence[int]) -> None:
            written(number, [bucket.parameters[place] for place in places])

        for number, bucket in enumerate(self._buckets):
            bucket.watch = None if digest is None else SumWatch(digest, partial(heard, number, bucket))

    @property
    def costs(self) -> list[tuple[int, float]]:
        """Bytes of each bucket, and seconds that its sum cost the step."""
        return [bucket.cost for bucket in self._buckets]

    @property
    def counts(self) -> tuple[int, int]:
        """Number of buckets, and of those that may start during the backward pass."""
        return len(self._buckets), self._early

    @property
    def owed(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters and their error feedback, live storage; none where sums are exact."""
        for bucket in self._buckets:
            yield from bucket.owed

    def begin(self, passes: int, step: int = 0, scale: float = 1.0) -> None:
        """Begin a step in which ``passes`` micro-batches add to every gradient.

        A parameter may get fewer: a schedule that splits the backward pass adds some gradients by itself, and
        a model may leave parameters out. Its bucket and those after it then wait until `finish`.

        Args:
            step: its number, the same on all ranks.
            scale: factor of its gradients (fp16).
        """
        self._passes, self._started = passes, 0
        self._seen = dict.fromkeys(self._bucket, 0)
        for bucket in self._buckets:
            bucket.begin(step, scale)

    def commit(self) -> None:
        """Hear that the step's update is applied."""
        for bucket in self._buckets:
            bucket.commit()

    def agree(self) -> None:
        """Make error feedback the same on all ranks; all of them call it."""
        for bucket in self._buckets:
            bucket.agree()

    def _heard(self, parameter: Tensor, computed: Tensor) -> None:
        """Hear of a gradient: the one that computed, if another, has added it to the parameter's."""
        self._accumulated(parameter)

    def _accumulated(self, parameter: Tensor) -> None:
        self._bucket[parameter].move_back(parameter)
        self._seen[parameter] += 1
        if self._seen[parameter] < self._passes:
            return
        self._bucket[parameter].waiting.discard(parameter)
        while self._started < self._early and not self._buckets[self._started].waiting:
            self._buckets[self._started].start()
            self._started += 1

    def finish(self) -> None:
        """Complete the sums: every gradient is that over the ranks of the group when this returns."""
        for bucket in self._buckets[self._started :]:
            for parameter in bucket.parameters:
                bucket.move_back(parameter)
            bucket.start()
        for bucket in self._buckets:
            bucket.wait()

    def close(self) -> None:
        """Remove the hooks and drop the buckets."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._bucket.clear()
        self._buckets.clear()
        self._reducers.clear()
        self._group = None


def replicated(
    parameters: Iterable[tuple[nn.Parameter, dist.ProcessGroup | None]],
    plan: ReductionPlan = DEFAULT,
    compressible: Collection[nn.Parameter] = (),
    copies: Mapping[Tensor, Tensor] | None = None,
) -> list[ReplicatedGradients]:
    """One `ReplicatedGradients` per group, in the order of their first parameters.

    A parameter without a group has none, unless it may be compressed.

    Args:
        plan: how gradients travel.
        compressible: parameters whose gradients a compressed reducer may take. The others of its group are
            summed exactly, apart from them.
        copies: see `ReplicatedGradients`.
    """
    by_group: dict[tuple[dist.ProcessGroup | None, bool], list[nn.Parameter]] = {}
    for parameter, group in parameters:
        exact = plan.compressed and parameter not in compressible
        if group is not None or parameter in compressible:
            by_group.setdefault((group, exact), []).append(parameter)
    return [
        ReplicatedGradients(mine, group, plan=plan.exact() if exact else plan, copies=copies)
        for (group, exact), mine in by_group.items()
    ]
