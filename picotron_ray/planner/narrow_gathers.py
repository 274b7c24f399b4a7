"""Weights that ZeRO gathers in 8 bits (``fp8.gather``), and the bytes that this saves."""

from __future__ import annotations

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.fp8 import gathers_in_fp8
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.kept_activations import weight_bytes
from picotron_ray.planner.model_sizes import rank_depths, sizes_of, stage_mixtures

NARROW_BYTES = 1


def saved_of_block(job: JobConfig, layout: Layout) -> float:
    """Bytes by which a block's gathered weights are smaller; where the first blocks differ, a later one's."""
    if not gathers_in_fp8(job, layout):
        return 0.0
    sizes = sizes_of(job.model)
    router = job.model.moe.experts * sizes.hidden
    return (sizes.matrices - sizes.experts - router) / layout.tp * (weight_bytes(job) - NARROW_BYTES)


def saved_of_rank(job: JobConfig, layout: Layout, rank: int) -> float:
    """Bytes that one gather of all weights of a pipeline rank is smaller."""
    if not gathers_in_fp8(job, layout):
        return 0.0
    mixtures = sum(stage_mixtures(job.model, layout.cut, stage) for stage in layout.rank_stages(rank))
    first = sum(rank_depths(job, layout, rank)) - mixtures
    of_first = sizes_of(job.model).first_matrices / layout.tp * (weight_bytes(job) - NARROW_BYTES)
    return mixtures * saved_of_block(job, layout) + first * of_first


def least_weight_bytes(job: JobConfig) -> int:
    """Bytes of a weight as it is gathered in the layout where that is least."""
    narrow = job.precision == "fp8" and job.fp8.scaling == "tensorwise" and job.fp8.gather != "bf16"
    return NARROW_BYTES if narrow else weight_bytes(job)
