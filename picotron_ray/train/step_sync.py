"""Agreement of all ranks at the end of every step: an all-gather of a few numbers from each.

It carries all that ranks must agree on without a coordinator:

- the loss,
- whether all losses and gradient norms are finite: one rank whose are not speaks for all,
- the digests of the tokens fed,
- requests that reached any one rank (stop, snapshot),
- the newest step that every rank has sealed, as older slots may then be overwritten,
- how far apart snapshots must be at least, so that all ranks choose the same interval,
- bytes and time of communication, by which all ranks choose the same ways.

All ranks compute the same result from the same numbers, column by column: with thousands of ranks the device
would wait for a loop over them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from picotron_ray.comm.collectives.world_gather import gather_world
from picotron_ray.comm.wire_bytes import SENT, STEP, size_bytes
from picotron_ray.errors import PeerLostError
from picotron_ray.layout.layout import Layout
from picotron_ray.train.way_selection import NO_COSTS, THINGS, Cost

STOP = 1
"""Flag: leave the loop after this step."""
SNAPSHOT = 2
"""Flag: take a pinned snapshot of this step."""
GO = 16
"""Flag: tools that are ready begin after this step (`train.step_tools`)."""
PATIENT = 32
"""Flag: a tool slows some rank's steps down, and nobody is to judge their length."""
HOLD = 64
"""Flag: stay at the boundary after this step until no rank raises it any more."""
DEBUGGED = 128
"""Flag: a debugger is attached to some rank, which may stand still for minutes."""
LASTING = PATIENT | HOLD | DEBUGGED
"""Flags that a rank raises anew for each exchange for as long as it means them; others are raised once."""

NOWHERE = -1
"""Of the numbers of a buffer that nothing has arrived in."""

RECORD = np.dtype(
    [
        ("loss_sum", "<f8"),
        ("grad_norm", "<f8"),
        ("rows", "<i8", 2),
        ("flags", "<i8"),
        ("digest", "u1", 16),
        ("snapshots_apart_s", "<f8"),
        ("step_time_s", "<f8"),
        ("sealed", "<i8"),
        ("imbalance", "<f8"),
        ("dropped", "<f8"),
        ("at_s", "<f8"),
        ("costs", "<f8", (len(THINGS), 2)),
        ("step", "<i8"),
    ]
)
"""A contribution on the wire."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """Numbers of one rank: loss sum (nats) over its tokens, rows fed, and local measurements.

    Numbers that are tensors lie on the device, where the host does not look before the exchange.

    Fields:
        imbalance: load of the most used expert of its layers / the mean; 0 without experts.
        dropped: assignments of tokens over the capacity of experts in its layers.
        at_s: its clock, seconds since the epoch.
        costs: of its communication (`way_selection`).
        step: the one that the exchange is of.
    """

    loss_sum: float | Tensor
    grad_norm: float | Tensor
    rows: tuple[int, int] = (0, 0)
    flags: int = 0
    digest: bytes = bytes(16)
    snapshots_apart_s: float = 0.0
    step_time_s: float = 0.0
    sealed: int = -1
    imbalance: float | Tensor = 0.0
    dropped: float | Tensor = 0.0
    at_s: float = 0.0
    costs: tuple[Cost, ...] = NO_COSTS
    step: int = 0

    @property
    def record(self) -> np.ndarray:
        """The contribution as an array of one `RECORD`, with 0 for what lies on the device."""
        values = [getattr(self, name) for name in RECORD.names or ()]
        numbers = [0.0 if isinstance(value, Tensor) else value for value in values]
        numbers[4] = np.frombuffer(self.digest, np.uint8)
        return np.array([tuple(numbers)], RECORD)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Result of an exchange, identical on all ranks."""

    loss_sum: float
    grad_norm: float
    rows: tuple[tuple[int, int, str], ...]  # per DP replica: first, last (half open), digest
    flags: int
    sealed: int  # newest step that every rank has sealed; -1: none
    snapshot_interval: int  # steps, from the measured cost (`state_copies`)
    imbalance: float = 0.0  # load of the most used expert of any layer / the mean; 0: no experts
    dropped: int = 0  # assignments over capacity, in all layers
    finite: bool = True  # losses and gradient norms of all ranks
    at_s: float = 0.0  # by the clock of rank 0: all ranks write the same ledger line
    costs: tuple[Cost, ...] = NO_COSTS  # the largest bytes and seconds of all ranks


