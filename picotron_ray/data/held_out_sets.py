"""Held-out sets beside the part of a run's data: sources of their own, and parts of a mixture's sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from picotron_ray.config.schema.data import DataConfig, MixedSource, SourceConfig
from picotron_ray.config.schema.evaluate import EvaluateConfig, EvaluationSet
from picotron_ray.data.batch import EVALUATION_SEED
from picotron_ray.data.plan.mixed_samples import MixedSamples
from picotron_ray.data.samples import SampleSet
from picotron_ray.data.source_samples import open_source
from picotron_ray.errors import DataError


class HeldOutSet(NamedTuple):
    """Samples whose loss is told by itself.

    Fields:
        wanted: how many of them are evaluated; all where there are fewer.
    """

    name: str
    samples: SampleSet
    wanted: int


def held_out_sets(
    data: DataConfig,
    evaluate: EvaluateConfig | None,
    parts: Sequence[SampleSet],
    model_vocab: int,
    cache_dir: Path,
) -> tuple[HeldOutSet, ...]:
    """Open all sets, in the order of `config.support.evaluation.set_names`.

    Args:
        evaluate: None: there are none.
        parts: held-out samples of each source.

    Raises DataError, one line, as `data.dataset.build_dataset` does.
    """
    if evaluate is None:
        return ()
    own = [_open(one, data, model_vocab, cache_dir) for one in evaluate.sets]
    wanted = evaluate.source_samples
    named = zip(data.sources, parts, strict=True) if wanted and data.sources else ()
    return (*own, *(HeldOutSet(source.name, part, wanted) for source, part in named))


def _open(one: EvaluationSet, data: DataConfig, model_vocab: int, cache_dir: Path) -> HeldOutSet:
    """Open a set: all documents of its source, cut or packed as those of training."""
    fields = {name: getattr(one, name) for name in SourceConfig.model_fields}
    alone = data.model_copy(update={"sources": (MixedSource(name=one.name, **fields),)})
    there, key = f"data.sources.{one.name}", f"evaluate.sets.{one.name}"
    try:
        found = open_source(there, alone, model_vocab, EVALUATION_SEED, cache_dir)
    except DataError as error:
        raise DataError(str(error).replace(there, key, 1)) from None
    both = (found.train, found.held_out)
    shares = tuple(float(part.samples) for part in both)
    return HeldOutSet(one.name, MixedSamples(both, shares), one.samples)
