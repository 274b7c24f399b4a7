"""Memory of a cell, and sizes that fit. Torch is loaded for CUDA alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from picotron_ray.bench.comm.figures import COMPRESSED
from picotron_ray.comm.reducers import mesh_bounds

COPIES = {"auto": 2, "ring": 3, "tree": 3, "reduce-scatter": 4, "hierarchical": 3, "topk": 14, "int8": 8}
"""Buffers of the message's size that a rank needs at its peak, the message and its original included."""
OF_COLLECTIVES = {"all-gather": 2, "reduce-scatter": 4, "all-to-all": 4, "broadcast": 2}
"""The same of collectives whose algorithms need no more than each other; a mesh of a reduce-scatter too."""
SHARED_COPIES = 2
"""Of them, those that strategies measured in turns share."""
MOST_COPIES = 8
USABLE = 0.7
"""Share of the free memory that a cell may take."""


def room_bytes(strategies: Sequence[str], size: int, group: int, collective: str = "all-reduce") -> int:
    """Memory that all ranks of cells which run in turns take together: each strategy keeps its own buffers.

    >>> room_bytes(["auto"], 1024, 2), room_bytes(["auto", "ring", "tree"], 1024, 2)
    (4096, 8192)
    """
    if collective == "all-reduce":
        own = sum(_own_bytes(strategy, size, group) for strategy in strategies)
    else:
        own = len(strategies) * (OF_COLLECTIVES[collective] - SHARED_COPIES) * size
    return (SHARED_COPIES * size + own) * group


def _own_bytes(strategy: str, size: int, group: int) -> int:
    if strategy == "mesh":
        return mesh_bounds.room_bytes(size, group)
    return (COPIES.get(strategy, MOST_COPIES) - SHARED_COPIES) * size


def usable_bytes(device: str) -> int:
    """Memory that all ranks together may take: of the host, or of all devices, taken as this process's."""
    if device == "cuda":
        import torch

        return int(USABLE * torch.cuda.mem_get_info()[0] * torch.cuda.device_count())
    line = next(row for row in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in row)
    return int(USABLE * int(line.split()[1]) * 1024)


def fitting(
    size: int, group: int, strategies: Sequence[str], usable: int, collective: str = "all-reduce"
) -> dict[str, int]:
    """Size by strategy: halved until it fits. Exact ones share theirs, as the selector chooses among them.

    >>> fitting(1024, 2, ["auto", "tree", "topk"], 8000)
    {'auto': 1024, 'tree': 1024, 'topk': 256}
    """

    def halved(names: Sequence[str]) -> int:
        found = size
        while found > 4 and room_bytes(names, found, group, collective) > usable:
            found //= 2
        return found

    exact = [name for name in strategies if name not in COMPRESSED]
    shared = halved(exact) if exact else size
    return {name: halved([name]) if name in COMPRESSED else shared for name in strategies}
