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
from picotron_ray.data.plan.difficulty import CHUNK_ROWS, RankRequest, ranked
from picotron_ray.data.samples import SampleSet
from picotron_ray.data.shuffle import Index
from picotron_ray.errors import ConfigError, DataError

Filter = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int32] | None], bool]


def stage_pools(
    samples: SampleSet, curriculum: CurriculumConfig, request: RankRequest, folder: Path
) -> tuple[Index, ...]:
    """Return each stage's samples, the easiest first.

    Args:
        folder: cache of this node, where ranks and what filters keep are made once.

    Raises DataError where a stage has no sample, a filter fails, or scores are missing.
    """
    order = ranked(samples, request, folder) if curriculum.ranks else np.arange(samples.samples)
    return tuple(_pool(samples, order, stage, request, folder) for stage in curriculum.stages)


def _pool(samples: SampleSet, order: Index, stage: StageConfig, request: RankRequest, folder: Path) -> Index:
    if stage.filter is not None:
        kept = _kept(samples, stage, request, folder)
        order = order[kept[order]]
    pool = order[: math.ceil(stage.difficulty * len(order))]
    if not len(pool):
        raise DataError(f"{_key(stage)}: {stage.filter} keeps no row of {request.source}; let it keep some")
    return pool


def _key(stage: StageConfig) -> str:
    return f"data.curriculum.stages.{stage.name}.filter"


def filter_digest(stage: StageConfig) -> str:
    """Return the digest of the module in which a stage's filter is written; "" without one."""
    return "" if stage.filter is None else _digest(_filter(stage))


def _filter(stage: StageConfig) -> Filter:
    assert stage.filter is not None
    try:
        found: Filter = import_object(_key(stage), stage.filter)
    except ConfigError as error:
        raise DataError(str(error)) from error
    return found


def _digest(function: Filter) -> str:
    try:
        text = Path(inspect.getfile(function)).read_bytes()
    except (OSError, TypeError) as error:
        raise DataError(
            f"data.curriculum: saw a filter without a file of source code ({one_line(error)}); write one"
        ) from None
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _kept(
    samples: SampleSet, stage: StageConfig, request: RankRequest, folder: Path
) -> npt.NDArray[np.bool_]:
    """Open or make the mask of samples that a stage's filter keeps."""
    keep = _filter(stage)
    words = f"{request.identity}/{samples.samples}/{stage.filter}/{_digest(keep)}"
    place = folder / f"kept-{hashlib.blake2b(words.encode(), digest_size=16).hexdigest()}"

    def build(fresh: Path) -> None:
        np.save(fresh / "kept.npy", _asked(samples, stage, keep))

    def opened(made: Path) -> npt.NDArray[np.bool_] | None:
        try:
            mask = np.load(made / "kept.npy")
        except (FileNotFoundError, ValueError, EOFError):
            return None
        return mask if mask.shape == (samples.samples,) and mask.dtype == np.bool_ else None

    return open_or_make(place, "rows that a filter keeps", opened, build)


def _asked(samples: SampleSet, stage: StageConfig, keep: Filter) -> npt.NDArray[np.bool_]:
    kept = np.zeros(samples.samples, np.bool_)
    for first in range(0, samples.samples, CHUNK_ROWS):
        some = np.arange(first, min(samples.samples, first + CHUNK_ROWS))
        rows, documents = samples.rows(some), samples.documents(some)
        for at, sample in enumerate(some.tolist()):
            try:
                kept[sample] = bool(keep(rows[at], None if documents is None else documents[at]))
            except Exception as error:
                raise DataError(
                    f"{_key(stage)}: {stage.filter} raises {one_line(error)} for row {sample}"
                ) from error
    return kept
