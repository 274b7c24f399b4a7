"""Import of another run's commit as the first one of a new run (``init_from``). Torch-free.

What is needed is copied, so the new run does not depend on the old one's retention. Everything is checked
on the way: each chunk against its address, each shard against its digest. The result is a manifest of
step 0 without ledger: from there on it is a commit like any other, found by the same ladder, verified and
collected by the same code. With weights alone the manifest holds no moment, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.store.assembly import put_fresh
from picotron_ray.checkpoint.store.chunks import chunk_key, decode
from picotron_ray.checkpoint.store.commit_source import check_shard
from picotron_ray.checkpoint.store.manifest import (
    UPDATES,
    Manifest,
    StoredShard,
    committed_manifest,
    load_manifest,
)
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import Verifier
from picotron_ray.errors import CorruptError, NotFoundError, StorageError

_THREADS = 8
WEIGHTS_ONLY = "weights_only"
"""Key in a manifest's ``extra``: it holds no optimizer state."""
ORIGIN = "init_from"
"""Key in a manifest's ``extra``: where it was taken from."""


@dataclass(frozen=True, slots=True)
class FoundCommit:
    """A commit of another run."""

    storage: Storage
    manifest: Manifest
    key: str
    digest: str

    def origin(self) -> dict[str, Any]:
        """Record of it for run.json."""
        return {
            "from": self.storage.where,
            "step": self.manifest.step,
            "manifest": self.key,
            "digest": self.digest,
        }


def weights_only(manifest: Manifest) -> bool:
    """Whether a restore must leave the optimizer's moments at zero."""
    return bool(manifest.extra.get(WEIGHTS_ONLY))


def find(storage: Storage, step: int | None, verify: bool = True) -> FoundCommit:
    """Find a run's commit of ``step`` (None: the newest); nothing is changed there.

    Args:
        verify: read it whole and compare every digest, not the manifest's alone.

    Raises:
        NotFoundError: no such run or step, naming the steps that are there.
        CorruptError: the commit does not verify.
    """
    log = RunLog(storage)
    log.refresh()
    commits = log.commits()
    chosen = [entry for entry in commits if step is None or entry.body["step"] == step]
    if not chosen:
        steps = sorted({int(entry.body["step"]) for entry in commits})
        wanted = "a commit" if step is None else f"a commit of step {step}"
        raise NotFoundError(f"{storage.where}: expected {wanted}, found commits at steps {steps}")
    body = chosen[-1].body
    if not verify:
        manifest = committed_manifest(storage, body)
        return FoundCommit(storage, manifest, body["manifest"], body["digest"])
    report = Verifier(storage).check(chosen[-1])
    if report.manifest is None or report.problems:
        raise CorruptError(
            f"{storage.where}: the commit of step {report.step} does not verify: {report.problems[0]}",
            where=body["manifest"],
        )
    return FoundCommit(storage, report.manifest, body["manifest"], body["digest"])


def copy_commit(
    source: Storage, key: str, digest: str, target: Storage, identity: tuple[int, int], with_moments: bool
) -> tuple[str, str]:
    """Copy a commit into another run's storage as its step 0; returns (manifest key, digest) there.

    Calling again after a crash copies only what is missing. The log entry is the caller's.

    Args:
        key, digest: the source's manifest, as ``FoundCommit`` holds it.
        identity: (term, n) of the generation that the new manifest names as its writer.
        with_moments: also the optimizer's moments.

    Raises:
        CorruptError, NotFoundError: the source was damaged or collected meanwhile.
        StorageError: one of the storages refused.
    """
    old = load_manifest(source, key, digest)
    shards = tuple(part for part in old.shards if with_moments or "/" not in part.shard.name)
    if not shards:
        raise StorageError(f"{source.where}: manifest {key} holds no weights")
    by_chunk: dict[str, list[StoredShard]] = {}
    for part in shards:
        by_chunk.setdefault(part.chunk, []).append(part)

    def move(address: str) -> None:
        _copy_chunk(source, target, old, address, by_chunk[address])

    with ThreadPoolExecutor(max_workers=_THREADS) as threads:
        _drain(threads.map(move, by_chunk))
    origin = {"from": source.where, "step": old.step, "manifest": key, "digest": digest}
    manifest = replace(
        old,
        step=0,
        term=identity[0],
        n=identity[1],
        cursor=0,
        shards=shards,
        chunks={address: old.chunks[address] for address in by_chunk},
        ledger=(),
        extra={ORIGIN: origin, WEIGHTS_ONLY: not with_moments or weights_only(old)}
        | (_left_out(old) if with_moments else {}),
    )
    encoded = manifest.encode()
    return put_fresh(target, manifest.key, encoded), blake3(encoded).hexdigest()


def _left_out(old: Manifest) -> dict[str, Any]:
    """Number of the other run's steps without an update: its moments have not seen them."""
    skipped = old.extra.get(UPDATES, {}).get("skipped", 0)
    return {UPDATES: {"skipped": skipped}} if skipped else {}


def _copy_chunk(
    source: Storage, target: Storage, manifest: Manifest, address: str, parts: Iterable[StoredShard]
) -> None:
    key, info = chunk_key(address), manifest.chunks[address]
    try:
        stored = source.get(key)
    except NotFoundError as error:
        raise CorruptError(f"chunk {key} is missing from {source.where}", where=key) from error
    raw = decode(address, stored, info.codec, info.raw_size)
    for part in parts:
        check_shard(part, raw)
    if target.size(key) != len(stored):
        target.put(key, stored)


def _drain(results: Iterable[None]) -> None:
    for _ in results:
        pass
