"""Dataset of a run: both splits, opened and checked from the config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data import batch
from picotron_ray.data.cache import VOCABULARY, byte_splits
from picotron_ray.data.memmap import SCAN_TOKENS, memmap_splits
from picotron_ray.data.plan.packed_cache import VERSION as PACKING_VERSION
from picotron_ray.data.plan.packed_cache import PackRequest, packed_rows
from picotron_ray.data.plan.packed_samples import PackedSamples
from picotron_ray.data.plan.sample_plan import Feed, SamplePlan, UniformPlan
from picotron_ray.data.samples import Dataset, SampleSet, Tokens
from picotron_ray.data.shuffle import ORDER_VERSION
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
    """

    train: SampleSet
    held_out: SampleSet
    fingerprint: str
    bigram_entropy: float
    plan: SamplePlan
    global_batch: int
    notes: tuple[str, ...] = ()

    @property
    def feed(self) -> Feed:
        """Training samples in the order in which the run feeds them."""
        return Feed(self.train, self.plan)

    def eval_batches(self, layout: Layout, dp_index: int, samples: int) -> list[batch.StepBatch]:
        """Cut one DP replica's part of the fixed held-out samples (``data.batch.eval_batches``)."""
        return batch.eval_batches(self.held_out, layout, dp_index, samples, self.global_batch)


def build_dataset(data: DataConfig, model_vocab: int, seed: int, cache_dir: Path) -> DataSplits:
    """Read, tokenise (or find in the cache) and check the data of a run.

    Args:
        data: the config's section.
        model_vocab: ``model.vocab_size``; every token id must be below it.
        seed: order of samples.
        cache_dir: a folder of this node for token caches, shared by its workers.

    Raises:
        DataError: one line, when the data is missing, unreadable, empty, shorter than one sample per
            split, or beyond the vocabulary.
    """
    if data.source == "memmap":
        splits = memmap_splits(data, model_vocab, cache_dir)
    elif model_vocab < VOCABULARY:
        raise DataError(
            f"model.vocab_size: {model_vocab} is less than the {VOCABULARY} ids of the byte tokenizer that"
            f" data.source {data.source} uses (256 bytes, end of document); set it to at least {VOCABULARY}"
        )
    else:
        splits = byte_splits(data, cache_dir)
    packed = data.batching == "packed"
    for name, tokens in () if packed else (("training", splits.train), ("held-out", splits.held_out)):
        if len(tokens) <= data.sequence_length:
            raise DataError(
                f"data.path: the {name} part has {len(tokens)} tokens, but one sample needs"
                f" {data.sequence_length + 1}; give more data, a smaller data.sequence_length, or another"
                f" data.held_out_fraction than {data.held_out_fraction}"
            )
    train_mask, held_mask = splits.masks or (None, None)
    for name, mask in (("training", train_mask), ("held-out", held_mask)):
        if mask is not None and not _any_counts(mask):
            raise DataError(
                f"data.loss_mask: nothing of the {name} part counts in the loss; give more data, or another"
                f" data.held_out_fraction than {data.held_out_fraction}"
            )
    identity = f"{splits.digest}/{data.sequence_length}/{seed}/{ORDER_VERSION}"
    train: SampleSet = Dataset(splits.train, data.sequence_length, train_mask)
    held: SampleSet = Dataset(splits.held_out, data.sequence_length, held_mask)
    notes: tuple[str, ...] = ()
    if packed:
        identity += f"/packed/{data.long_documents}/{PACKING_VERSION}"
        request = PackRequest(splits.digest, end_of(data), data.sequence_length, seed, data.long_documents)
        train = _packed("training", splits.train, train_mask, request, cache_dir)
        held_request = replace(request, digest=f"{splits.digest} held out", seed=batch.EVALUATION_SEED)
        held = _packed("held-out", splits.held_out, held_mask, held_request, cache_dir)
        notes = (train.told(),)
    return DataSplits(
        train=train,
        held_out=held,
        fingerprint=xxhash.xxh3_128_hexdigest(identity.encode()),
        bigram_entropy=splits.bigram_entropy,
        plan=UniformPlan(seed, data.global_batch, train.samples),
        global_batch=data.global_batch,
        notes=notes,
    )


def _packed(
    name: str, tokens: Tokens, mask: Tokens | None, request: PackRequest, cache_dir: Path
) -> PackedSamples:
    """Pack a part of the data into rows."""
    pieces, rows = packed_rows(tokens, request, cache_dir)
    found = PackedSamples(tokens, request.sequence_length, pieces, rows, request.end, mask)
    if mask is not None and not any(found.totals(np.array([row]))[1] for row in range(found.samples)):
        raise DataError(f"data.loss_mask: nothing of the {name} part counts in the loss of a packed row")
    return found


def end_of(data: DataConfig) -> int:
    """Token id that ends a document. Raises DataError where token files do not say."""
    if data.document_end is None:
        raise DataError("data.end_token: saw null, expected the id that ends a document in these token files")
    return data.document_end


def _any_counts(mask: Tokens) -> bool:
    """Whether some token counts, by looking as far as the first that does. Not at the first token of all."""
    return any(mask[at : at + SCAN_TOKENS].any() for at in range(1, len(mask), SCAN_TOKENS))
