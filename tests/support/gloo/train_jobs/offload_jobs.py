"""What processes do for the tests of offloaded activations: small tensors leave too, or come back damaged."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.support.gloo.faults import replace


def everything() -> Any:
    """However small a tensor is, it leaves."""
    import picotron_ray.parallel.parallelize as parallelize

    kept = parallelize.apply_activation_offload
    return replace(parallelize, "apply_activation_offload", partial(kept, smallest_bytes=0))


def damaged() -> Any:
    """What comes back is half of what left."""
    from picotron_ray.parallel.memory.activation_offload import ActivationOffload

    undo, kept = everything(), ActivationOffload._fetch

    def fetch(self: Any, block_pass: Any) -> None:
        for reference in [] if block_pass.fetched else block_pass.offloaded:
            moved = reference()
            if moved is not None and moved.host.is_floating_point():
                moved.host.mul_(0.5)
        kept(self, block_pass)

    undo_bring = replace(ActivationOffload, "_fetch", fetch)
    return lambda: (undo_bring(), undo())


PLANTS = {"everything": everything, "damaged": damaged}
