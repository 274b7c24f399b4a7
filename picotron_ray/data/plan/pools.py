"""Pools of a curriculum's stages: which samples of a source each stage feeds."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from picotron_ray.config.import_path import import_object, one_line
from picotron_ray.config.schema.curriculum import CurriculumConfig, StageConfig
from picotron_ray.data.cache_folder import open_or_make
from picotron_ray.data.plan.difficulty import CHUNK_ROWS, RankRequest, open_digested, ranked, save_digested
from picotron_ray.data.samples import SampleSet
from picotron_ray.data.shuffle import Index
from picotron_ray.errors import ConfigError, DataError

TRIED = 16
"""Rows of which a filter is asked several times, whether it says the same."""
Filter = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int32] | None], bool]


def stage_pools(
    samples: SampleSet, curriculum: CurriculumConfig, request: RankRequest, folder: Path
) -> tuple[tuple[Index, ...], tuple[str, ...]]:
    """Return each stage's samples, the easiest first, and digests of what they were taken from.

    Args:
        folder: cache of this node, where ranks and what filters keep are made once.

    Raises DataError where a stage has no sample, a filter fails, or scores are missing.
    """
    order, digest = np.arange(samples.samples), ""
    if curriculum.ranks:
        order, digest = ranked(samples, request, folder)
    pools, digests = [], []
    for stage in curriculum.stages:
        mine, of = (
            (order, digest) if stage.filter is None else _kept(samples, order, digest, stage, request, folder)
        )
        pool = mine[: math.ceil(stage.difficulty * len(mine))]
        if not len(pool):
            raise DataError(
                f"{_key(stage)}: {stage.filter} keeps no row of {request.source}; let it keep some"
            )
        pools.append(pool)
        digests.append(of)
    return tuple(pools), tuple(digests)


def _key(stage: StageConfig) -> str:
    return f"data.curriculum.stages.{stage.name}.filter"


def _filter(stage: StageConfig) -> Filter:
    assert stage.filter is not None
    try:
        found: Filter = import_object(_key(stage), stage.filter)
    except ConfigError as error:
        raise DataError(str(error)) from error
    return found


def _digest(function: Filter) -> str:
    """Return the digest of the module in which a filter is written."""
    try:
        text = Path(inspect.getfile(function)).read_bytes()
    except (OSError, TypeError) as error:
        raise DataError(
            f"data.curriculum: saw a filter without a file of source code ({one_line(error)}); write one"
        ) from None
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _kept(
    samples: SampleSet, order: Index, ranks: str, stage: StageConfig, request: RankRequest, folder: Path
) -> tuple[Index, str]:
    """Open or make the samples that a stage's filter keeps, the easiest first, and their digest."""
    keep = _filter(stage)
    words = f"{request.identity}/{samples.samples}/{ranks}/{stage.filter}/{_digest(keep)}"
    place = folder / f"kept-{hashlib.blake2b(words.encode(), digest_size=16).hexdigest()}"

    def build(fresh: Path) -> None:
        kept = _asked(samples, stage, keep)
        save_digested(fresh / "kept.npy", np.asarray(order[kept[order]], np.int64))

    def opened(made: Path) -> tuple[Index, str] | None:
        return open_digested(made / "kept.npy", samples.samples)

    return open_or_make(place, "rows that a filter keeps", opened, build)


def _asked(samples: SampleSet, stage: StageConfig, keep: Filter) -> npt.NDArray[np.bool_]:
    kept = np.zeros(samples.samples, np.bool_)
    for first in range(0, samples.samples, CHUNK_ROWS):
        some = np.arange(first, min(samples.samples, first + CHUNK_ROWS))
        rows, documents = samples.rows(some), samples.documents(some)
        for at, sample in enumerate(some.tolist()):
            asked = rows[at], None if documents is None else documents[at]
            try:
                kept[sample] = bool(keep(*asked))
                changed = sample < TRIED and any(bool(keep(*asked)) != kept[sample] for _ in range(3))
            except Exception as error:
                raise DataError(
                    f"{_key(stage)}: {stage.filter} raises {one_line(error)} for row {sample}"
                ) from error
            if changed:
                text = f"{stage.filter} says now yes and now no of row {sample}, expected the same each time"
                raise DataError(f"{_key(stage)}: {text}")
    return kept
