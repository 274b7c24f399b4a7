"""Outline of prepared data: which sources are read, which files make which part, and what tells it apart."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import xxhash

from picotron_ray.config.schema.data import DataConfig, SourceConfig
from picotron_ray.data.cache import TextSource, cache_key
from picotron_ray.data.listing import find_files
from picotron_ray.data.prepare.part import PartJob, settings_key
from picotron_ray.data.source_samples import alone
from picotron_ray.errors import DataError

VERSION = 1
PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SourceOutline:
    """Source that is prepared.

    Fields:
        name: of the source; empty where the config has no list of them.
        data: of it alone.
        settings: hash of them (`settings_key`).
        files: identities of its files, in their order.
    """

    name: str
    data: DataConfig
    settings: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrepareOutline:
    """Outline of what is prepared.

    Fields:
        key: hash of all that decides the result.
        dedupe: whether a document whose tokens an earlier one has is left out.
    """

    key: str
    sources: tuple[SourceOutline, ...]
    dedupe: bool


def outline(data: DataConfig, dedupe: bool) -> PrepareOutline:
    """List what is to be read. Raises DataError where that is tokens already, or nothing."""
    sources, words = [], []
    for key, source in data.named_sources.items():
        if source.source == "memmap":
            raise DataError(
                f"{key}.source: saw memmap, whose tokens are there already; train from it as it is, or leave"
                " it out of what is prepared"
            )
        own = alone(key, data)
        files, text = find_files(own), TextSource.of(own)
        name = key.rpartition(".")[2] if data.sources else ""
        sources.append(SourceOutline(name, own, settings_key(text), tuple(file.identity() for file in files)))
        words.append([name, cache_key(text, files)])
    said = json.dumps([VERSION, dedupe, words])
    return PrepareOutline(xxhash.xxh3_128_hexdigest(said.encode()), tuple(sources), dedupe)


def grouped(files: tuple[str, ...], shards: int | None) -> list[list[int]]:
    """Group neighbouring files, of similar size together where that can be.

    Args:
        files: identities.
        shards: groups, or fewer; None: as `PART_BYTES` says.

    Returns the numbers of the files of each group.

    >>> grouped(("a\\0a\\x006\\x001", "b\\0b\\x001\\x001", "c\\0c\\x003\\x001"), 2)
    [[0], [1, 2]]
    """
    sizes = [max(1, _size(file)) for file in files]
    wanted = PART_BYTES if shards is None else -(-sum(sizes) // shards)
    groups: list[list[int]] = [[]]
    held = 0
    for at, size in enumerate(sizes):
        if held >= wanted:
            groups.append([])
            held = 0
        groups[-1].append(at)
        held += size
    return groups


def _size(identity: str) -> int:
    field = identity.split("\0")[2]
    return int(field) if field.isdigit() else 0


def part_jobs(found: PrepareOutline, groups: list[list[list[int]]], folder: Path) -> list[list[PartJob]]:
    """Make the jobs of each source's parts.

    Args:
        groups: of each source, as `grouped` has them.
        folder: which holds the parts.
    """
    return [
        [
            PartJob(
                source.data,
                (found.key, source.settings),
                tuple(source.files[at] for at in group),
                folder / f"{number:02}-{index:06}",
            )
            for index, group in enumerate(mine)
        ]
        for number, (source, mine) in enumerate(zip(found.sources, groups, strict=True))
    ]


def section(data: DataConfig, out: Path, forms: dict[str, dict[str, object]]) -> dict[str, object]:
    """Return the config's ``data`` that trains from what was prepared.

    Args:
        forms: by the name of a source, what is said of its files: dtype, end and masks.
    """
    others = set(SourceConfig.model_fields) | {"sources", "held_out_fraction"}
    if data.global_tokens is not None:
        others.add("global_batch")
    kept = {
        name: value
        for name, value in data.model_dump(mode="json", exclude_defaults=True).items()
        if name not in others
    }
    if not data.sources:
        return {"source": "memmap", "path": str(out), **forms[""], **kept}
    sources: list[dict[str, object]] = []
    for source in data.sources:
        own = source.model_dump(mode="json", include={"weight", "repeat"}, exclude_defaults=True)
        place = {"source": "memmap", "path": str(out / source.name)}
        sources.append({"name": source.name, **own, **place, **forms[source.name]})
    return {"sources": sources, **kept}
