"""Dataset of a run: both splits, opened and checked from the config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.evaluate import EvaluateConfig
from picotron_ray.config.support.mixture import shares_by_step
from picotron_ray.data import batch
from picotron_ray.data.held_out_sets import HeldOutSet, held_out_sets
from picotron_ray.data.plan.advance import StageRecord
from picotron_ray.data.plan.build_plan import build_plan, source_seeds
from picotron_ray.data.plan.mixed_samples import MixedSamples
from picotron_ray.data.plan.mixture import MixturePlan
from picotron_ray.data.plan.sample_plan import Feed, SamplePlan, StagedPlan
from picotron_ray.data.samples import SampleSet
from picotron_ray.data.source_samples import SourceSamples, open_source
from picotron_ray.errors import DataError
from picotron_ray.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class DataSplits:
    """Training and held-out samples.

    Fields:
        train, held_out: the samples.
        fingerprint: 32 hex digits over the tokens of both parts, the sample length and the order: two
            workers (or two launches) with the same one feed the same samples in the same order.
        bigram_entropy: of the held-out tokens, nats per token; the baseline that evaluation is held to.
        plan: which rows each step feeds.
        global_batch: samples per step, the size of evaluation batches too.
        notes: what a user should know of how samples were made.
        sets: held-out samples whose loss is told by itself.
    """

    train: SampleSet
    held_out: SampleSet
    fingerprint: str
    bigram_entropy: float
    plan: SamplePlan
    global_batch: int
    notes: tuple[str, ...] = ()
    sets: tuple[HeldOutSet, ...] = ()

    @property
    def feed(self) -> Feed:
        """Training samples in the order in which the run feeds them."""
        return Feed(self.train, self.plan)

    def stage_record(self) -> StageRecord | None:
        """Make the record of a curriculum that the run itself advances; None: there is none."""
        rule = self.plan.rule if isinstance(self.plan, StagedPlan) else None
        return None if rule is None else StageRecord(rule)

    def eval_batches(self, layout: Layout, dp_index: int, samples: int) -> list[batch.StepBatch]:
        """Cut one DP replica's part of the fixed held-out samples (``data.batch.eval_batches``)."""
        return batch.eval_batches(self.held_out, layout, dp_index, samples, self.global_batch)

    def set_batches(self, layout: Layout, dp_index: int) -> list[list[batch.StepBatch]]:
        """Cut one DP replica's part of each of `sets`."""
        return [
            batch.eval_batches(one.samples, layout, dp_index, one.wanted, self.global_batch)
            for one in self.sets
        ]


def build_dataset(
    data: DataConfig,
    model_vocab: int,
    seed: int,
    cache_dir: Path,
    steps: int = 0,
    evaluate: EvaluateConfig | None = None,
) -> DataSplits:
    """Read, tokenise (or find in the cache) and check the data of a run.

    Args:
        data: the config's section.
        model_vocab: ``model.vocab_size``; every token id must be below it.
        seed: order of samples.
        cache_dir: a folder of this node for token caches, shared by its workers.
        evaluate: sets that are to be evaluated; None: none but the held-out part.
        steps: those that a run is to take, for which sources that do not repeat must last.

    Raises:
        DataError: one line, when the data is missing, unreadable, empty, shorter than one sample per
            split, beyond the vocabulary, or does not last.
    """
    found = [
        open_source(key, data, model_vocab, own, cache_dir)
        for key, own in zip(data.named_sources, source_seeds(data, seed), strict=True)
    ]
    joined = _joined(data, found) if data.sources else found[0]
    plan, words = build_plan(data, model_vocab, seed, found, cache_dir)
    text = words if isinstance(words, str) else json.dumps(words)
    splits = DataSplits(
        train=joined.train,
        held_out=joined.held_out,
        fingerprint=xxhash.xxh3_128_hexdigest(text.encode()),
        bigram_entropy=joined.bigram_entropy,
        plan=plan,
        global_batch=data.global_batch,
        notes=joined.notes + _left_out(data),
        sets=held_out_sets(data, evaluate, [source.held_out for source in found], model_vocab, cache_dir),
    )
    check_supply(data, splits, steps)
    return splits


def _left_out(data: DataConfig) -> tuple[str, ...]:
    """Say where a curriculum never feeds some of the rows."""
    stages = data.curriculum.stages
    if not stages or stages[-1].difficulty == 1:
        return ()
    share = 1 - stages[-1].difficulty
    return (
        f"the curriculum never feeds the hardest {share:.0%} of the rows: its last stage goes on to the end",
    )


def _joined(data: DataConfig, found: Sequence[SourceSamples]) -> SourceSamples:
    """Join the samples of a mixture's sources."""
    first = next(iter(shares_by_step(data.sources).values()))
    held, names = [source.held_out.samples for source in found], [source.name for source in data.sources]
    return SourceSamples(
        MixedSamples(tuple(source.train for source in found), tuple(map(float, first))),
        MixedSamples(tuple(source.held_out for source in found), tuple(map(float, held))),
        "",
        sum(source.bigram_entropy * size for source, size in zip(found, held, strict=True)) / sum(held),
        tuple(f"{name}: {note}" for name, of in zip(names, found, strict=True) for note in of.notes),
    )


def check_supply(data: DataConfig, splits: DataSplits, steps: int) -> None:
    """Raise DataError where a source that does not repeat has fewer rows than a run of ``steps`` needs."""
    plan = splits.plan
    if not isinstance(plan, MixturePlan):
        return
    for at, source in enumerate(data.sources):
        step = None if source.repeat else plan.dry_step(at, steps)
        if step is not None:
            raise DataError(
                f"data.sources.{source.name}: its {plan.orders[at].count} rows last until step {step - 1} of"
                f" {steps}; give more data, a smaller weight or fewer steps, or say repeat=true"
            )
