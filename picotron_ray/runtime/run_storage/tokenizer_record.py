"""The tokenizer that a run keeps of its data: written into exports, for whoever has no copy of it.

``tokenizer/`` of the run holds ``tokenizer.json`` and what lay beside it, as they were at the first launch,
and ``record.json`` with their digests and the id that ends a document. The file's digest is part of the
data's fingerprint, so that no launch goes on with another one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from blake3 import blake3

from picotron_ray.checkpoint.storage.base import Storage, decode_json, encode_json, get_or_none
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.tokenizer import BESIDE, FILE, MOST_BYTES, FileTokenizer, open_tokenizer
from picotron_ray.errors import AlreadyExistsError, CorruptError, DataError
from picotron_ray.runtime.run_storage.kept_files import read_kept

log = logging.getLogger(__name__)
PREFIX = "tokenizer/"
RECORD = f"{PREFIX}record.json"


@dataclass(frozen=True, slots=True)
class KeptTokenizer:
    """Files of a tokenizer by name, and the id that ends a document."""

    files: dict[str, bytes]
    end: int | None

    @property
    def digest(self) -> str:
        """Digest of ``tokenizer.json``: blake3 in hex."""
        return blake3(self.files[FILE]).hexdigest()


def keep_tokenizer(storage: Storage, job: JobConfig) -> None:
    """Put the tokenizer of a run's data into its storage, once; where this node has none, the log says so."""
    if job.data.tokenizer is None or get_or_none(storage, RECORD) is not None:
        return
    try:
        found = open_tokenizer(job.data)
    except DataError as error:
        log.warning("the run keeps no tokenizer for exports: %s", error)
        return
    assert isinstance(found, FileTokenizer)
    for name, data in found.files.items():
        storage.put(PREFIX + name, data)
    digests = {name: blake3(data).hexdigest() for name, data in found.files.items()}
    try:
        storage.put_if_absent(RECORD, encode_json({"end": found.end_id, "files": digests}))
    except AlreadyExistsError:
        log.debug("another launch kept the same tokenizer")


def load_tokenizer(storage: Storage) -> KeptTokenizer | None:
    """Load what a run keeps; None where its data had no tokenizer.

    Raises CorruptError for a file that is missing or not what was stored.
    """
    data = get_or_none(storage, RECORD)
    if data is None:
        return None
    record = decode_json(RECORD, data)
    try:
        files = {
            name: read_kept(storage, PREFIX + name, str(digest), RECORD, MOST_BYTES)
            for name, digest in record["files"].items()
        }
        return KeptTokenizer({name: files[name] for name in (FILE, *BESIDE) if name in files}, record["end"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{RECORD} is malformed: {error!r}", where=RECORD) from error
