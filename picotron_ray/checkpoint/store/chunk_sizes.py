"""Sizes of the chunks that a commit names, without a look at what else lies in storage.

A commit of a large model names a hundred thousand chunks, and beside them may lie as much that is not deleted
yet. To ask for each takes minutes on S3, to list all of them as long on a mount. So it goes folder by folder,
several at a time: of a folder of which the commit names few chunks each is asked for, others are listed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.store.chunks import chunk_key

_THREADS = 8
FEW = 4  # chunks of a folder that are asked for one by one


class ChunkSizes:
    """Sizes of chunks by address; what was found out once is not asked again."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[str, int | None] = {}  # None: it is not there

    def of(self, addresses: Iterable[str]) -> Mapping[str, int]:
        """Return the sizes of those chunks that are there.

        Raises:
            StorageError: storage does not answer.
        """
        wanted = list(addresses)
        folders: dict[str, list[str]] = defaultdict(list)
        for address in wanted:
            if address not in self._known:
                folders[chunk_key(address).rpartition("/")[0] + "/"].append(address)
        threads = ThreadPoolExecutor(_THREADS)
        try:
            for found in threads.map(self._look, folders.items()):
                self._known |= found
        finally:
            threads.shutdown(cancel_futures=True)
        return {address: size for address in wanted if (size := self._known.get(address)) is not None}

    def _look(self, folder: tuple[str, list[str]]) -> dict[str, int | None]:
        prefix, addresses = folder
        found: dict[str, int | None] = dict.fromkeys(addresses)
        if len(addresses) <= FEW:
            return {address: self._storage.size(chunk_key(address)) for address in addresses}
        found |= {entry.key.rpartition("/")[2]: entry.size for entry in self._storage.list(prefix)}
        return found
