"""Scripted disturbances: this process computes wrong numbers, keeps memory or gets data late (``chaos``).

They strike where their cause would: in the stages' own passes and in the loader. So losses, gradients, phases
and telemetry see what they would see of a bad kernel, a leak or a slow file system. A job without such faults
has no hook.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import StepBatch, make_batch
from picotron_ray.parallel.local_shards import local_tensor

IN_PASSES = ("nan", "scale", "scale-gradients", "leak", "flip")
MakeBatch = Callable[..., StepBatch]


class Disturbance:
    """Wrongs that this process does, in whatever generation it computes.

    Fields:
        nan: whether the next forward pass has an output that is not a number.
        flip: whether a bit of a weight turns over in the next forward pass.
        factor, gradient_factor: to the output of its stages, and to the gradient of that.
        pass_bytes: kept at each forward pass.
        row_s: seconds by which each row of data comes late.
    """

    nan = False
    flip = False
    factor = 1.0
    gradient_factor = 1.0
    pass_bytes = 0
    row_s = 0.0
    kept: list[Tensor]

    @classmethod
    def keep(cls, device: torch.device) -> None:
        """Leak."""
        if cls.pass_bytes:
            cls.kept.append(torch.ones(cls.pass_bytes, dtype=torch.uint8, device=device))


Disturbance.kept = []


def _itself(parameter: nn.Parameter) -> Tensor:
    return parameter


def add_disturbances(
    job: JobConfig,
    models: Mapping[int, nn.Module],
    kept: Callable[[nn.Parameter], Tensor] = _itself,
) -> None:
    """Let stages disturb once a fault strikes this process; where the job has no such fault, nothing is done.

    Args:
        models: this rank's stages, by number.
        kept: what of a module's parameter is updated and kept.
    """
    if any(fault.fault in IN_PASSES for fault in job.chaos):
        for model in models.values():
            model.register_forward_hook(partial(_disturb, kept))


def _disturb(
    kept: Callable[[nn.Parameter], Tensor], module: nn.Module, args: tuple[Any, ...], output: Tensor
) -> Tensor:
    Disturbance.keep(output.device)
    factor = Disturbance.factor
    if Disturbance.nan and torch.is_grad_enabled():  # an evaluation is none of its business
        Disturbance.nan, factor = False, float("nan")
    if Disturbance.flip and torch.is_grad_enabled():
        Disturbance.flip = False
        flip_bit(kept(next(module.parameters())))
    if factor != 1.0:
        output = output * factor
    if Disturbance.gradient_factor != 1.0 and output.requires_grad:
        output.register_hook(lambda gradient: gradient * Disturbance.gradient_factor)
    return output


def flip_bit(parameter: Tensor, element: int = 0) -> None:
    """Turn over the first bit of an element's fraction, behind the back of autograd.

    What is not zero changes by up to a third, and stays finite: nothing but its neighbours tells that it is
    wrong.
    """
    values = local_tensor(parameter.data).view(-1)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    fraction = round(-math.log2(torch.finfo(values.dtype).eps))
    values.view(bits)[element] ^= 1 << (fraction - 1)


def batches_of(job: JobConfig) -> MakeBatch:
    """Return the maker of batches: one that may come late, where a fault of the job asks for that."""
    if all(fault.fault != "slow-data" for fault in job.chaos):
        return make_batch
    return _late_batch


def _late_batch(*given: Any) -> StepBatch:
    batch = make_batch(*given)
    first, end = batch.rows
    time.sleep(Disturbance.row_s * (end - first))
    return batch
