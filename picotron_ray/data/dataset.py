"""Dataset of a run: both splits, opened and checked from the config."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.evaluate import EvaluateConfig
from picotron_ray.config.support.mixture import shares_by_step
from picotron_ray.data import batch
from picotron_ray.data.held_out_sets import HeldOutSet, held_out_sets
from picotron_ray.data.plan.mixed_samples import MixedSamples
from picotron_ray.data.plan.mixture import MIXTURE_VERSION, Mixture, MixturePlan, Stretch
from picotron_ray.data.plan.sample_plan import Feed, SamplePlan, UniformPlan
from picotron_ray.data.samples import SampleSet
from picotron_ray.data.shuffle import ORDER_VERSION
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
    if not data.sources:
        found = open_source("data", data, model_vocab, seed, cache_dir)
        plan: SamplePlan = UniformPlan(seed, data.global_batch, found.train.samples)
        identity = f"{found.identity}/{data.sequence_length}/{seed}/{ORDER_VERSION}"
        alone = _splits(data, found, plan, identity)
        return _with_sets(alone, data, evaluate, model_vocab, cache_dir)
    mixed = _mixed(data, model_vocab, seed, cache_dir)
    check_supply(data, mixed, steps)
    return _with_sets(mixed, data, evaluate, model_vocab, cache_dir)


def _with_sets(
    splits: DataSplits, data: DataConfig, evaluate: EvaluateConfig | None, model_vocab: int, cache_dir: Path
) -> DataSplits:
    if evaluate is None:
        return splits
    held = splits.held_out
    parts = held.parts if isinstance(held, MixedSamples) else ()
    return replace(splits, sets=held_out_sets(data, evaluate, parts, model_vocab, cache_dir))


def _splits(data: DataConfig, found: SourceSamples, plan: SamplePlan, identity: str) -> DataSplits:
    return DataSplits(
        train=found.train,
        held_out=found.held_out,
        fingerprint=xxhash.xxh3_128_hexdigest(identity.encode()),
        bigram_entropy=found.bigram_entropy,
        plan=plan,
        global_batch=data.global_batch,
        notes=found.notes,
    )


def _mixed(data: DataConfig, model_vocab: int, seed: int, cache_dir: Path) -> DataSplits:
    """Open all sources of a mixture, and plan which row is of which one."""
    seeds = tuple(_seed_of(seed, source.name) for source in data.sources)
    found = [
        open_source(key, data, model_vocab, own, cache_dir)
        for key, own in zip(data.named_sources, seeds, strict=True)
    ]
    shares = shares_by_step(data.sources)
    stretches = tuple(Stretch(step * data.global_batch, rows) for step, rows in shares.items())
    counts = tuple(source.train.samples for source in found)
    plan = MixturePlan(data.global_batch, seeds, counts, Mixture(seed, stretches))
    held, names = [source.held_out.samples for source in found], [source.name for source in data.sources]
    first = stretches[0].quotas
    joined = SourceSamples(
        MixedSamples(tuple(source.train for source in found), tuple(map(float, first))),
        MixedSamples(tuple(source.held_out for source in found), tuple(map(float, held))),
        "",
        sum(source.bigram_entropy * size for source, size in zip(found, held, strict=True)) / sum(held),
        tuple(f"{name}: {note}" for name, of in zip(names, found, strict=True) for note in of.notes),
    )
    parts = [(name, source.identity) for name, source in zip(names, found, strict=True)]
    words = [parts, sorted(shares.items()), data.sequence_length, seed, MIXTURE_VERSION]
    return _splits(data, joined, plan, json.dumps(words))


def _seed_of(seed: int, name: str) -> int:
    """Derive the seed of a source's order, which no other source changes."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1


def check_supply(data: DataConfig, splits: DataSplits, steps: int) -> None:
    """Raise DataError where a source that does not repeat has fewer rows than a run of ``steps`` needs."""
    plan = splits.plan
    if not isinstance(plan, MixturePlan):
        return
    for at, source in enumerate(data.sources):
        step = None if source.repeat else plan.dry_step(at, steps)
        if step is not None:
            raise DataError(
                f"data.sources.{source.name}: its {plan.counts[at]} rows last until step {step - 1} of"
                f" {steps}; give more data, a smaller weight or fewer steps, or say repeat=true"
            )
