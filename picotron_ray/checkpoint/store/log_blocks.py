"""Blocks of a log: copies of many entries in one object each, so that a long log is read with few calls.

``log_blocks/<identity>/NNNNNNNN.jsonl`` holds ``BLOCK`` entries that follow one another, a line each, as they
lie in ``log/``. The entries stay what counts. A block is believed where it can say nothing else than they do:

- each of its entries is in the listing of the log, with the length of its line, and is no younger than it;
- its last line is what lies in the log there, read beside it. Entries carry a nonce, so that a log that was
  cut and written on does not end like the one that was copied;
- it is the run's own: ``identity`` is the nonce of the log's first entry;
- each line passes the check of an entry, its digest and number included.

A block that is missing, or fails in any of these, is as if it were not there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from picotron_ray.checkpoint.storage.base import JSON_BYTES, Storage, StoredObject, get_bounded
from picotron_ray.errors import CorruptError, NotFoundError

BLOCK = 256
"""Entries of a block. A week has about a hundred blocks, and less than one of entries that are in none."""
PREFIX = "log_blocks/"
_WRITE_BYTES = JSON_BYTES // 2  # more is left to the entries: a few generations of thousands of workers each

_IDENTITY = re.compile("[0-9a-f]{32}")


def numbers(block: int) -> range:
    """Entries of a block; the first block is 0, the first entry 1."""
    return range(block * BLOCK + 1, (block + 1) * BLOCK + 1)


def whole_blocks(entries: Iterable[int]) -> list[int]:
    """Blocks of which all entries are among some."""
    counts = Counter((seq - 1) // BLOCK for seq in entries)
    return sorted(block for block, count in counts.items() if count == BLOCK)


def stored_blocks(storage: Storage, identity: str, blocks: Iterable[int]) -> dict[int, StoredObject]:
    """Those of some blocks that storage has of a run, by number."""
    if not _IDENTITY.fullmatch(identity):
        return {}
    found = {entry.key: entry for entry in storage.list(f"{PREFIX}{identity}/")}
    return {block: found[key] for block in blocks if (key := _key(identity, block)) in found}


def read_block(
    storage: Storage, block: int, stored: StoredObject, listed: Mapping[int, StoredObject]
) -> list[bytes]:
    """Return a block's entries as they are stored in the log; none where the block is not to be believed.

    The caller decodes them, which checks digests and numbers.

    Args:
        listed: the log as storage lists it now, by number; all of the block's entries are there.
    """
    entries = [listed[seq] for seq in numbers(block)]
    if any(entry.mtime_s > stored.mtime_s for entry in entries):
        return []
    try:
        lines = get_bounded(storage, stored.key, JSON_BYTES).split(b"\n")
        if [len(line) for line in lines] != [entry.size for entry in entries]:
            return []
        return lines if get_bounded(storage, entries[-1].key, JSON_BYTES) == lines[-1] else []
    except (NotFoundError, CorruptError):
        return []


def write_block(storage: Storage, identity: str, block: int, lines: Sequence[bytes]) -> None:
    """Store the entries of a block, unless they are too large for one object or the run cannot be named.

    Raises:
        StorageError: storage does not take it. It is as if it had never been tried.
    """
    if _IDENTITY.fullmatch(identity) and sum(map(len, lines)) <= _WRITE_BYTES:
        storage.put(_key(identity, block), b"\n".join(lines))


def _key(identity: str, block: int) -> str:
    return f"{PREFIX}{identity}/{block:08d}.jsonl"
