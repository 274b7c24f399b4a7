"""AdamW with its moments in host memory (ZeRO-Offload, Ren et al. 2021).

Weights and gradients stay on the device. In each step gradients go down to the host in buckets, the host's
cores update the moments, and the updates of the weights come back. In fp32 that is 4 bytes per parameter each
way, and the device holds 8 bytes per parameter instead of 16. Three buckets are under way at a time: one goes
down while the host works on the one before it, and the update of the one before that goes up. On CUDA the
copies run on their own streams. On a CPU the same code copies within one memory. Only tests ask for that.

The arithmetic is AdamW's on the device, by the same kernel of torch, but for one rounding: the kernel runs on
weights of zero without decay, and so leaves the update itself. The device decays the weight and adds the
update to it.

Host memory is pinned, so that copies run beside kernels. Torch's allocator keeps pinned blocks when a
generation ends, and the next one finds its buckets there again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from picotron_ray.comm.all_reduce import BUCKET_BYTES, buckets
from picotron_ray.comm.copy_stream import CopyStream, host_zeros
from picotron_ray.config.schema.optimizer import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
SLOTS = 2
"""Staging buffers: one for the bucket on the wire, one for the bucket at the host's cores."""


class ParameterGroup(NamedTuple):
    """Parameters of one weight decay and one factor of the learning rate.

    Fields:
        names: canonical ones.
        weights: this rank's, in that order.
        indices: of their gradients.
        decay: factor of the group's learning rate by which weights shrink per step.
        factor: of the learning rate.
    """

    names: Sequence[str]
    weights: list[Tensor]
    indices: Sequence[int]
    decay: float
    factor: float = 1.0


class ParameterSlice(NamedTuple):
    """A parameter, or a slice of a large one: gradient's index, first element, and the weights, flat."""

    number: int
    start: int
    weights: Tensor


def bucketed(group: ParameterGroup, bucket_bytes: int) -> Iterator[ParameterGroup]:
    """Yield the parameters in order, as many at a time as fit a bucket; a larger one alone."""
    taken = 0
    for weights in buckets(group.weights, bucket_bytes):
        which = slice(taken, taken + len(weights))
        yield group._replace(names=group.names[which], weights=weights, indices=group.indices[which])
        taken += len(weights)


def slices(run: ParameterGroup, most: int) -> Iterator[tuple[slice, list[ParameterSlice]]]:
    """Yield the buckets of a run: their range of its elements, and the parameters in it.

    Args:
        most: elements of a bucket.
    """
    first, total = run.weights[0].view(-1), sum(weight.numel() for weight in run.weights)
    if len(run.weights) > 1:
        yield (
            slice(0, total),
            [ParameterSlice(n, 0, w.view(-1)) for n, w in zip(run.indices, run.weights, strict=True)],
        )
        return
    for start in range(0, total, most):
        where = slice(start, min(start + most, total))
        yield where, [ParameterSlice(run.indices[0], start, first[where])]


class OffloadBucket:
    """Parameters whose gradients and updates travel together.

    Args:
        parts: of one dtype.
        group: whose weight decay and learning rate they have.
        first, second: their moments, flat, in host memory.
    """

    def __init__(
        self, parts: Sequence[ParameterSlice], group: ParameterGroup, first: Tensor, second: Tensor
    ) -> None:
        self.parts, self.first, self.second = parts, first, second
        self.decay, self.factor = group.decay, group.factor
        self.weights = [part.weights for part in parts]
        self._sizes = [part.weights.numel() for part in parts]
        self.elements = sum(self._sizes)

    def gradients(self, of_all: Sequence[Tensor]) -> list[Tensor]:
        """Select the gradients of this bucket's parts, flat."""
        return [
            of_all[part.number].reshape(-1).narrow(0, part.start, size)
            for part, size in zip(self.parts, self._sizes, strict=True)
        ]

    def updates(self, flat: Tensor) -> list[Tensor]:
        """Split a flat buffer into the pieces of each part."""
        return list(flat[: self.elements].split(self._sizes))


