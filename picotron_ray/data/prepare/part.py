"""Parts of prepared data: documents of some input files as tokens, in a folder that is whole or not there.

A folder holds ``u16`` or ``u32`` (tokens), ``mask`` where only some count, ``ends``, ``held`` (a byte per
document: 1 where it is held out), ``hashes`` (16 bytes per document, of its tokens and of what counts) and
``manifest.json`` with counts and each file's size and digest. It is written beside its place and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.cache import TextSource
from picotron_ray.data.listing import find_files
from picotron_ray.data.source_files import InputFile, shown
from picotron_ray.data.sources import read_documents
from picotron_ray.data.split_writer import END, MASK, CacheForm, SideWriter, held_out
from picotron_ray.data.tokenise import Encoder
from picotron_ray.errors import DataError

HASH = np.dtype("<u8")
READ_BYTES = 16 << 20
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class PartJob:
    """Job of one task: which files become which part.

    Fields:
        data: of one source, by itself.
        key: of the outline, and of the source's settings (`settings_key`).
        files: identities of the files, in their order.
        place: the part's folder.
    """

    data: DataConfig
    key: tuple[str, str]
    files: tuple[str, ...]
    place: Path


@dataclass(frozen=True, slots=True)
class PartCounts:
    """Counts of a part that is written."""

    documents: int
    tokens: int


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """Part that is written, memory-mapped.

    Fields:
        streams: tokens, and mask where there is one, by their suffix in a token cache (`CacheForm.kinds`).
        ends: where each document ends (exclusive).
        held: of each document, 1 where it is held out.
        hashes: of each document, ``[documents, 2]``.
        end_ids: tokens that are the id that ends a document.
    """

    streams: dict[str, Any]
    ends: npt.NDArray[np.int64]
    held: npt.NDArray[np.uint8]
    hashes: npt.NDArray[np.uint64]
    end_ids: int


def part_form(source: TextSource) -> CacheForm:
    """Return the form of a part's tokens: with the ends of documents, always."""
    return source.form._replace(ended=True)


def write_part(job: PartJob) -> PartCounts:
    """Write a part where it is not there.

    Raises DataError for files that cannot be read or changed since they were listed, OSError where the part
    cannot be written.
    """
    if (known := read_counts(job.place)) is not None:
        return known
    fresh = job.place.with_name(f".{job.place.name}.{socket.gethostname()}.{os.getpid()}")
    fresh.mkdir(parents=True)
    try:
        _fill(job, fresh)
        if not job.place.exists():  # another task of this part was faster: its bytes are the same
            fresh.rename(job.place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    found = read_counts(job.place)
    assert found is not None
    return found


def _fill(job: PartJob, folder: Path) -> None:
    source = opened(job.data, job.key)
    files, form = _files(job), part_form(source)
    held: list[bool] = []
    with ExitStack() as stack:
        streams = {kind: stack.enter_context((folder / kind).open("wb")) for kind in form.kinds}
        side = SideWriter(form, dict(streams))
        for piece in Encoder(job.data, source.tokenizer).pieces(read_documents(job.data, files, source.chat)):
            if side.add(piece):
                held.append(held_out(piece.key, job.data.held_out_fraction))
    for file, before in zip(files, job.files, strict=True):
        if file.identity() != before:
            raise _changed(before)
    np.array(held, MASK).tofile(folder / "held")
    tokens, *masks = (_map(folder / kind, dtype) for kind, dtype in form.kinds.items() if kind != "ends")
    ends = np.fromfile(folder / "ends", END)
    document_digests(tokens, masks[0] if masks else None, ends).tofile(folder / "hashes")
    meta = {
        "documents": len(ends),
        "tokens": len(tokens),
        "end_ids": sum(
            int((tokens[at : at + READ_BYTES] == form.end).sum()) for at in range(0, len(tokens), READ_BYTES)
        ),
        "files": {path.name: [path.stat().st_size, file_digest(path)] for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(meta) + "\n", "utf-8")


def document_digests(tokens: Any, mask: Any, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return xxh3_128 of each document's tokens, and of what of them counts: ``[documents, 2]``."""
    found = np.empty((len(ends), 2), HASH)
    first = 0
    for at, last in enumerate(ends.tolist()):
        hasher = xxhash.xxh3_128(np.ascontiguousarray(tokens[first:last]).data)
        if mask is not None:
            hasher.update(np.ascontiguousarray(mask[first:last]).data)
        found[at] = divmod(hasher.intdigest(), 1 << 64)
        first = last
    return found


@lru_cache(maxsize=8)
def opened(data: DataConfig, key: tuple[str, str]) -> TextSource:
    """Open a source's tokenizer and template, once per process and outline.

    Raises DataError where they are not those of the outline.
    """
    source = TextSource.of(data)
    if settings_key(source) != key[1]:
        raise DataError(
            f"data.tokenizer: the tokenizer or chat template of {socket.gethostname()} is not that which the"
            " command began with; copy the same files to every node"
        )
    return source


def settings_key(source: TextSource) -> str:
    """Hash all that decides a source's tokens, but for its files."""
    return xxhash.xxh3_128_hexdigest(json.dumps(source.settings()).encode())


@lru_cache(maxsize=8)
def _listed(data: DataConfig, key: tuple[str, str]) -> dict[str, InputFile]:
    return {file.identity(): file for file in find_files(data)}


def _files(job: PartJob) -> Sequence[InputFile]:
    known = _listed(job.data, job.key)
    for identity in job.files:
        if identity not in known:
            raise _changed(identity)
    return [known[identity] for identity in job.files]


def _changed(identity: str) -> DataError:
    place, name, *_ = identity.split("\0")
    return DataError(
        f"data.path: {name} (of {shown(place)}) changed since the files were listed; start again when nobody"
        " writes it"
    )


def read_counts(place: Path) -> PartCounts | None:
    """Read the counts of a part; None where it is not there."""
    try:
        meta = json.loads((place / MANIFEST).read_text("utf-8"))
        return PartCounts(int(meta["documents"]), int(meta["tokens"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def whole(place: Path) -> bool:
    """Whether a part is there with the bytes that its manifest says."""
    try:
        files = json.loads((place / MANIFEST).read_text("utf-8"))["files"]
        return all(
            (place / name).stat().st_size == size and file_digest(place / name) == digest
            for name, (size, digest) in files.items()
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def open_part(place: Path, form: CacheForm) -> WrittenPart:
    """Map a part that is there."""
    streams = {kind: _map(place / kind, dtype) for kind, dtype in form.kinds.items() if kind != "ends"}
    meta = json.loads((place / MANIFEST).read_text("utf-8"))
    return WrittenPart(
        streams,
        _map(place / "ends", END),
        _map(place / "held", MASK),
        _map(place / "hashes", HASH).reshape(-1, 2),
        int(meta["end_ids"]),
    )


def _map(path: Path, kind: np.dtype[Any]) -> Any:
    return np.memmap(path, kind, "r") if path.stat().st_size else np.empty(0, kind)


def file_digest(path: Path) -> str:
    """xxh3_128 of a file's bytes, in hex."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while piece := stream.read(READ_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()
