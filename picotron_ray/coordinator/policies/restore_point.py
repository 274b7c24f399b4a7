"""Recovery ladder: the newest complete state on the lineage, nearest rung first.

A state (generation, step) is complete where its sealed slots cover every state group: for each group
some ``count`` of whose fragments all are there. Replicas share the copying, so one slot is rarely a
whole group; a survivor's flush is one whole fragment (0 of 1). Fragments of different counts do not mix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

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


def older_state(
    slots: Iterable[SlotInfo],
    layouts: Mapping[GenerationId, Layout],
    commits: Iterable[Commit],
    newest: GenerationSpec | None,
    *,
    wanted: int,
    below: int,
    bad_manifests: Collection[str] = (),
) -> tuple[Source, str]:
    """Choose the state to rewind to, and say why.

    It is the newest one of at most step ``wanted``, from host memory or a commit; where there is none, the
    oldest one from before step ``below``; without any, the initial weights.
    """
    held = [state for state in complete_states(slots, layouts, newest) if state.step < below]
    good = (
        c for c in commits if c.manifest not in bad_manifests and on_lineage(newest, c.generation, c.step)
    )
    held += [_stored(commit) for commit in sorted(good, key=lambda commit: commit.seq) if commit.step < below]
    old = [state for state in held if state.step <= wanted]
    if old:
        found = max(old, key=lambda state: (state.step, state.kind == "slots"))
    elif held:
        found = min(held, key=lambda state: (state.step, state.kind != "slots"))
    else:
        return Source("init"), "initial weights: no older state is left"
    place = "host memory" if found.kind == "slots" else "the commit"
    return found, f"{place} of step {found.step}, older than step {below}"


def newest_slots(
    slots: Iterable[SlotInfo], layouts: Mapping[GenerationId, Layout], newest: GenerationSpec | None
) -> Source | None:
    """Find the newest complete state that host memory holds on the lineage of ``newest``."""
    return next(complete_states(slots, layouts, newest), None)


def complete_states(
    slots: Iterable[SlotInfo], layouts: Mapping[GenerationId, Layout], newest: GenerationSpec | None
) -> Iterator[Source]:
    """All complete states that host memory holds on the lineage of ``newest``, the newest first."""
    states: dict[tuple[int, int, int], list[SlotInfo]] = defaultdict(list)
    for slot in slots:
        states[slot.step, slot.generation.term, slot.generation.n].append(slot)  # numbers hash at once
    for key in sorted(states, reverse=True):
        step, generation = key[0], states[key][0].generation
        if generation not in layouts or not on_lineage(newest, generation, step):
            continue
        layout = layouts[generation]
        if found := cover(states[key], layout):
            yield Source("slots", step, generation, found, layout=layout)


def _stored(commit: Commit) -> Source:
    return Source("commit", commit.step, commit.generation, manifest=commit.manifest, digest=commit.digest)


def newest_commit(
    commits: Iterable[Commit], newest: GenerationSpec | None, bad: Collection[str] = ()
) -> Commit | None:
    """Find the last commit in log order that counts: on the lineage, and not found corrupt."""
    latest_first = sorted(commits, key=lambda commit: (commit.step, commit.seq), reverse=True)
    good = (c for c in latest_first if c.manifest not in bad and on_lineage(newest, c.generation, c.step))
    return next(good, None)


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
        stored = _stored(commit)
        if memory is None:
            return stored, f"commit of step {commit.step}: no complete state in host memory"
        if not use_slots:
            return stored, f"commit of step {commit.step}: host memory is distrusted"
        if memory.step < commit.step:
            return stored, f"commit of step {commit.step}: newer than host memory's {memory.step}"
    if memory is not None:
        return memory, f"host memory of step {memory.step}, written by generation {memory.generation}"
    return Source("init"), "initial weights: nothing is saved yet"
