"""Generations in the log: how a spec is entered, and how entries are read, also those of earlier versions.

A generation of 16,000 members restores from as many slots, and a week has a hundred generations and more. So
an entry tells each node and member once, and no slot: who restores has the spec that it was called with.

    {term, n, source, lineage: "1.1:29 1.2:60", nodes: [name, …], members: [[node, worker, …], …], spec}

``lineage`` has each link as ``generation:through``; ``members`` has the members by rank, those together that
follow one another on a node, which goes by its place in ``nodes``; ``spec`` is the rest. Entries of earlier
versions have all of it in ``spec``, and the source a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from picotron_ray.checkpoint.store.run_log import Entry
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.codec import decode_spec, plain
from picotron_ray.coordinator.lineage import may_count, slim
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Member
from picotron_ray.coordinator.policies.rewind import owed_step

_APART = frozenset({"id", "source", "lineage", "members"})  # fields of a spec that are not in ``spec``


def generation_body(spec: GenerationSpec) -> dict[str, Any]:
    """Entry of a generation in the log."""
    source = plain(slim(spec).source)
    nodes = {node: at for at, node in enumerate(dict.fromkeys(member.node for member in spec.members))}
    placed = groupby(spec.members, key=lambda member: member.node)
    rest = plain(replace(slim(spec), struck=spec.struck, adapted=spec.adapted, lineage=()))
    return {
        "term": spec.id.term,
        "n": spec.id.n,
        "source": {key: value for key, value in source.items() if key not in ("slots", "copies")},
        "lineage": " ".join(f"{link.generation}:{link.through}" for link in spec.lineage),
        "nodes": list(nodes),
        "members": [[nodes[node], *(member.worker for member in group)] for node, group in placed],
        "spec": {key: value for key, value in rest.items() if key not in _APART},
    }


def spec_of(body: Mapping[str, Any], with_lineage: bool = True) -> GenerationSpec:
    """Read a generation's entry; members are there where the entry is whole, slots never."""
    told = dict(body["spec"])
    of_before = "source" in told
    if not of_before:
        told |= {"id": {"term": body["term"], "n": body["n"]}, "source": body["source"], "members": []}
        told["lineage"] = _links(body["lineage"]) if with_lineage else []
    elif not with_lineage:
        told["lineage"] = []
    spec = decode_spec(told)
    members = spec.members if of_before else _members(body["nodes"], body["members"])
    return replace(slim(spec), members=members, struck=spec.struck, adapted=spec.adapted)


def _links(text: str) -> list[dict[str, Any]]:
    found = []
    for link in text.split():
        term, n, through = (int(number) for number in link.replace(":", ".").split("."))
        found.append({"generation": {"term": term, "n": n}, "through": through})
    return found


def _members(nodes: Sequence[str], groups: Iterable[Sequence[Any]]) -> tuple[Member, ...]:
    return tuple(Member(worker, nodes[node]) for node, *workers in groups for worker in workers)


def step_owed(job: JobConfig, entries: Sequence[Entry]) -> int | None:
    """Return ``checkpoint.resume_step`` where the log has no generation yet that went back to it."""
    if job.checkpoint.resume_step is None:
        return None
    return owed_step(job, read_generations(entries))


def read_generations(entries: Sequence[Entry], commits: Iterable[Entry] = ()) -> tuple[GenerationSpec, ...]:
    """Read the generations of the log, oldest first, as ``lineage.trimmed`` leaves them.

    Earlier versions did not enter which ``checkpoint.resume_step`` had been obeyed. There a term's first
    generation obeyed one where it took the state of a commit that was older than the newest.

    Args:
        commits: those that may be resumed from.
    """
    launched = [_id(entry) for entry in entries if entry.kind == "generation"]
    counting = may_count(launched, {_id(entry) for entry in commits})
    found: list[GenerationSpec] = []
    newest, obeyed = 0, None  # step of the newest commit that counts; what was obeyed last
    for entry in entries:
        if entry.kind == "commit":
            newest = entry.body["step"]
        if entry.kind != "generation":
            continue
        spec = spec_of(entry.body, _id(entry) in counting)
        if "obeyed_step" in entry.body["spec"]:
            obeyed = spec.obeyed_step
        elif spec.id.n == 1 and spec.source.kind == "commit" and spec.resume_step < newest:
            obeyed = spec.resume_step
        newest = min(newest, spec.resume_step)
        last = len(found) + 1 == len(launched)
        found.append(replace(spec if last else slim(spec), obeyed_step=obeyed))
    return tuple(found)


def _id(entry: Entry) -> GenerationId:
    return GenerationId(entry.body["term"], entry.body["n"])
