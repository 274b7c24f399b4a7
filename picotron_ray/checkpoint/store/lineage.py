"""Lineage of a generation: the commits that it descends from. Pure.

A generation resumes at a step of an earlier one; what that earlier one computed after that step is
void. So a commit belongs to the lineage of a generation where the chain of resumes passes through its
generation at or after its step.
"""

from __future__ import annotations

from collections.abc import Sequence

from picotron_ray.checkpoint.store.run_log import Entry, RunLog

Id = tuple[int, int]


def lineage(entries: Sequence[Entry], generation: Id) -> list[tuple[Id, int | None]]:
    """List the generation and its ancestors, newest first, each with the last step that counts of it.

    The generation itself has None (open end). The chain ends where a generation started from nothing, or
    where an ancestor has no log entry.
    """
    sources = {
        (entry.body["term"], entry.body["n"]): entry.body["source"]
        for entry in entries
        if entry.kind == "generation"
    }
    chain: list[tuple[Id, int | None]] = [(generation, None)]
    at: Id | None = generation
    while at in sources:
        source = sources[at]
        parent = source.get("generation")
        at = (parent["term"], parent["n"]) if parent else None
        if at is None or any(at == seen for seen, _ in chain):
            break
        limit = chain[-1][1]
        chain.append((at, source["step"] if limit is None else min(limit, source["step"])))
    return chain


def commits_on(entries: Sequence[Entry], commits: Sequence[Entry], generation: Id) -> list[Entry]:
    """Select those of ``commits`` (in log order) that lie on the lineage of the generation."""
    limits = dict(lineage(entries, generation))

    def counts(commit: Entry) -> bool:
        at = commit.body["term"], commit.body["n"]
        limit = limits.get(at)
        return at in limits and (limit is None or commit.body["step"] <= limit)

    return [commit for commit in commits if counts(commit)]


def newest_generation(log: RunLog) -> Id | None:
    """Newest generation that the log has; None before the first."""
    found = (entry.body for entry in log.entries() if entry.kind == "generation")
    return max(((body["term"], body["n"]) for body in found), default=None)


def newest_commit(log: RunLog) -> Entry | None:
    """Newest commit of the history that ends in the log's newest generation; None before one.

    After a rewind that is not the last one in the log, which the rewind has made void.
    """
    newest = newest_generation(log)
    found = [] if newest is None else commits_on(log.entries(), log.commits(), newest)
    return max(found, key=lambda entry: (entry.body["step"], entry.seq), default=None)
