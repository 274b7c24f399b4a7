"""Plan of a run, built from its config and the samples of its sources."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import xxhash

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.support.mixture import CYCLE, shares_by_step
from picotron_ray.data.plan.advance_rule import AdvanceRule, Starts
from picotron_ray.data.plan.curriculum import CURRICULUM_VERSION, StagedOrder, planned_starts
from picotron_ray.data.plan.difficulty import RankRequest
from picotron_ray.data.plan.mixture import MIXTURE_VERSION, Mixture, MixturePlan, Stretch
from picotron_ray.data.plan.order import SampleOrder, Shuffled
from picotron_ray.data.plan.pools import stage_pools
from picotron_ray.data.plan.sample_plan import SamplePlan, StagedPlan, UniformPlan
from picotron_ray.data.shuffle import ORDER_VERSION
from picotron_ray.data.source_samples import SourceSamples

Words = str | list[object]
"""What decides rows: as text, or as JSON has it."""


def build_plan(
    data: DataConfig, model_vocab: int, seed: int, found: Sequence[SourceSamples], cache_dir: Path
) -> tuple[SamplePlan, Words]:
    """Plan which rows each step feeds.

    Args:
        model_vocab: ``model.vocab_size``, which says what a loss is worth.
        seed: of the run.
        found: samples of the sources, in the config's order.
        cache_dir: a folder of this node, for ranks of rows.

    Returns: the plan, and what decides its rows, for the run's fingerprint.
    """
    if not data.sources and not data.curriculum.stages:
        words = f"{found[0].identity}/{data.sequence_length}/{seed}/{ORDER_VERSION}"
        return UniformPlan(seed, data.global_batch, found[0].train.samples), words
    if data.curriculum.stages:
        return _staged(data, model_vocab, seed, found, cache_dir)
    seeds = source_seeds(data, seed)
    orders = tuple(Shuffled(own, of.train.samples) for own, of in zip(seeds, found, strict=True))
    return MixturePlan(data.global_batch, orders, _mixture(data, seed)), _mixed_words(data, seed, found)


def _staged(
    data: DataConfig, model_vocab: int, seed: int, found: Sequence[SourceSamples], cache_dir: Path
) -> tuple[StagedPlan, Words]:
    """Plan the stages of a curriculum."""
    seeds, mixture, curriculum = source_seeds(data, seed), _mixture(data, seed), data.curriculum
    both = [
        stage_pools(of.train, curriculum, _request(data, key, of), cache_dir)
        for key, of in zip(data.named_sources, found, strict=True)
    ]

    @lru_cache(maxsize=8)
    def made(starts: Starts) -> MixturePlan:
        firsts = [mixture.used(start * data.global_batch) for start in starts]
        staged: list[SampleOrder] = [
            StagedOrder(own, of.train.samples, pools, tuple(int(first[at]) for first in firsts))
            for at, (own, of, (pools, _)) in enumerate(zip(seeds, found, both, strict=True))
        ]
        return MixturePlan(data.global_batch, tuple(staged), mixture)

    widths = curriculum.widths(data.sequence_length)
    rule = AdvanceRule.of(curriculum, model_vocab) if curriculum.advance == "auto" else None
    plan = StagedPlan(made, planned_starts(curriculum) if rule is None else (0,), widths, rule)
    lasting = [(stage.steps, stage.difficulty, stage.sequence_length) for stage in curriculum.stages]
    decided = None if rule is None else [rule.vocabulary, rule.performance, rule.adaptation, rule.window]
    words = [lasting, decided, [digests for _, digests in both], CURRICULUM_VERSION]
    return plan, [*_mixed_words(data, seed, found), *words]


def _mixed_words(data: DataConfig, seed: int, found: Sequence[SourceSamples]) -> list[object]:
    names = [source.name for source in data.sources] or ["data"]
    parts = [(name, source.identity) for name, source in zip(names, found, strict=True)]
    return [parts, sorted(_shares(data).items()), data.sequence_length, seed, MIXTURE_VERSION]


def _request(data: DataConfig, key: str, of: SourceSamples) -> RankRequest:
    """Say how a source's samples are ranked."""
    scores, measures = data.curriculum.scores, tuple(sorted(data.curriculum.measures.items()))
    folder = None if scores is None else Path(scores).expanduser()
    return RankRequest(of.identity, key.rpartition(".")[2], of.end, measures, folder)


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
