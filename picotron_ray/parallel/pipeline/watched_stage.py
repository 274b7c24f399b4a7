"""Pipeline stage that says when it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage

OnAction = Callable[[str, int], None]
"""(phase of `config.schema.telemetry`, stage): that begins now."""
WAITING = "bubble"
"""Phase of a rank that computes nothing in a pipeline's step: it waits for messages, or sends some."""
NO_STAGE = -1


def unwatched(phase: str, stage: int) -> None:
    """Ignore the action."""


class WatchedStage(PipelineStage):
    """Stage of torch's pipelines; ``on_action`` hears of its passes, and of the waiting after them."""

    on_action: OnAction = staticmethod(unwatched)

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

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Compare outputs with the example: before torch 2.13 of the last stage too, which sends none."""
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self.on_action("backward", self.stage_index)
        super().backward_one_chunk(*args, **kwargs)
        self.on_action(WAITING, NO_STAGE)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self.on_action("backward", self.stage_index)
        super().backward_weight_one_chunk(*args, **kwargs)
        self.on_action(WAITING, NO_STAGE)

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> None:
        self.on_action("reduce", NO_STAGE)
        super().perform_reduce_grad(*args, **kwargs)
        self.on_action(WAITING, NO_STAGE)
