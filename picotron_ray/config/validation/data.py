"""Rules of the data: each source has what it needs, and nothing that it does not know."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.data import END_OF_DOCUMENT, MixedSource, SourceConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.mixture import MOST_SOURCES, quotas, weight_at
from picotron_ray.config.validation.documents import ROWS

BYTE_VOCABULARY = END_OF_DOCUMENT + 1  # 256 byte values and the end of a document


def _every_source(job: JobConfig) -> dict[str, SourceConfig]:
    """Sources of training, and of evaluation."""
    return {**job.data.named_sources, **job.evaluate.named_sources}


def _source(job: JobConfig) -> Iterator[Problem]:
    for at, source in _every_source(job).items() if not job.meta.on else ():
        yield from _source_of(job, at, source)


def _source_of(job: JobConfig, at: str, source: SourceConfig) -> Iterator[Problem]:
    vocabulary, named = job.model.vocab_size, f"{at}.source"
    if source.source == "stdlib" and source.path is not None:
        text = f"saw a path with {named}=stdlib, which reads none; say {named}=text (jsonl, memmap), or"
        yield Problem(f"{at}.path", f"{text} drop it", (named,))
    if source.source != "stdlib" and not source.path:
        what = "a file or folder of token ids" if source.source == "memmap" else "a file, folder or glob"
        text = f"saw nothing, expected {what} for {named}={source.source}; say {at}.path=..."
        yield Problem(f"{at}.path", text, (named,))
    if source.source != "memmap" and job.data.tokenizer is None and vocabulary < BYTE_VOCABULARY:
        yield Problem(
            "model.vocab_size",
            f"saw {vocabulary}, expected at least {BYTE_VOCABULARY} (256 bytes and end of document) for"
            f" {named}={source.source}",
            (named,),
        )


def _loss_mask(job: JobConfig) -> Iterator[Problem]:
    for at, source in _every_source(job).items():
        yield from _mask_of(at, source)


def _mask_of(at: str, source: SourceConfig) -> Iterator[Problem]:
    keys, named, masked = (f"{at}.prompt_key", f"{at}.spans_key"), f"{at}.source", f"{at}.loss_mask"
    given = [key for key in keys if getattr(source, key.rpartition(".")[2]) is not None]
    if source.loss_mask and source.source not in ("memmap", *ROWS):
        text = f"saw true with {named}={source.source}, which has no masks; use jsonl or memmap, or drop it"
        yield Problem(masked, text, (named,))
    for key in given:
        name = getattr(source, key.rpartition(".")[2])
        if source.source not in ROWS:
            text = f"saw {name!r} with {named}={source.source}, whose documents have no keys; drop it"
            yield Problem(key, text, (named,))
        elif not source.loss_mask:
            text = f"saw {name!r} with {masked}=false, where all tokens count; say {masked}=true,"
            yield Problem(key, f"{text} or drop it", (masked,))
        elif name == source.text_key:
            text = f"saw {name!r}, which is {at}.text_key too; name another key of the records, or drop it"
            yield Problem(key, text, (f"{at}.text_key",))
    if source.source in ROWS and source.loss_mask and source.chat_template is None and len(given) != 1:
        seen = f"neither {keys[0]} nor {keys[1]}" if not given else f"both {keys[0]} and {keys[1]}"
        text = f"saw true with {seen}, expected the one that says which tokens of a record count"
        yield Problem(masked, text, (named, *keys))


def _documents(job: JobConfig) -> Iterator[Problem]:
    data = job.data
    asking, seen = data.asks_apart
    if data.keeps_documents_apart and job.model.builder is not None:
        text = f"saw {seen}; a model of your own attends as it was built: leave it out"
        yield Problem(asking, text, ("model.builder",))
    if data.long_documents is not None and data.batching == "fixed":
        text = f"saw {data.long_documents} with data.batching={data.batching}, whose rows part documents"
        yield Problem("data.long_documents", f"{text} wherever they end; drop it", ("data.batching",))
    for at, source in _every_source(job).items():
        yield from _end_of(job, at, source)
    own = END_OF_DOCUMENT if data.tokenizer is None else "the tokenizer's"
    ends = {s.end_token if s.source == "memmap" else own for s in _every_source(job).values()}
    if data.document_masks and data.batching == "fixed" and len(ends) > 1:
        text = f"saw true with sources whose documents end with other ids ({', '.join(map(str, ends))});"
        yield Problem("data.document_masks", f"{text} say data.batching=packed", ("data.sources",))


def _end_of(job: JobConfig, at: str, source: SourceConfig) -> Iterator[Problem]:
    end, vocabulary, (asking, seen) = source.end_token, job.model.vocab_size, job.data.asks_apart
    key, named = f"{at}.end_token", f"{at}.source"
    if source.source != "memmap" and job.data.tokenizer is None:
        if end is not None:
            text = f"saw {end} with {named}={source.source}, which ends documents by itself; drop it"
            yield Problem(key, text, (named,))
    elif end is None:
        if job.data.finds_documents and source.source == "memmap":
            text = f"saw null with {asking}={seen}; say which id ends a document in these token files"
            yield Problem(key, text, (named, asking))
    elif end >= vocabulary:
        text = f"saw {end}, expected an id below model.vocab_size={vocabulary}"
        yield Problem(key, text, (named, "model.vocab_size"))


def _batching(job: JobConfig) -> Iterator[Problem]:
    data, named = job.data, "data.batching"
    rows, tokens = data.global_batch, data.global_tokens
    if tokens is not None and tokens != rows * data.sequence_length:
        length = data.sequence_length
        text = f"saw {tokens}, expected global_batch={rows} rows of {length} tokens; "
        whole = tokens >= length and tokens % length == 0
        text += f"say data.global_batch={tokens // length}" if whole else f"give a multiple of {length}"
        text += ", or leave data.global_batch out"
        yield Problem("data.global_tokens", text, ("data.sequence_length", "data.global_batch"))
    if data.buckets and data.batching != "buckets":
        text = f"saw {list(data.buckets)} with {named}={data.batching}; say {named}=buckets, or drop them"
        yield Problem("data.buckets", text, (named,))
    room = data.sequence_length + 1
    rising = list(data.buckets) == sorted(set(data.buckets))
    if data.buckets and not (rising and data.buckets[0] >= 2 and data.buckets[-1] <= room):
        text = f"saw {list(data.buckets)}, expected ascending slots of 2 to {room} tokens"
        yield Problem("data.buckets", f"{text} (data.sequence_length + 1)", ("data.sequence_length",))
    if data.max_batch_size is not None and data.batching == "fixed":
        text = f"saw {data.max_batch_size} with {named}=fixed, whose rows are no documents; say"
        yield Problem("data.max_batch_size", f"{text} data.global_batch instead", (named,))
    elif data.max_batch_size is not None and data.max_batch_size < rows:
        text = f"saw {data.max_batch_size}, expected at least data.global_batch={rows}: each row holds one"
        yield Problem("data.max_batch_size", text, ("data.global_batch",))


def _mixture(job: JobConfig) -> Iterator[Problem]:
    sources = job.data.sources
    if not sources:
        return
    own = SourceConfig()
    for name in SourceConfig.model_fields:
        if getattr(job.data, name) != getattr(own, name):
            text = f"saw {getattr(job.data, name)!r} with data.sources, of which each has its own; drop it"
            yield Problem(f"data.{name}", text, ("data.sources",))
    if len(sources) > MOST_SOURCES:
        yield Problem("data.sources", f"saw {len(sources)}, expected at most {MOST_SOURCES}", ())
    wrong = [problem for source in sources for problem in _weights_of(source)]
    names = [source.name for source in sources]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield Problem("data.sources", f"saw the name {twice[0]} twice, expected each once", ())
    yield from wrong
    if not wrong:
        for step in sorted({step for source in sources for step in source.weights}):
            held = [weight_at(source, step) for source in sources]
            try:
                quotas(held)
            except ValueError as error:
                yield Problem("data.sources", f"{error}, from step {step + 1} on; give larger weights", ())


def _weights_of(source: MixedSource) -> Iterator[Problem]:
    key, weights = f"data.sources.{source.name}.weight", source.weights
    for weight in weights.values():
        if not (math.isfinite(weight) and weight > 0):
            yield Problem(key, f"saw {weight:g}, expected more than 0; leave the source out instead", ())
    if not isinstance(source.weight, float) and len(weights) < len(source.weight):
        yield Problem(key, f"saw steps {[step for step, _ in source.weight]}, expected each once", ())
    if 0 not in weights:
        yield Problem(key, f"saw weights from steps {list(weights)} on, expected one from 0 on", ())
    elif min(weights) < 0:
        yield Problem(key, f"saw step {min(weights)}, expected steps from 0 on", ())


RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (
    _source,
    _loss_mask,
    _documents,
    _batching,
    _mixture,
)