class Staging:
    """Staging buffers of one bucket under way: gradients down, updates up, on both sides."""

    def __init__(self, like: Tensor, elements: int) -> None:
        self.down, self.up = like.new_empty(elements), like.new_empty(elements)
        self.gradient, self.update = (host_zeros(elements, like.dtype, like.device) for _ in range(2))
        self.arrived: torch.cuda.Event | None = None
        self.returned: torch.cuda.Event | None = None


class OffloadedAdamW:
    """AdamW with the moments of one rank's parameters in host memory.

    Args:
        groups: the parameters; each group has buckets of its own.
        threads: of the host that the update may use.
        bucket_bytes: gradients that travel together; a larger tensor travels in slices.

    Fields:
        moments: per moment name, a tensor in host memory by the name of each parameter, in its box.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        groups: Sequence[ParameterGroup],
        device: torch.device,
        threads: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._config, self._threads, self._device = config, threads, device
        self._down, self._up = CopyStream(device), CopyStream(device)
        self._buckets: list[OffloadBucket] = []
        self.moments: dict[str, dict[str, Tensor]] = {moment: {} for moment in MOMENTS}
        for group in groups:
            for run in bucketed(group, bucket_bytes):
                self._add(run, bucket_bytes)
        sizes = [bucket.elements for bucket in self._buckets]
        self._slots = [Staging(bucket.weights[0], max(sizes)) for bucket in self._buckets[:SLOTS]]

    def _add(self, group: ParameterGroup, bucket_bytes: int) -> None:
        """Add moments of parameters that fit one bucket, or of a single one that is cut into several."""
        sizes = [weight.numel() for weight in group.weights]
        dtype = group.weights[0].dtype
        flats = [host_zeros(sum(sizes), dtype, self._device) for _ in MOMENTS]
        for moment, flat in zip(MOMENTS, flats, strict=True):
            views = [p.view(w.shape) for p, w in zip(flat.split(sizes), group.weights, strict=True)]
            self.moments[moment] |= zip(group.names, views, strict=True)
        for where, parts in slices(group, bucket_bytes // dtype.itemsize):
            self._buckets.append(OffloadBucket(parts, group, *(flat[where] for flat in flats)))

    def step(self, gradients: Sequence[Tensor], rate: float, step: int) -> None:
        """Update once. On return, moments are written, and the update of weights is in the device's queue.

        Args:
            gradients: of all parameters, on the device.
            step: its number, from 1: the bias correction's exponent.
        """
        if not self._buckets:
            return
        self._send_down(0, gradients)
        for number, bucket in enumerate(self._buckets):
            if number + 1 < len(self._buckets):
                self._send_down(number + 1, gradients)
            slot = self._slots[number % SLOTS]
            _finish(slot.arrived)
            _finish(slot.returned)  # of the step's bucket two before, which used the same buffer
            own = rate * bucket.factor
            self._update(bucket, slot, own, step)
            slot.returned = self._up.copy(slot.up[: bucket.elements], slot.update[: bucket.elements])
            self._up.follow(slot.returned)
            torch._foreach_mul_(bucket.weights, 1.0 - own * bucket.decay)
            torch._foreach_add_(bucket.weights, bucket.updates(slot.up))

    def _send_down(self, number: int, gradients: Sequence[Tensor]) -> None:
        """Start to copy a bucket's gradients down. The host must be done with the staging buffers."""
        bucket, slot = self._buckets[number], self._slots[number % SLOTS]
        flat = slot.down[: bucket.elements]
        torch.cat(bucket.gradients(gradients), out=flat)
        slot.arrived = self._down.copy(slot.gradient[: bucket.elements], flat)

    def _update(self, bucket: OffloadBucket, slot: Staging, rate: float, step: int) -> None:
        """Write the bucket's moments, and the update of its weights into the staging buffers."""
        update = slot.update[: bucket.elements].zero_()
        with _threads(self._threads):
            adamw(
                [update],
                [slot.gradient[: bucket.elements]],
                [bucket.first],
                [bucket.second],
                [],
                [torch.full((), step - 1, dtype=torch.float32)],  # counted up by one before it is used
                fused=True,
                amsgrad=False,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                lr=rate,
                weight_decay=0.0,
                eps=self._config.eps,
                maximize=False,
            )


def _finish(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
