"""How many blocks of a pipeline rank a layout computes again."""

from __future__ import annotations

from picotron_ray.config.job import JobConfig
from picotron_ray.config.layout import Layout
from picotron_ray.config.recompute import Again, recomputed
from picotron_ray.planner.counts import stage_depth


def rank_depths(job: JobConfig, layout: Layout, rank: int) -> list[int]:
    """Blocks of each stage of a pipeline rank, in the order of ``Layout.rank_stages``."""
    return [stage_depth(job.model, layout.stages, stage) for stage in layout.rank_stages(rank)]


def blocks_again(job: JobConfig, layout: Layout, rank: int) -> Again:
    """What the layout's policy comes to on a pipeline rank, all of its stages together."""
    stages, depths = layout.rank_stages(rank), rank_depths(job, layout, rank)
    kinds = [
        kind
        for stage, depth in zip(stages, depths, strict=True)
        for kind in recomputed(layout.recompute, depth, stage)
    ]
    return Again(kinds.count("full"), kinds.count("selective"), len(kinds))
