"""Pipeline parallelism: torch's GPipe (all forward, all backward) and 1F1B schedules over one stage per rank.

Shapes are static and told to the stage, so nothing is inferred by exchanging pickles at the first step.
Micro-batches that only hold fill rows run through all stages like any other: the schedules need equal
counts everywhere. Losses are divided by the global token count before backward, so the schedule must not
scale gradients. A row's number travels as the last column of its targets, because the schedules cut
micro-batches out of one tensor only and the row's weight has to come along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from picotron_ray.config.layout import Layout
from picotron_ray.errors import LayoutError

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits, targets [rows, seq], weights [rows]) -> scalar sum."""


class Pipeline:
    """One rank's stage and its schedule.

    Args:
        model: this rank's part of the model.
        layout: degrees; ``layout.pp > 1``.
        stage: index of this rank's stage.
        group: process group of the pp axis.
        hidden: an example (meta) of what crosses between stages: ``[micro_batch, seq / cp / tp, hidden]``.
        sequence: tokens per row on this rank.
        loss: weighted sum of token losses of one micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        stage: int,
        group: dist.ProcessGroup,
        hidden: Tensor,
        sequence: int,
        loss: LossFunction,
        device: torch.device,
    ) -> None:
        self.first, self.last = stage == 0, stage == layout.pp - 1
        self._model, self._layout, self._group, self._loss = model, layout, group, loss
        self._stage_index, self._device = stage, device
        self._hidden, self._sequence = hidden, sequence
        self._schedules: dict[int, ScheduleGPipe | Schedule1F1B] = {}
        self._weights = torch.zeros(0)
        self._scale = 1.0
        self._sums: list[Tensor] = []

    def _micro_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Called by the schedule on the last stage; remembers the loss before it is scaled."""
        total = self._loss(output, target[:, :-1], self._weights[target[:, -1]])
        self._sums.append(total.detach())
        return total * self._scale

    def _schedule(self, micro_batches: int) -> ScheduleGPipe | Schedule1F1B:
        if micro_batches not in self._schedules:
            tokens = torch.empty(
                (self._hidden.size(0), self._sequence), dtype=torch.int64, device=self._hidden.device
            )
            # What the last stage puts out goes nowhere; torch only asks that something is told.
            stage = PipelineStage(
                self._model,
                self._stage_index,
                self._layout.pp,
                self._device,
                input_args=tokens if self.first else self._hidden,
                output_args=self._hidden,
                group=self._group,
            )
            kind = ScheduleGPipe if self._layout.schedule == "afab" else Schedule1F1B
            try:
                schedule = kind(stage, micro_batches, loss_fn=self._micro_loss, scale_grads=False)
            except ValueError as error:
                raise LayoutError(
                    f"layout {self._layout}: saw {micro_batches} micro-batches, 1f1b needs at least pp="
                    f"{self._layout.pp}: use a smaller micro_batch or schedule afab"
                ) from error
            self._schedules[micro_batches] = schedule
        return self._schedules[micro_batches]

    def step(self, inputs: Tensor, targets: Tensor, weights: Tensor, scale: float) -> Tensor:
        """Forward and backward of all micro-batches; gradients accumulate in the parameters.

        Args:
            inputs, targets: ``[micro_batches, micro_batch, seq]`` on the device.
            weights: ``[micro_batches, micro_batch]``.
            scale: factor of the loss before backward.

        Returns: the unscaled loss sum (0 on all stages but the last).
        """
        count, rows = inputs.shape[:2]
        schedule = self._schedule(count)
        self._weights, self._scale, self._sums = weights.flatten(), scale, []
        fed = (inputs.flatten(0, 1).contiguous(),) if self.first else ()
        target = None
        if self.last:
            numbers = torch.arange(count * rows, device=targets.device).unsqueeze(1)
            target = torch.cat((targets.flatten(0, 1), numbers), dim=1)
        schedule.step(*fed, target=target, return_outputs=False)
        if not self._sums:
            return torch.zeros((), device=self._device)
        return torch.stack(self._sums).sum()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        """Forward only. Each item: inputs and targets ``[micro_batch, seq]``, weights ``[micro_batch]``."""
        total = torch.zeros((), device=self._device)
        for inputs, targets, weights in micro_batches:
            if self.first:
                x = inputs
            else:
                x = torch.empty_like(self._hidden, device=self._device)
                dist.recv(x, group=self._group, group_src=self._stage_index - 1)
            x = self._model(x)
            if self.last:
                total = total + self._loss(x, targets, weights)
            else:
                dist.send(x.contiguous(), group=self._group, group_dst=self._stage_index + 1)
        return total

    def close(self) -> None:
        """Forget the schedules, which hold the model and the group."""
        self._schedules.clear()
