"""A poisoned model whose steps take a while, in a process that spills its ledger after a few of them."""

from __future__ import annotations

import time
from typing import Any

from own_models import poisoned
from torch import Tensor, nn

from picotron_ray.checkpoint.snapshot import ledger_tail


def slow(step_s: float = 0.0, spill_lines: int = 256, **arguments: Any) -> nn.Module:
    """What ``model.builder: spilling_model:slow`` builds."""
    ledger_tail.SPILL_LINES = spill_lines
    model = poisoned(**arguments)

    def pause(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].device.type != "meta":
            time.sleep(step_s)

    model.register_forward_pre_hook(pause)
    return model
