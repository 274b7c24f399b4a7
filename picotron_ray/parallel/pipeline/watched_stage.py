"""Pipeline stage that says when it computes, and receives into buffers that its rank's stages share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from picotron_ray.layout.message_order import ReceiveBuffers
from picotron_ray.layout.schedule_actions import Action

OnAction = Callable[[str, int], None]
"""(phase of `config.schema.telemetry`, stage): that begins now."""
WAITING = "bubble"
"""Phase of a rank that computes nothing in a pipeline's step: it waits for messages, or sends some."""
NO_STAGE = -1


def unwatched(phase: str, stage: int) -> None:
    """Ignore the action."""


class ReceivePool:
    """Buffers into which the stages of one rank receive, allocated when the first of them asks.

    Torch allocates one for every micro-batch of a step, stage and direction.

    Args:
        buffers: which one each receive of a step goes to.
    """

    def __init__(self, buffers: ReceiveBuffers) -> None:
        self._buffers = buffers
        self._tensors: list[Tensor] = []

    def leaf(self, receive: Action, like: Tensor) -> Tensor | None:
        """The buffer of a receive as a leaf of its own, so that no gradient stays from the one before.

        None where nothing is received: the stage before, or after, is on this rank.
        """
        number = self._buffers.number.get(receive)
        if number is None:
            return None
        if not self._tensors:
            self._tensors = [torch.empty_like(like) for _ in range(self._buffers.total)]
        buffer = self._tensors[number]
        if (buffer.shape, buffer.dtype) != (like.shape, like.dtype):
            raise RuntimeError(
                f"pipeline: saw a message of {tuple(like.shape)}, {like.dtype}, expected that of all others,"
                f" {tuple(buffer.shape)}, {buffer.dtype}"
            )
        return buffer.detach().requires_grad_(like.requires_grad)


class WatchedStage(PipelineStage):
    """Stage of torch's pipelines; ``on_action`` hears of its passes, and of the waiting after them.

    Fields:
        received: buffers of the rank's receives.
    """

    on_action: OnAction = staticmethod(unwatched)
    received: ReceivePool

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._handed: dict[int, list[Any]] = {}  # what stages of one rank hand over, by micro-batch

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.on_action("forward", self.stage_index)
        output = super().forward_one_chunk(*args, **kwargs)
        self.on_action(WAITING, NO_STAGE)
        return output

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Nothing to send before the first step: all ranks have warmed their communicators (`parallel.mesh`).

        Before torch 2.13 a rank would send to itself where two neighbours are its own.
        """
        return []

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        """As torch does for one micro-batch, whose buffers stand for those of all."""
        result = super()._prepare_forward_infra(1, *args, **kwargs)
        self.args_recv_info = self._for_all("RECV_F", self.args_recv_info[0], num_microbatches)
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(1, *args, **kwargs)
        self.chunks = num_microbatches
        self.grad_recv_info = self._for_all("RECV_B", self.grad_recv_info[0], num_microbatches)
        return result

    def _for_all(self, kind: str, first: Sequence[Any], micro_batches: int) -> dict[int, tuple[Any, ...]]:
        """Torch's notes on the receives of one micro-batch, for each of them with its own buffer."""
        found = {}
        for number in range(micro_batches):
            infos = tuple(copy.copy(info) for info in first)
            for info in infos:
                if getattr(info, "buffer", None) is None:  # an input of the first stage
                    continue
                leaf = self.received.leaf(Action(self.stage_index, kind, number), info.buffer)
                info.buffer = info.buffer.new_empty(0) if leaf is None else leaf
                if leaf is None:
                    self._handed.setdefault(number, []).append(info)
            found[number] = infos
        return found

    def _forget(self, micro_batch: int) -> None:
        """Free what a stage of this rank handed over, once the micro-batch has no more use for it."""
        for info in self._handed.get(micro_batch, ()):
            info.buffer = info.buffer.new_empty(0)

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Compare outputs with the example: before torch 2.13 of the last stage too, which sends none."""
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: Any = False
    ) -> None:
        self.on_action("backward", self.stage_index)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._forget(bwd_chunk_id)
        self.on_action(WAITING, NO_STAGE)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: Any = False) -> None:
        self.on_action("backward", self.stage_index)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._forget(bwd_chunk_id)
        self.on_action(WAITING, NO_STAGE)

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> None:
        self.on_action("reduce", NO_STAGE)
        super().perform_reduce_grad(*args, **kwargs)
        self.on_action(WAITING, NO_STAGE)
