"""Lineage of states: pure functions that tell which ones belong to the run's history.

A step of a generation is void once a later generation resumed before it. Each spec carries the chain of
its ancestors with the last step that counts of each, so one spec is enough to judge any state: neither
the order in which messages arrive nor a missing log entry can change the verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Link, Source
from picotron_ray.layout.layout import Layout


def on_lineage(newest: GenerationSpec | None, generation: GenerationId, step: int) -> bool:
    """Whether state ``step`` of ``generation`` is part of the history that ends in ``newest``.

    With no generation known there is nothing that could have voided it.
    """
    if newest is None:
        return True
    if generation == newest.id:
        return step >= newest.resume_step
    return any(link.generation == generation and step <= link.through for link in newest.lineage)


def descend(parent: GenerationSpec | None, source: Source) -> tuple[Link, ...]:
    """Return the lineage of a generation that follows ``parent`` and takes its state from ``source``."""
    if source.generation is None:  # from initial weights: nothing before it counts
        return ()
    chain = () if parent is None else (*parent.lineage, Link(parent.id, source.step))
    kept = tuple(
        Link(link.generation, min(link.through, source.step))
        for link in chain
        if link.generation < source.generation
    )
    return (*kept, Link(source.generation, source.step))


def slim(spec: GenerationSpec) -> GenerationSpec:
    """Leave out what a lineage does not need: a spec may name thousands of members and slots."""
    return replace(spec, members=(), struck=(), adapted=(), source=replace(spec.source, slots=(), copies=()))


def may_count(
    generations: Iterable[GenerationId], writers: Collection[GenerationId]
) -> frozenset[GenerationId]:
    """Those of the log's generations whose lineage may still be asked for.

    A run goes on from one that has a commit, or from a younger one: an older one is an ancestor, or void.

    Args:
        writers: generations that have a commit.
    """
    known = frozenset(generations)
    newest = max(known.intersection(writers), default=None)
    return frozenset(each for each in known if each in writers or newest is None or each >= newest)


def trimmed(specs: Sequence[GenerationSpec], writers: Collection[GenerationId]) -> tuple[GenerationSpec, ...]:
    """Specs as a log's reader has them (``Begin.generations``): the last one with its members, all slim.

    Their number grows for as long as a run lasts, so those that cannot count any more are left without their
    lineage, too.
    """
    if not specs:
        return ()
    counting, last = may_count((spec.id for spec in specs), writers), specs[-1]
    found = [slim(spec) if spec.id in counting else replace(slim(spec), lineage=()) for spec in specs]
    newest = replace(found[-1], members=last.members, struck=last.struck, adapted=last.adapted)
    return (*found[:-1], newest)


def ancestors(spec: GenerationSpec, since: GenerationId | None = None) -> list[GenerationSpec]:
    """Stand-ins for the ancestors of a generation, oldest first, for a log that lacks their entries.

    A commit's ledger continues that of the commit before it, which the log finds by the sources of all
    generations in between. Those are true; members and layout are not known any more. A rewind to where a
    generation took over was its own, and none of its ancestors'.

    Args:
        since: the oldest one that is wanted; None: all.
    """
    found = []
    obeyed = (
        None if spec.source.kind == "commit" and spec.resume_step == spec.obeyed_step else spec.obeyed_step
    )
    for at, link in enumerate(spec.lineage):
        if since is not None and link.generation < since:
            continue
        older = spec.lineage[at - 1] if at else None
        source = Source("init") if older is None else Source("slots", older.through, older.generation)
        reason = "entered later: storage was out"
        rewinds = tuple(rewind for rewind in spec.rewinds if rewind.to_step < link.through)
        words = link.generation, (), Layout(), source, reason, spec.lineage[:at], (), rewinds, obeyed
        found.append(GenerationSpec(*words))
    return found
