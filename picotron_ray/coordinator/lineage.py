"""Lineage of states: pure functions that tell which ones belong to the run's history.

A step of a generation is void once a later generation resumed before it. Each spec carries the chain of
its ancestors with the last step that counts of each, so one spec is enough to judge any state: neither
the order in which messages arrive nor a missing log entry can change the verdict.
"""

from __future__ import annotations

from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Link, Source


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
