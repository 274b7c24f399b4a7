"""The one collective of our own in every step: an all-gather of a few numbers from every rank.

Whatever all ranks must agree on without a coordinator rides in it: the loss, the digests of the tokens
fed, the requests that reached any one rank (stop, snapshot), the newest step that every rank has sealed
(a slot may be overwritten once a newer step is sealed everywhere), and what a snapshot costs (so that
all ranks choose the same interval). All ranks compute the same result from the same numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from picotron_ray.config.layout import Layout

STOP = 1
"""Flag: leave the loop after this step."""
SNAPSHOT = 2
"""Flag: take a pinned snapshot of this step."""

_RECORD = struct.Struct("<ddqqq16sddq")


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one rank brings: loss sum (nats) over its tokens, rows fed, and its local facts."""

    loss_sum: float
    grad_norm: float
    rows: tuple[int, int]
    flags: int
    digest: bytes
    snapshot_cost_s: float
    step_time_s: float
    sealed: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know after the exchange, identical on all of them."""

    loss_sum: float
    grad_norm: float
    rows: tuple[tuple[int, int, str], ...]  # per DP replica: first, last (half open), digest
    flags: int
    sealed: int  # newest step that every rank has sealed; -1: none
    snapshot_interval: int  # steps, from the measured cost


def exchange(mine: Contribution, layout: Layout, device: torch.device, group: Any = None) -> Agreement:
    """All-gather ``mine`` over all ranks of the generation.

    Raises RuntimeError: a peer is gone, or the groups were aborted; or two ranks of one DP replica fed
    different tokens, which is a bug that must never train on.
    """
    packed = _RECORD.pack(
        mine.loss_sum,
        mine.grad_norm,
        *mine.rows,
        mine.flags,
        mine.digest,
        mine.snapshot_cost_s,
        mine.step_time_s,
        mine.sealed,
    )
    local = torch.frombuffer(bytearray(packed), dtype=torch.int64).to(device)
    if layout.world_size == 1:
        gathered = [local]
    else:
        gathered = [torch.empty_like(local) for _ in range(layout.world_size)]
        dist.all_gather(gathered, local, group=group)
    raw = torch.cat(gathered).cpu().numpy().tobytes()
    records = [
        Contribution(r[0], r[1], (r[2], r[3]), r[4], r[5], r[6], r[7], r[8]) for r in _RECORD.iter_unpack(raw)
    ]
    return agree(records, layout)


def agree(records: Sequence[Contribution], layout: Layout) -> Agreement:
    """The result of one exchange; a pure function of what all ranks contributed."""
    rows: dict[int, tuple[int, int, str]] = {}
    flags = 0
    for rank, record in enumerate(records):
        fed = (*record.rows, record.digest.hex())
        if rows.setdefault(layout.coordinates(rank).dp, fed) != fed:
            raise RuntimeError(
                f"rank {rank} fed tokens {fed}, its replica fed {rows[layout.coordinates(rank).dp]}"
            )
        flags |= record.flags
    cost = max(record.snapshot_cost_s for record in records)
    step = max(record.step_time_s for record in records)
    return Agreement(
        loss_sum=sum(record.loss_sum for record in records),
        grad_norm=records[0].grad_norm,
        rows=tuple(rows[i] for i in range(layout.dp)),
        flags=flags,
        sealed=min(record.sealed for record in records),
        snapshot_interval=max(1, math.ceil(cost / (0.5 * step))) if step > 0 else 1,
    )
