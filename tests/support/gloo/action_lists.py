"""Pipeline schedules given as lists of actions: some by hand, others made for a placement of stages."""

from __future__ import annotations

from typing import Any

from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedule_actions import Action, action_list

Rows = tuple[str, ...]

ONE_F_ONE_B: Rows = (
    "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3",
    "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
)
V_SPLIT: Rows = (  # rank 0 has the first stage and the last; weights wait until nothing else is left
    "0F0 0F1 3F0 3I0 0F2 3F1 3I1 3W0 0I0 3F2 3I2 3W1 0I1 0W0 0I2 3W2 0W1 0W2",
    "1F0 2F0 1F1 2F1 2I0 1I0 1F2 2F2 2I1 1I1 2W0 1W0 2I2 1I2 2W1 1W1 2W2 1W2",
)
NEIGHBOURS: Rows = (  # consecutive stages on one rank, some backward passes split, micro-batches out of order
    "0F0 1F0 0F2 1F2 0F1 1F1 1B2 0B2 1I1 0I1 1B0 0B0 0W1 1W1",
    "2F0 2F2 3F2 3I2 2B2 3F0 3W2 2F1 3F1 3B1 2I1 3B0 2W1 2B0",
)


def made(placement: tuple[tuple[int, ...], ...], micro_batches: int, split: bool) -> Rows:
    """A schedule of any placement: whoever is free does what can be done, backward passes first, W last."""
    last = max(map(max, placement))
    done: set[Action] = set()
    rows: list[list[Action]] = [[] for _ in placement]
    back = "I" if split else "B"

    def ready(stage: int, kind: str, micro_batch: int) -> bool:
        forward = Action(stage, "F", micro_batch)
        if kind == "F":
            return stage == 0 or Action(stage - 1, "F", micro_batch) in done
        if kind == "W":
            return Action(stage, "I", micro_batch) in done
        return forward in done and (stage == last or Action(stage + 1, back, micro_batch) in done)

    kinds = "IFW" if split else "BF"
    while len(done) < (last + 1) * micro_batches * len(kinds):
        found = []
        for rank, stages in enumerate(placement):
            can = (
                Action(stage, kind, micro_batch)
                for kind in kinds
                for micro_batch in range(micro_batches)
                for stage in stages
                if Action(stage, kind, micro_batch) not in done and ready(stage, kind, micro_batch)
            )
            if action := next(can, None):
                found.append((rank, action))
        for rank, action in found:
            rows[rank].append(action)
            done.add(action)
    return tuple(" ".join(map(str, row)) for row in rows)


def layout_of(rows: Rows, global_batch: int, **degrees: Any) -> Layout:
    """The layout with these rows, and micro-batches as large as make their number."""
    listed = action_list(rows)
    return Layout(
        pp=len(rows),
        schedule="custom",
        virtual_stages=len(listed.placement[0]),
        placement=listed.placement,
        micro_batch=-(-global_batch // (degrees.get("dp", 1) * listed.micro_batches)),
        **degrees,
    )
