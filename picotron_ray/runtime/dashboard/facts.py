"""Facts of a run as the page shows them, from whichever source knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from picotron_ray.observability.rank_table import RankTable
from picotron_ray.runtime.dashboard.curves import Curves


@dataclass(slots=True)
class RunFacts:
    """Everything that is known of a run now.

    Fields:
        status: as the coordinator tells it; of a run without one the same keys, as far as storage knows them.
        source: "live" or "storage".
        members: workers by rank, of the newest generation.
        nodes: node by rank; "": not known.
        generations: newest ones, oldest first: id, layout, workers, start_step, end_step, reason, source,
            from_s and to_s since the epoch, null where they are not known.
        commits: newest ones, oldest first: step, at_s, bytes, commit_s, stall_s.
        slow_ranks: rows of `RankTable`, the slowest first.
        table: rows of all ranks, where storage has them.
        memory: what agents tell of memory and GPUs (`agent_figures`).
        config: of the newest launch, without secrets.
        notes: what could not be read, a line each.
    """

    run: str
    source: str
    status: dict[str, Any]
    curves: Curves
    members: Sequence[str] = ()
    nodes: Sequence[str] = ()
    generations: Sequence[dict[str, Any]] = ()
    commits: Sequence[dict[str, Any]] = ()
    slow_ranks: Sequence[dict[str, Any]] = ()
    table: RankTable | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    heard_s: float = 0.0
    """When its figures were told, in seconds since the epoch."""

    @property
    def over(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.source == "storage" and bool(self.status.get("done"))
