"""Scripted slowness: this process computes every row late, by sleeping (``chaos``, fault ``slow``).

The sleep is in the stages' own forward and backward passes, so that phases, schedules and telemetry see what
they would see of a slow device. A stage sleeps by its share of the model's blocks. So fewer rows help the
device, and so do fewer blocks. Rows that only fill take time as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.model_sizes import sizes_of, stage_depth

FORWARD = 1 / 3
"""Of a row's time; the backward pass takes the rest."""


class Slowness:
    """Slowness of this process, in whatever generation it computes.

    Fields:
        row_s: seconds of sleep per row through the whole model; 0: none.
    """

    row_s = 0.0

    @classmethod
    def sleep(cls, rows: float, device: torch.device) -> None:
        """Sleep for so many rows, after what the device has been given to do."""
        if cls.row_s and rows:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            time.sleep(cls.row_s * rows)


def add_slowness(job: JobConfig, layout: Layout, models: Mapping[int, nn.Module]) -> None:
    """Let stages sleep once a fault strikes this process; where the job has no such fault, nothing is done.

    Args:
        models: this rank's stages, by number.
    """
    if all(fault.fault != "slow" for fault in job.chaos):
        return
    for stage, model in models.items():
        share = stage_depth(job.model, layout.cut, stage) / sizes_of(job.model).layers
        model.register_forward_hook(_Late(share))


class _Late:
    """Forward hook of a stage with a share of the model's blocks."""

    def __init__(self, share: float) -> None:
        self._share = share

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        rows, device = len(args[0]) * self._share, output.device
        Slowness.sleep(rows * FORWARD, device)
        if output.requires_grad:  # no function of its own: a schedule detaches the output in place
            output.register_hook(lambda gradient: Slowness.sleep(rows * (1 - FORWARD), device))
