"""Agreement of all ranks at the end of every step: an all-gather of a few numbers from each.

It carries all that ranks must agree on without a coordinator:

- the loss,
- whether all losses and gradient norms are finite: one rank whose are not speaks for all,
- the digests of the tokens fed,
- requests that reached any one rank (stop, snapshot),
- the newest step that every rank has sealed, as older slots may then be overwritten,
- the cost of a snapshot, so that all ranks choose the same interval,
- the time of sums, by which all ranks choose the same reducer.

All ranks compute the same result from the same numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from picotron_ray.comm.wire_bytes import SENT, STEP, size_bytes
from picotron_ray.layout.layout import Coordinates, Layout

STOP = 1
"""Flag: leave the loop after this step."""
SNAPSHOT = 2
"""Flag: take a pinned snapshot of this step."""

_RECORD = struct.Struct("<ddqqq16sddqdqdd")


@dataclass(frozen=True, slots=True)
class Contribution:
    """Numbers of one rank: loss sum (nats) over its tokens, rows fed, and local measurements.

    Fields:
        imbalance: load of the most used expert of its layers / the mean; 0 without experts.
        dropped: assignments of tokens over the capacity of experts in its layers.
        at_s: its clock, seconds since the epoch.
        reduce_s: seconds that sums of gradients cost it (`reducer_selection`); 0: not measured.
    """

    loss_sum: float
    grad_norm: float
    rows: tuple[int, int] = (0, 0)
    flags: int = 0
    digest: bytes = bytes(16)
    snapshot_cost_s: float = 0.0
    step_time_s: float = 0.0
    sealed: int = -1
    imbalance: float = 0.0
    dropped: int = 0
    at_s: float = 0.0
    reduce_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """Result of an exchange, identical on all ranks."""

    loss_sum: float
    grad_norm: float
    rows: tuple[tuple[int, int, str], ...]  # per DP replica: first, last (half open), digest
    flags: int
    sealed: int  # newest step that every rank has sealed; -1: none
    snapshot_interval: int  # steps, from the measured cost
    imbalance: float = 0.0  # load of the most used expert of any layer / the mean; 0: no experts
    dropped: int = 0  # assignments over capacity, in all layers
    finite: bool = True  # losses and gradient norms of all ranks
    at_s: float = 0.0  # by the clock of rank 0: all ranks write the same ledger line
    reduce_s: tuple[float, ...] = ()  # of all ranks


def exchange(mine: Contribution, layout: Layout, device: torch.device, group: Any = None) -> Agreement:
    """All-gather ``mine`` over all ranks of the generation.

    Raises:
        RuntimeError: a peer is gone, or the groups were aborted. Or two ranks of one DP replica fed different
            tokens: a bug, with which training must not go on.
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
        mine.imbalance,
        mine.dropped,
        mine.at_s,
        mine.reduce_s,
    )
    local = torch.frombuffer(bytearray(packed), dtype=torch.int64).to(device)
    if layout.world_size == 1:
        gathered = [local]
    else:
        gathered = [torch.empty_like(local) for _ in range(layout.world_size)]
        SENT.add(STEP, size_bytes(local) * (layout.world_size - 1))
        dist.all_gather(gathered, local, group=group)
    raw = torch.cat(gathered).cpu().numpy().tobytes()
    records = [Contribution(r[0], r[1], (r[2], r[3]), *r[4:]) for r in _RECORD.iter_unpack(raw)]
    return agree(records, layout)


def agree(records: Sequence[Contribution], layout: Layout) -> Agreement:
    """Compute the result of one exchange, a pure function of all contributions."""
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
    norms = [record.grad_norm for record in records]
    return Agreement(
        loss_sum=sum(record.loss_sum for record in records),
        grad_norm=next((norm for norm in norms if not math.isfinite(norm)), norms[0]),
        rows=tuple(rows[i] for i in range(layout.dp)),
        flags=flags,
        sealed=min(record.sealed for record in records),
        at_s=records[0].at_s,
        reduce_s=tuple(record.reduce_s for record in records),
        imbalance=max(record.imbalance for record in records),
        # every rank of a stage knows its layers' total: take one of each stage
        dropped=sum(records[layout.rank(Coordinates(pp, 0, 0, 0))].dropped for pp in range(layout.pp)),
        finite=all(math.isfinite(record.loss_sum) and math.isfinite(record.grad_norm) for record in records),
        snapshot_interval=max(1, math.ceil(cost / (0.5 * step))) if step > 0 else 1,
    )
