"""Recovery ladder: the newest complete state on the lineage, nearest rung first.

A state (generation, step) is complete where its sealed slots cover every state group: for each group
some ``count`` of whose fragments all are there. Replicas share the copying, so one slot is rarely a
whole group; a survivor's flush is one whole fragment (0 of 1). Fragments of different counts do not mix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from picotron_ray.coordinator.lineage import on_lineage
from picotron_ray.coordinator.messages import Commit, GenerationId, GenerationSpec, SlotInfo, Source
from picotron_ray.layout.layout import Layout


def cover(slots: Iterable[SlotInfo], layout: Layout) -> tuple[SlotInfo, ...] | None:
    """Pick the fewest slots of low ranks that hold the whole state, by rank; None where a part is missing.

    All ``slots`` must be of one generation and step, written under ``layout``. Every slot carries the
    ledger's tail, so any of them will do for that.
    """
    fragments: dict[tuple[int, int], dict[int, SlotInfo]] = defaultdict(dict)
    for slot in sorted(slots, key=_order):
        for part in slot.fragments:
            fragments[part.group, part.count].setdefault(part.index, slot)
    chosen: set[SlotInfo] = set()
    for group in range(layout.state_groups):
        whole: list[tuple[SlotInfo, ...]] = [
            tuple(parts[i] for i in range(count))
            for (owner, count), parts in sorted(fragments.items())
            if owner == group and len(parts) >= count
        ]
        if not whole:
            return None
        nearest: tuple[SlotInfo, ...] = min(whole, key=_distance)
        chosen.update(nearest)
    return tuple(sorted(chosen, key=_order))  # a set's own order differs from process to process


def _order(slot: SlotInfo) -> tuple[int, str, str]:
    return slot.rank, slot.node, slot.slot


def _distance(parts: tuple[SlotInfo, ...]) -> tuple[int, tuple[int, ...]]:
    return len({slot.node for slot in parts}), tuple(slot.rank for slot in parts)


def newest_slots(
    slots: Iterable[SlotInfo], layouts: Mapping[GenerationId, Layout], newest: GenerationSpec | None
) -> Source | None:
    """Find the newest complete state that host memory holds on the lineage of ``newest``."""
    states: dict[tuple[int, GenerationId], list[SlotInfo]] = defaultdict(list)
    for slot in slots:
        if slot.generation in layouts and on_lineage(newest, slot.generation, slot.step):
            states[slot.step, slot.generation].append(slot)
    for step, generation in sorted(states, reverse=True):
        layout = layouts[generation]
        if found := cover(states[step, generation], layout):
            return Source("slots", step, generation, found, layout=layout)
    return None


def newest_commit(
    commits: Iterable[Commit], newest: GenerationSpec | None, bad: Collection[str] = ()
) -> Commit | None:
    """Find the last commit in log order that counts: on the lineage, and not found corrupt."""
    good = (c for c in commits if c.manifest not in bad and on_lineage(newest, c.generation, c.step))
    return max(good, key=lambda commit: (commit.step, commit.seq), default=None)


def restore_point(
    slots: Iterable[SlotInfo],
    layouts: Mapping[GenerationId, Layout],
    commits: Iterable[Commit],
    newest: GenerationSpec | None,
    *,
    bad_manifests: Collection[str] = (),
    use_slots: bool = True,
) -> tuple[Source, str]:
    """Choose the state to go on from, and say why.

    Args:
        use_slots: False where host memory is distrusted; a commit is used then, if one exists.
    """
    memory = newest_slots(slots, layouts, newest)
    commit = newest_commit(commits, newest, bad_manifests)
    if commit is not None:
        stored = Source(
            "commit", commit.step, commit.generation, manifest=commit.manifest, digest=commit.digest
        )
        if memory is None:
            return stored, f"commit of step {commit.step}: no complete state in host memory"
        if not use_slots:
            return stored, f"commit of step {commit.step}: host memory is distrusted"
        if memory.step < commit.step:
            return stored, f"commit of step {commit.step}: newer than host memory's {memory.step}"
    if memory is not None:
        return memory, f"host memory of step {memory.step}, written by generation {memory.generation}"
    return Source("init"), "initial weights: neither host memory nor a commit holds a state"