def exchange(mine: Contribution, layout: Layout, device: torch.device, group: Any = None) -> Agreement:
    """All-gather ``mine`` over all ranks of the generation.

    Raises:
        PeerLostError: what arrived is of another step. An aborted collective of NCCL may end without an
            error, and leave what lay in the buffer.
        RuntimeError: a peer is gone, or the groups were aborted. Or two ranks of one DP replica fed different
            tokens: a bug, with which training must not go on.
    """
    table = np.frombuffer(to_host(gather(mine, layout, device, group)).numpy().tobytes(), RECORD)
    if (table["step"] != mine.step).any():
        rank = int((table["step"] != mine.step).argmax())
        seen = int(table["step"][rank])
        raise PeerLostError(f"the exchange of step {mine.step} has rank {rank}'s numbers of step {seen}")
    return agree(table, layout)


def gather(mine: Contribution, layout: Layout, device: torch.device, group: Any = None) -> Tensor:
    """All-gather ``mine`` over all ranks, on the device: records one after the other, as int64."""
    packed = mine.record.tobytes()
    # non-blocking: the driver has copied so few pageable bytes when the call returns
    local = torch.frombuffer(bytearray(packed), dtype=torch.int64).to(device, non_blocking=True)
    for name, field in (RECORD.fields or {}).items():
        if isinstance(value := getattr(mine, name), Tensor):
            local.view(torch.float64).narrow(0, field[1] // 8, 1).copy_(value)
    if layout.world_size == 1:
        return local
    gathered = local.new_full((layout.world_size * local.numel(),), NOWHERE)
    SENT.add(STEP, size_bytes(local) * (layout.world_size - 1))
    gather_world(gathered, local, group)
    return gathered


def to_host(numbers: Tensor) -> Tensor:
    """Wait for what all ranks have told: the one time that the host waits for the device in a step."""
    return numbers.cpu()


def agree(table: np.ndarray, layout: Layout) -> Agreement:
    """Compute the result of one exchange, a pure function of all contributions.

    Args:
        table: of `RECORD`, by rank.
    """
    apart, step = float(table["snapshots_apart_s"].max()), float(table["step_time_s"].max())
    norms = table["grad_norm"]
    endless = norms[~np.isfinite(norms)]
    # every rank of a stage knows its layers' total: take one of each stage
    by_stage = table["dropped"].reshape(layout.pp, -1)[:, 0]
    return Agreement(
        loss_sum=sum(table["loss_sum"].tolist()),  # one by one: numpy's order is up to the processor
        grad_norm=float(endless[0] if endless.size else norms[0]),
        rows=_rows(table, layout),
        flags=int(np.bitwise_or.reduce(table["flags"])),
        sealed=int(table["sealed"].min()),
        at_s=float(table["at_s"][0]),
        costs=tuple(Cost(*pair) for pair in table["costs"].max(axis=0).tolist()),
        imbalance=float(table["imbalance"].max()),
        dropped=int(by_stage.sum()),
        finite=not endless.size and bool(np.isfinite(table["loss_sum"]).all()),
        snapshot_interval=max(1, math.ceil(apart / step)) if step > 0 else 1,
    )


def _rows(table: np.ndarray, layout: Layout) -> tuple[tuple[int, int, str], ...]:
    """Rows that each DP replica was fed: first row, last (half open), digest."""
    ranks = np.arange(layout.world_size).reshape(layout.pp, layout.dp, -1)
    first = ranks[0, :, 0]
    of_replica = np.broadcast_to(first[None, :, None], ranks.shape).reshape(-1)
    rows, digests = table["rows"], table["digest"]
    differ = (rows != rows[of_replica]).any(axis=1) | (digests != digests[of_replica]).any(axis=1)

    def fed(rank: int) -> tuple[int, int, str]:
        start, end = rows[rank].tolist()
        return start, end, digests[rank].tobytes().hex()

    if differ.any():
        rank = int(differ.argmax())
        raise RuntimeError(
            f"rank {rank} fed tokens {fed(rank)}, its replica fed {fed(int(of_replica[rank]))}"
        )
    texts = digests[first].tobytes().hex()
    return tuple(
        (start, end, texts[32 * replica : 32 * (replica + 1)])
        for replica, (start, end) in enumerate(rows[first].tolist())
    )
