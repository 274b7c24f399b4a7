"""Bytes of logits and what belongs to them, on the rank that has the head, by moment of a step."""

from __future__ import annotations

import math
from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.precision import COMPUTE_BYTES
from picotron_ray.config.validation.layout import splits_backward
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.message_order import waiting_losses
from picotron_ray.layout.schedules import schedule_of
from picotron_ray.planner.kept_activations import STATE_BYTES, narrows
from picotron_ray.planner.model_sizes import sizes_of


class HeadBytes(NamedTuple):
    """Bytes of logits and what belongs to them, by moment; zeros on a rank without a head."""

    forward: float = 0.0
    loss: float = 0.0
    head: float = 0.0


def logit_bytes(
    job: JobConfig, layout: Layout, tokens: float, weight: tuple[float, float], losses: float
) -> HeadBytes:
    """Bytes of logits when they are made, when the loss is, and when the head's gradient is.

    In a pipeline a micro-batch keeps its softmax and its output until its backward pass. Capped logits are a
    further copy, wide.

    Args:
        weight: elements of the head here, and bytes of each in its gradient.
        losses: micro-batches that wait so (`message_order.waiting_losses`).
    """
    sizes, item, wide = sizes_of(job.model), COMPUTE_BYTES[job.precision], STATE_BYTES[job.precision]
    cut = layout.tp if sizes.sequence_cut else 1
    narrow = item if item < wide else 0
    inputs = tokens * sizes.hidden * item
    capped = wide if job.model.builder is None and job.model.logit_softcap is not None else 0
    if job.kernels.loss == "linear":
        one = min(tokens, job.kernels.loss_chunk) * sizes.vocabulary / cut * (wide + narrow + capped)
        narrowed = one * narrow / (wide + narrow + capped)
        return HeadBytes(one, one, inputs + _linear_head_bytes(job, layout, weight[0], one, narrowed))
    one = tokens * sizes.vocabulary / cut
    waiting = one * capped * losses
    if layout.pp > 1:
        waiting += one * ((wide + item) * losses - wide)
    made = waiting + one * (item + narrow)
    loss = waiting + one * (2 * wide + narrow if cut > 1 else 3 * wide)
    return HeadBytes(made, loss, made + inputs + math.prod(weight))


def waiting_logits(job: JobConfig, layout: Layout) -> float:
    """Count the micro-batches whose logits wait for their backward pass at most."""
    if layout.pp == 1:
        return 1.0
    schedule = schedule_of(layout.schedule, job.layout.actions)
    return waiting_losses(schedule, layout.pipeline_shape(job.data.global_batch))


def casts_first(job: JobConfig, layout: Layout) -> bool:
    """Whether autograd casts gradients of copies in 16 bits before they are added up."""
    return splits_backward(job, layout) or job.precision == "fp8"


def _linear_head_bytes(
    job: JobConfig, layout: Layout, elements: float, logits: float, narrowed: float
) -> float:
    """Most bytes while the linear cross-entropy makes the head's gradient, in a wide sum over chunks.

    That is when a chunk's logits are made; or when their gradient, in 16 bits, is multiplied, by a kernel
    that adds to the sum or one whose product is added later (`parallel.precision.wide_sums`); or at the end,
    when autograd casts the sum to the type of the weight.

    Args:
        logits: bytes of a chunk's; narrowed: of their gradient in 16 bits, 0 where nothing is.
    """
    total, item = elements * STATE_BYTES[job.precision], COMPUTE_BYTES[job.precision]
    product = elements * item if narrowed and job.cluster.device != "cuda" else 0.0
    cast = elements * item if narrows(job) and not casts_first(job, layout) else 0.0
    return total + max(logits, narrowed + product, cast)
