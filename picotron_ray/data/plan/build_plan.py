"""Plan of a run, built from its config and the samples of its sources."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import xxhash

from picotron_ray.config.schema.curriculum import SCORED
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.support.mixture import CYCLE, shares_by_step
from picotron_ray.data.plan.advance_rule import AdvanceRule, Starts
from picotron_ray.data.plan.curriculum import CURRICULUM_VERSION, StagedOrder, planned_starts
from picotron_ray.data.plan.difficulty import RankRequest
from picotron_ray.data.plan.mixture import MIXTURE_VERSION, Mixture, MixturePlan, Stretch
from picotron_ray.data.plan.order import SampleOrder, Shuffled
from picotron_ray.data.plan.pools import filter_digest, stage_pools
from picotron_ray.data.plan.sample_plan import SamplePlan, StagedPlan, UniformPlan
from picotron_ray.data.plan.score_files import scores_digest
from picotron_ray.data.shuffle import ORDER_VERSION, Index
from picotron_ray.data.source_samples import SourceSamples


def build_plan(
    data: DataConfig, model_vocab: int, seed: int, found: Sequence[SourceSamples], cache_dir: Path
) -> SamplePlan:
    """Plan which rows each step feeds.

    Args:
        model_vocab: ``model.vocab_size``, which says what a loss is worth.
        seed: of the run.
        found: samples of the sources, in the config's order.
        cache_dir: a folder of this node, for ranks of rows.
    """
    if not data.sources and not data.curriculum.stages:
        return UniformPlan(seed, data.global_batch, found[0].train.samples)
    seeds, mixture = source_seeds(data, seed), _mixture(data, seed)
    if not data.curriculum.stages:
        orders = tuple(Shuffled(own, of.train.samples) for own, of in zip(seeds, found, strict=True))
        return MixturePlan(data.global_batch, orders, mixture)
    pools = _pools(data, found, cache_dir)

    @lru_cache(maxsize=8)
    def made(starts: Starts) -> MixturePlan:
        firsts = [mixture.used(start * data.global_batch) for start in starts]
        staged: list[SampleOrder] = [
            StagedOrder(own, of.train.samples, mine, tuple(int(first[at]) for first in firsts))
            for at, (own, of, mine) in enumerate(zip(seeds, found, pools, strict=True))
        ]
        return MixturePlan(data.global_batch, tuple(staged), mixture)

    curriculum, widths = data.curriculum, data.curriculum.widths(data.sequence_length)
    if curriculum.advance == "auto":
        return StagedPlan(made, (0,), widths, AdvanceRule.of(curriculum, model_vocab))
    return StagedPlan(made, planned_starts(curriculum), widths)


def plan_words(data: DataConfig, seed: int, found: Sequence[SourceSamples]) -> str | list[object]:
    """Return what decides the rows, and so the run's fingerprint."""
    if not data.sources and not data.curriculum.stages:
        return f"{found[0].identity}/{data.sequence_length}/{seed}/{ORDER_VERSION}"
    names = [source.name for source in data.sources] or ["data"]
    parts = [(name, source.identity) for name, source in zip(names, found, strict=True)]
    words: list[object] = [parts, sorted(_shares(data).items()), data.sequence_length, seed, MIXTURE_VERSION]
    if data.curriculum.stages:
        digests = [filter_digest(stage) for stage in data.curriculum.stages]
        asked = data.curriculum.model_dump(exclude={"scores"})
        words += [asked, digests, _scores(data), CURRICULUM_VERSION]
    return words


def _scores(data: DataConfig) -> list[str]:
    """Return the digests of what was scored beforehand."""
    folder = _folder(data)
    if folder is None:
        return []
    names = [key.rpartition(".")[2] for key in data.named_sources]
    scored = [measure for measure in sorted(data.curriculum.measures) if measure in SCORED]
    return [scores_digest(folder, name, measure) for name in names for measure in scored]


def _folder(data: DataConfig) -> Path | None:
    return None if data.curriculum.scores is None else Path(data.curriculum.scores).expanduser()


def source_seeds(data: DataConfig, seed: int) -> tuple[int, ...]:
    """Return the seed of each source's order, which no other source changes."""
    if not data.sources:
        return (seed,)
    return tuple(xxhash.xxh3_64_intdigest(f"{seed}/{source.name}".encode()) >> 1 for source in data.sources)


def _shares(data: DataConfig) -> dict[int, tuple[int, ...]]:
    """Return the rows of each source in a cycle, by step."""
    return shares_by_step(data.sources) if data.sources else {0: (CYCLE,)}


def _mixture(data: DataConfig, seed: int) -> Mixture:
    stretches = (Stretch(step * data.global_batch, rows) for step, rows in _shares(data).items())
    return Mixture(seed, tuple(stretches))


def _pools(
    data: DataConfig, found: Sequence[SourceSamples], cache_dir: Path
) -> tuple[tuple[Index, ...], ...]:
    """Return the samples of each stage, source by source."""
    curriculum, folder, pools = data.curriculum, _folder(data), []
    for key, samples in zip(data.named_sources, found, strict=True):
        measures = tuple(sorted(curriculum.measures.items()))
        name = key.rpartition(".")[2]
        request = RankRequest(samples.identity, name, samples.end, measures, folder)
        pools.append(stage_pools(samples.train, curriculum, request, cache_dir))
    return tuple(pools)
