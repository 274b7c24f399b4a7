"""Time and memory that one rank's initial weights take, at any size, without the other ranks.

Boxes are drawn as at a run's start, but copied nowhere: drawing alone is measured.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from picotron_ray.bench.common.machine import machine
from picotron_ray.bench.common.report import machine_line
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, slabs
from picotron_ray.models.build import definition_of
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.shard_boxes import local_box
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.planner.model_sizes import stage_bounds
from picotron_ray.planner.search import choose_layout
from picotron_ray.runtime.driver.resolve_job import resolve_words
from picotron_ray.train.training_state import INITIAL_PIECE


def bench(config: str, overrides: Sequence[str], rank: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Draw one rank's part of the initial weights.

    Raises:
        ConfigError: a bad config, no such rank, or a model of the user's own.
        LayoutError: no layout fits on ``cluster.max_workers`` GPUs.
    """
    job = resolve_words(config, overrides).job
    if job.model.builder is not None:
        raise ConfigError("model.builder: a model of your own draws its weights itself, whole")
    layout = choose_layout(job, job.cluster.max_workers, profile_of("cuda")).layout
    if not 0 <= rank < layout.world_size:
        raise ConfigError(f"--rank: saw {rank}, expected 0 to {layout.world_size - 1} of {layout}")
    boxes = list(boxes_of(job, layout, rank))
    say(f"rank {rank} of {layout}: {len(boxes)} tensors")
    initial = definition_of(job.model, job.seed).initial(job.seed)
    memory, began = _peak_bytes(), time.perf_counter()
    for spec, box in boxes:
        for piece in slabs(box, INITIAL_PIECE):
            initial(spec, piece)
    seconds, memory = time.perf_counter() - began, _peak_bytes() - memory
    numbers, of_model = sum(box.numel for _, box in boxes), _numbers(job)
    return {
        "machine": machine(),
        "layout": str(layout),
        "rank": rank,
        "numbers": numbers,
        "seconds": seconds,
        "peak_extra_bytes": memory,
        "model_numbers": of_model,
        "model_seconds": seconds * of_model / max(1, numbers),
    }


def boxes_of(job: JobConfig, layout: Layout, rank: int) -> Iterator[tuple[ParameterSpec, Box]]:
    """Yield what a rank holds of which parameter; nothing takes memory."""
    definition, bounds = definition_of(job.model, job.seed), stage_bounds(job.model, layout.cut)
    for stage in layout.rank_stages(layout.coordinates(rank).pp):
        for name, _ in definition.stage(bounds, stage).named_parameters():
            yield definition.specs[name], local_box(definition.specs[name], layout, rank)


def lines(found: dict[str, Any]) -> list[str]:
    """Report of the bench, as people read it."""
    return [
        f"rank {found['rank']} of {found['layout']}, {machine_line(found)}",
        f"its part      {found['numbers']:,} numbers in {found['seconds']:.1f} s on one core",
        f"peak memory   {found['peak_extra_bytes'] / 2**20:.0f} MiB beside the weights",
        f"whole model   {found['model_numbers']:,} numbers: {found['model_seconds']:.0f} s at that rate",
    ]


def _numbers(job: JobConfig) -> int:
    return sum(spec.numel for spec in definition_of(job.model, job.seed).table)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
