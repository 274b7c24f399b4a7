"""Probe of the links below each axis of a layout: now and then one small and one larger sum, timed.

What training itself waits for says little of a link, as most of it is hidden, and much of the rest is waiting
for a rank that is late. So all ranks sum buffers of their own between two steps, every `EVERY` steps, which
each of them knows by the step's number. The fastest of `TIMES` is taken. It costs a generation of four CPU
ranks some milliseconds each time, GPUs less.

Latency is the time of a sum of one number. Bandwidth is the bus bandwidth of a sum of `NBYTES` (NVIDIA's
nccl-tests): bytes times 2 (n - 1) / n over its seconds, so that groups of any size compare with the link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

import torch
import torch.distributed as dist

from picotron_ray.config.schema.telemetry import AXES
from picotron_ray.train.step_clock import NO_LINK, NO_LINKS, Link

EVERY = 200
FIRST = 20
"""Step of a generation at which the first probe is."""
TIMES = 3
NBYTES = 1 << 20
GROUPS = {"dp": "data", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep"}
"""Group of a mesh by axis; that of data parallelism has the ranks of context parallelism too."""
Find = Callable[[str], dist.ProcessGroup | None]


class LinkProbe:
    """Probe of one rank in one generation.

    Args:
        group: finds a group of the mesh by name; None: the axis has degree 1.
    """

    def __init__(self, group: Find, device: torch.device, start_step: int) -> None:
        found = {axis: group(name) for axis, name in GROUPS.items()}
        self._groups: Mapping[str, dist.ProcessGroup] = {a: g for a, g in found.items() if g is not None}
        self._device, self._start = device, start_step
        self.links: tuple[Link, ...] = NO_LINKS
        """By `AXES`, of the newest probe."""

    def due(self, step: int) -> bool:
        """Whether all ranks are to probe after this step."""
        return bool(self._groups) and (step - self._start) % EVERY == FIRST

    def run(self) -> None:
        """Measure all axes; to be called by all ranks, with nothing else under way."""
        self.links = tuple(
            _measured(self._groups[axis], self._device) if axis in self._groups else NO_LINK for axis in AXES
        )

    def close(self) -> None:
        """Let go of the groups."""
        self._groups = {}


def _measured(group: dist.ProcessGroup, device: torch.device) -> Link:
    ranks = dist.get_world_size(group)
    small = torch.zeros(1, device=device)
    large = torch.zeros(NBYTES // 4, device=device)
    latency_s, large_s = _fastest(small, group), _fastest(large, group)
    return Link(latency_s, 2 * (ranks - 1) / ranks * NBYTES / max(large_s, 1e-9))


def _fastest(buffer: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Seconds of the fastest sum; the first one, which brings the ranks together, does not count."""
    found = []
    for _ in range(1 + TIMES):
        _settle(buffer.device)
        began = perf_counter()
        dist.all_reduce(buffer, group=group)
        _settle(buffer.device)
        found.append(perf_counter() - began)
    return min(found[1:])


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
