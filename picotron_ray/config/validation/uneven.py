"""Rules of layouts with uneven shares: rows of each replica, blocks of each pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout

Found = tuple[str, tuple[str, ...], str]
"""The key at fault, the keys it is at odds with, and what is wrong."""


def uneven_problems(job: JobConfig, layout: Layout) -> Iterator[Found]:
    """Rules that uneven shares break."""
    rows, blocks = layout.replica_rows, layout.stage_blocks
    if rows:
        text = _wrong(rows, layout.dp, "replicas", job.data.global_batch, least=0)
        if text:
            yield "layout.replica_rows", ("layout.dp", "data.global_batch"), text
    if blocks and (job.model.builder is None or job.model.built is not None):
        text = _wrong(blocks, layout.stages, "pipeline stages", job.model.depth, least=1)
        if text:
            yield "layout.stage_blocks", ("layout.pp", "layout.virtual_stages", "model.layers"), text


def _wrong(counts: Sequence[int], parts: int, of: str, total: int, least: int) -> str:
    """The mistake in counts, in words; empty where they are right."""
    if len(counts) == parts and sum(counts) == total and min(counts) >= least:
        return ""
    saw = f"saw {len(counts)} counts from {min(counts)} to {max(counts)} with a sum of {sum(counts)}"
    return f"{saw}, expected one for each of {parts} {of}, {least} or more, {total} in all"
