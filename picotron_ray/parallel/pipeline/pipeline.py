"""Pipeline parallelism: schedules over the stages of one rank.

Shapes are static and given to the stages, so that nothing is inferred by exchanging pickles at the first
step. Micro-batches that only hold fill rows run through all stages like any other, because schedules need
equal counts everywhere. Losses are divided by the global token count before backward, so the schedule must
not scale gradients. A row's number travels as the last column of its targets: schedules cut micro-batches out
of one tensor only, and the row's weight has to come along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron_ray.comm.wire_bytes import PIPELINE, SENT, size_bytes
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedule_actions import action_list
from picotron_ray.layout.schedule_rows import PipelineShape
from picotron_ray.layout.schedules import SCHEDULES, schedule_of
from picotron_ray.parallel import mesh
from picotron_ray.parallel.pipeline.schedule_runtime import SENDS, build_runtime
from picotron_ray.parallel.pipeline.watched_stage import (
    NO_STAGE,
    WAITING,
    OnAction,
    WatchedStage,
    unwatched,
)

Named = Mapping[str, Tensor]
"""Further inputs of ``forward``, by name. Every stage loads the rows and so has the same ones."""
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(output of the last stage, targets [rows, seq], weights [rows]) -> scalar sum."""


class Pipeline:
    """Pipeline of one rank: its stages and their schedule.

    Args:
        models: this rank's parts of the model, by stage.
        layout: degrees; ``layout.pp > 1``.
        group: process group of the pp axis.
        hidden: an example (meta) of the tensor that crosses between stages: ``[micro_batch, seq / cp / tp,
        hidden]``.
        sequence: tokens per row on this rank.
        loss: weighted sum of token losses of one micro-batch.
        actions: the rows of ``layout.actions``, for a schedule that takes them.

    Raises LayoutError where the actions are not of this layout, or the schedule does not allow it.
    """

    def __init__(
        self,
        models: Mapping[int, nn.Module],
        layout: Layout,
        group: dist.ProcessGroup,
        hidden: Tensor,
        sequence: int,
        loss: LossFunction,
        device: torch.device,
        actions: tuple[str, ...] = (),
    ) -> None:
        self._schedule = schedule_of(layout.schedule, actions)
        if SCHEDULES[layout.schedule].with_actions and action_list(actions).placement != layout.placement:
            raise LayoutError(
                f"layout.actions: saw stages {action_list(actions).placement} on the ranks, expected those of"
                f" the layout, {layout.placement}"
            )
        mesh.check_schedule(layout, self._schedule)
        self.first, self.last = 0 in models, layout.stages - 1 in models
        self._models, self._layout, self._group, self._loss = dict(models), layout, group, loss
        self._device = device
        self._hidden, self._sequence = hidden, sequence
        self._owners = {
            stage: rank for rank in range(layout.pp) for stage in layout.rank_stages(rank)
        }  # stage → rank in the group
        self._runtimes: dict[int, Any] = {}
        self._weights = torch.zeros(0)
        self._scale = 1.0
        self._sums: list[Tensor] = []
        self.on_action: OnAction = unwatched
        """Hears of each action of a step as it begins; set before the first one."""

    def _micro_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Loss of one micro-batch on the last stage, scaled; keeps the unscaled one."""
        self.on_action("forward", self._layout.stages - 1)
        total = self._loss(output, target[:, :-1], self._weights[target[:, -1]])
        self._sums.append(total.detach())
        scaled = total * self._scale
        self.on_action(WAITING, NO_STAGE)
        return scaled

    def _stage(self, index: int) -> WatchedStage:
        tokens = torch.empty(
            (self._hidden.size(0), self._sequence), dtype=torch.int64, device=self._hidden.device
        )
        # the last stage sends its output nowhere, but torch asks for an example
        stage = WatchedStage(
            self._models[index],
            index,
            self._layout.stages,
            self._device,
            input_args=self._hidden if index else tokens,
            output_args=self._hidden,
            group=self._group,
        )
        stage.on_action = self.on_action
        return stage

    def _runtime(self, micro_batches: int) -> Any:
        """Torch's object that runs a step of so many micro-batches."""
        if micro_batches not in self._runtimes:
            layout = self._layout
            shape = PipelineShape(layout.pp, layout.virtual_stages, micro_batches)
            problem = self._schedule.problem(shape)
            if problem:
                raise LayoutError(
                    f"layout {layout}: saw {micro_batches} micro-batches, {layout.schedule} {problem}: use"
                    " another micro_batch or schedule"
                )
            stages = [self._stage(index) for index in sorted(self._models)]
            self._runtimes[micro_batches] = build_runtime(
                self._schedule, shape, stages, loss_fn=self._micro_loss, scale_grads=False
            )
        return self._runtimes[micro_batches]

    def step(self, inputs: Tensor, targets: Tensor, weights: Tensor, named: Named, scale: float) -> Tensor:
        """Forward and backward of all micro-batches; gradients accumulate in the parameters.

        Args:
            inputs, targets: ``[micro_batches, micro_batch, seq]`` on the device.
            weights: ``[micro_batches, micro_batch]``.
            named: tensors ``[micro_batches, micro_batch, ...]``.
            scale: factor of the loss before backward.

        Returns: the unscaled loss sum (0 on all ranks but that of the last stage).
        """
        self.on_action(WAITING, NO_STAGE)
        count, rows = inputs.shape[:2]
        runtime = self._runtime(count)
        self._weights, self._scale, self._sums = weights.flatten(), scale, []
        fed = (inputs.flatten(0, 1).contiguous(),) if self.first else ()
        target = None
        if self.last:
            numbers = torch.arange(count * rows, device=targets.device).unsqueeze(1)
            target = torch.cat((targets.flatten(0, 1), numbers), dim=1)
        # the schedule cuts these as it cuts the rows, and keeps each with its micro-batch
        extra = {name: values.flatten(0, 1) for name, values in named.items()}
        SENT.add(PIPELINE, self._messages(runtime) * size_bytes(self._hidden))
        runtime.step(*fed, target=target, return_outputs=False, **extra)
        if not self._sums:
            return torch.zeros((), device=self._device)
        return torch.stack(self._sums).sum()

    def _messages(self, runtime: Any) -> int:
        """Hidden states, or gradients of them, that this rank sends to others in a step."""
        row = runtime.pipeline_order_with_comms[self._group.rank()]
        return sum(action.computation_type in SENDS for action in row)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[tuple[Tensor, Tensor, Tensor, Named]]) -> Tensor:
        """Forward only. Each item: inputs, targets ``[micro_batch, seq]``, weights ``[micro_batch]``, named.

        With one stage per rank micro-batches follow each other; with several they go round one by one.
        """
        total = torch.zeros((), device=self._device)
        for inputs, targets, weights, named in micro_batches:
            x = inputs
            for stage, model in sorted(self._models.items()):
                x = self._received(stage, x)
                x = model(x, **named)
                if stage == self._layout.stages - 1:
                    total = total + self._loss(x, targets, weights)
                elif stage + 1 not in self._models:
                    SENT.add(PIPELINE, size_bytes(x))
                    dist.send(x.contiguous(), group=self._group, group_dst=self._owners[stage + 1])
        return total

    def _received(self, stage: int, x: Tensor) -> Tensor:
        """Receive a stage's input; ``x`` itself where the stage before is on this rank, or there is none."""
        if stage == 0 or stage - 1 in self._models:
            return x
        x = torch.empty_like(self._hidden, device=self._device)
        dist.recv(x, group=self._group, group_src=self._owners[stage - 1])
        return x

    def close(self) -> None:
        """Forget the schedules, which hold the models and the group."""
        self._runtimes.clear()
        self._models.clear()
