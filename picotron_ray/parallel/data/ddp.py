"""Replicated data parallelism: gradients are summed over the replicas while the backward pass goes on.

Gradients live in a few flat buckets, and each parameter's ``grad`` is a view of one. So nothing is packed or
unpacked, and one collective per bucket serves many tensors. Buckets are filled in the order in which the
backward pass finishes parameters (the reverse of their definition). Every rank starts their reductions in
that order (Li et al. 2020, PyTorch Distributed, section 3.2), once per step, with the last micro-batch.

Gradients are summed and never averaged, because the loss is divided once by the global token count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron_ray.comm.all_reduce import buckets

BUCKET_BYTES = 25 * 2**20


class GradientBucket:
    """Bucket of gradients that one collective sums.

    Args:
        parameters: of one dtype and device, in the order in which they lie in the bucket.
        group: the ranks that hold the same parameters.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self.parameters, self._group = list(parameters), group
        first = parameters[0]
        sizes = [parameter.numel() for parameter in parameters]
        self._flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        pieces = zip(parameters, self._flat.split(sizes), strict=True)
        self._views = {parameter: piece.view(parameter.shape) for parameter, piece in pieces}
        self._work: dist.Work | None = None
        self.waiting: set[Tensor] = set()

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
            self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def wait(self) -> None:
        """Wait for the sum."""
        assert self._work is not None, "started before it is waited for"
        self._work.wait()
        self._work = None


class ReplicatedGradients:
    """Gradients of parameters that every rank of a group holds.

    Args:
        parameters: trained ones, in the order of their definition; the same on every rank of ``group``.
        bucket_bytes: limit of one collective; a larger single parameter has a collective of its own.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        ordered = list(reversed(list(parameters)))
        self._buckets = [GradientBucket(part, group) for part in buckets(ordered, bucket_bytes)]
        self._bucket = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._started = 0
        self._passes = 0
        self._seen: dict[Tensor, int] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulated) for parameter in self._bucket
        ]

    def begin(self, passes: int) -> None:
        """Begin a step in which ``passes`` micro-batches add to every gradient.

        A parameter may get fewer: a schedule that splits the backward pass adds some gradients by itself, and
        a model may leave parameters out. Its bucket and those after it then wait until `finish`.
        """
        self._passes, self._started = passes, 0
        self._seen = dict.fromkeys(self._bucket, 0)
        for bucket in self._buckets:
            bucket.clear()

    def _accumulated(self, parameter: Tensor) -> None:
        self._bucket[parameter].move_back(parameter)
        self._seen[parameter] += 1
        if self._seen[parameter] < self._passes:
            return
        self._bucket[parameter].waiting.discard(parameter)
        while self._started < len(self._buckets) and not self._buckets[self._started].waiting:
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


def replicated(
    parameters: Iterable[tuple[nn.Parameter, dist.ProcessGroup | None]],
) -> list[ReplicatedGradients]:
    """One `ReplicatedGradients` per group, in the order of their first parameters. No group, no object."""
    by_group: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
    for parameter, group in parameters:
        if group is not None:
            by_group.setdefault(group, []).append(parameter)
    return [ReplicatedGradients(mine, group) for group, mine in by_group.items()]
