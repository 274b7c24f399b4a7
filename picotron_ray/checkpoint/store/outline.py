"""Outlines of manifests: the little that commits and collections need of them, kept by digest. Torch-free.

A manifest of 100,000 chunks takes seconds of Python to parse and 100 MB to hold. The next commit needs its
step and ledger, a collection the names of its chunks: 32 bytes each. The digest in the log says that a
manifest is the one whose outline is known; so it is parsed once, or never where it was assembled.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.checkpoint.store.manifest import (
    Identity,
    Manifest,
    Segment,
    check_identity,
    decode_manifest,
    read_manifest,
)

KEPT_BYTES = 256 << 20
_ADDRESS_BYTES = 32


@dataclass(frozen=True, slots=True)
class Outline:
    """Outline of a manifest.

    Fields:
        addresses: of its chunks in their order, 32 bytes each.
        stored_bytes: of its chunks together.
    """

    step: int
    term: int
    n: int
    ledger: tuple[Segment, ...] = ()
    addresses: bytes = b""
    stored_bytes: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> Outline:
        addresses = b"".join(map(bytes.fromhex, sorted(manifest.chunks)))
        identity = manifest.step, manifest.term, manifest.n
        return cls(*identity, manifest.ledger, addresses, manifest.stored_bytes)

    @property
    def key(self) -> str:
        """Storage key of the manifest, unless an abandoned attempt took that name."""
        return f"manifests/{self.step}-{self.term}-{self.n}.json"

    @property
    def cost_bytes(self) -> int:
        """Memory that it takes, about."""
        return len(self.addresses) + 300 * (1 + len(self.ledger))

    def chunk_keys(self) -> Iterator[str]:
        """Yield the storage keys of all chunks."""
        text = self.addresses.hex()
        return (chunk_key(text[at : at + 64]) for at in range(0, len(text), 2 * _ADDRESS_BYTES))

    def names(self, key: str) -> bool:
        """Whether a storage key is that of one of its chunks or ledger segments."""
        if key.startswith("chunks/"):
            return key in self.chunk_keys()
        return any(segment.key == key for segment in self.ledger)


def decode_outline(key: str, data: bytes) -> Outline:
    """Outline of an encoded manifest, whose digest fits; raises as `decode_manifest`."""
    return Outline.of(decode_manifest(key, data))


class Outlines:
    """Outlines by digest; those used last are kept. Any thread may ask."""

    def __init__(
        self,
        decode: Callable[[str, bytes], Outline] = decode_outline,
        most_bytes: int = KEPT_BYTES,
    ) -> None:
        """
        Args:
            decode: takes the key and the bytes of a manifest.
            most_bytes: kept of all together, and the newest one.
        """
        self._decode, self._most_bytes = decode, most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Outline] = OrderedDict()
        self._bytes = 0

    def add(self, digest: str, outline: Outline) -> None:
        """Keep the outline of a manifest."""
        with self._lock:
            self._drop(digest)
            self._kept[digest] = outline
            self._bytes += outline.cost_bytes
            while self._bytes > self._most_bytes and len(self._kept) > 1:
                self._drop(next(iter(self._kept)))

    def _drop(self, digest: str) -> None:
        if digest in self._kept:
            self._bytes -= self._kept.pop(digest).cost_bytes

    def _known(self, digest: str) -> Outline | None:
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            return self._kept.get(digest)

    def committed(self, storage: Storage, body: Mapping[str, Any]) -> Outline:
        """The outline of the manifest of a commit entry's body; raises as `committed_manifest`."""
        return self._known(body["digest"]) or self.read(storage, body)

    def read(self, storage: Storage, body: Mapping[str, Any]) -> Outline:
        """Read a commit's manifest to see that it is sound; a known one is not parsed again.

        Raises:
            CorruptError: it is missing or damaged.
        """
        digest = body["digest"]

        def decode(key: str, data: bytes) -> Outline:
            return self._known(digest) or self._decode(key, data)

        found = read_manifest(storage, body["manifest"], digest, decode)
        check_identity(body["manifest"], found, Identity(body["step"], body["term"], body["n"]))
        self.add(digest, found)
        return found
