"""Rules of tokenizers, chats, gaps to fill in, tables and URLs of data."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.data import SourceConfig
from picotron_ray.config.schema.documents import S3Access
from picotron_ray.config.schema.job import JobConfig

ROWS = ("jsonl", "parquet", "arrow", "hf")
"""Sources whose documents are rows with keys."""


def _tokenizer(job: JobConfig) -> Iterator[Problem]:
    given = job.data.tokenizer
    if given is not None and (not given or "://" in given):
        text = f"saw {given!r}, expected the path of a tokenizer.json, or of a folder with one"
        yield Problem("data.tokenizer", f"{text}, that every node can read", ())


def _chats(job: JobConfig) -> Iterator[Problem]:
    for at, source in job.data.named_sources.items():
        yield from _chat_of(job, at, source)


def _chat_of(job: JobConfig, at: str, source: SourceConfig) -> Iterator[Problem]:
    key, named = f"{at}.chat_template", f"{at}.source"
    if source.chat_template is None:
        if source.messages_key != SourceConfig().messages_key:
            text = f"saw {source.messages_key!r} without {key}, which says what chats become; name one,"
            yield Problem(f"{at}.messages_key", f"{text} or drop it", (key,))
        return
    if source.source not in ROWS:
        text = f"saw one with {named}={source.source}, which has no rows; use {', '.join(ROWS)}, or drop it"
        yield Problem(key, text, (named,))
    if source.chat_template == "tokenizer" and job.data.tokenizer is None:
        text = "saw tokenizer without data.tokenizer; name one that comes with a template, or a file of Jinja"
        yield Problem(key, text, ("data.tokenizer",))
    for name in ("prompt_key", "spans_key"):
        if getattr(source, name) is not None:
            text = f"saw {getattr(source, name)!r} with {key}, which says itself what answers are; drop one"
            yield Problem(f"{at}.{name}", text, (key,))


def _middles(job: JobConfig) -> Iterator[Problem]:
    for at, source in job.data.named_sources.items():
        key = f"{at}.fill_in_the_middle"
        if source.fill_in_the_middle is None:
            continue
        if source.source == "memmap":
            text = f"saw one with {at}.source=memmap, whose tokens are there already; drop it"
            yield Problem(key, text, (f"{at}.source",))
        elif job.data.tokenizer is None:
            text = "saw one without data.tokenizer; bytes have no tokens for it: name a tokenizer, or drop it"
            yield Problem(key, text, ("data.tokenizer",))
        if job.data.long_documents == "truncate":
            text = "saw one with data.long_documents=truncate, which would cut off the middles at the end of"
            yield Problem(key, f"{text} long documents; say split or drop", ("data.long_documents",))
        for other in ("chat_template", "loss_mask"):
            if getattr(source, other):
                text = f"saw one with {at}.{other}, whose text must stay in order; drop one of them"
                yield Problem(key, text, (f"{at}.{other}",))


def _places(job: JobConfig) -> Iterator[Problem]:
    """URLs are for text and rows of files; split is hf's; s3 is for s3://."""
    for at, source in job.data.named_sources.items():
        key, named, url = f"{at}.path", f"{at}.source", source.path if "://" in (source.path or "") else None
        if url and source.source == "memmap":
            text = f"saw a URL with {named}=memmap, which is read in place; copy it to a path of every node"
            yield Problem(key, text, (named,))
        if url and source.source == "hf":
            text = f"saw a URL with {named}=hf; give a folder of save_to_disk or a name on the hub, or say"
            yield Problem(key, f"{text} {named}=parquet", (named,))
        if source.split != SourceConfig().split and source.source != "hf":
            text = f"saw {source.split!r} with {named}={source.source}, which has none; drop it"
            yield Problem(f"{at}.split", text, (named,))
        if source.s3 != S3Access() and not (url or "").startswith("s3://"):
            text = f"saw one, but {key} is no s3:// URL; drop it"
            yield Problem(f"{at}.s3", text, (key,))


RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (_tokenizer, _chats, _middles, _places)
