"""Generations in the log: how a spec is entered, and how entries are read, also those of earlier versions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from picotron_ray.checkpoint.store.run_log import Entry
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.codec import decode_spec, plain
from picotron_ray.coordinator.messages import GenerationSpec
from picotron_ray.coordinator.policies.rewind import owed_step


def generation_body(spec: GenerationSpec) -> dict[str, Any]:
    """Entry of a generation in the log."""
    return {"term": spec.id.term, "n": spec.id.n, "source": plain(spec.source), "spec": plain(spec)}


def step_owed(job: JobConfig, entries: Iterable[Entry]) -> int | None:
    """Return ``checkpoint.resume_step`` where the log has no generation yet that went back to it."""
    if job.checkpoint.resume_step is None:
        return None
    return owed_step(job, read_generations(entries))


def read_generations(entries: Iterable[Entry]) -> tuple[GenerationSpec, ...]:
    """Read the generations of the log, oldest first.

    Earlier versions did not enter which ``checkpoint.resume_step`` had been obeyed. There a term's first
    generation obeyed one where it took the state of a commit that was older than the newest.
    """
    found: list[GenerationSpec] = []
    newest, obeyed = 0, None  # step of the newest commit that counts; what was obeyed last
    for entry in entries:
        if entry.kind == "commit":
            newest = entry.body["step"]
        if entry.kind != "generation":
            continue
        told = entry.body["spec"]
        spec = decode_spec(told)
        if "obeyed_step" in told:
            obeyed = spec.obeyed_step
        elif spec.id.n == 1 and spec.source.kind == "commit" and spec.resume_step < newest:
            obeyed = spec.resume_step
        newest = min(newest, spec.resume_step)
        found.append(replace(spec, obeyed_step=obeyed))
    return tuple(found)
