"""Imports: whole tensors become step 0 of a run, in chunks and packs, and a copy checks each shard."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store import import_tensors
from picotron_ray.checkpoint.store.import_commit import copy_commit
from picotron_ray.checkpoint.store.import_tensors import TensorWriter, commit_tensors
from picotron_ray.checkpoint.store.manifest import Manifest
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import latest_good
from picotron_ray.errors import CorruptError, StorageError
from picotron_ray.layout.layout import Layout
from tests.support.checkpoint.checkpoint_kit import generation


@pytest.fixture
def storage(memory_path: Path) -> LocalStorage:
    return LocalStorage(str(memory_path), "r1")


def imported(storage: LocalStorage, tensors: dict[str, np.ndarray]) -> Manifest:
    key = commit_tensors(
        storage,
        tensors.items(),
        {"from": "elsewhere"},
        generation=lambda term: generation(term, 0),
        owner="test",
        codec="none",
    )
    log = RunLog(storage)
    log.refresh()
    assert [entry.kind for entry in log.entries()] == ["term", "generation", "commit"]
    good = latest_good(storage, log)
    assert good is not None
    body = {"term": 1, "n": 0, "step": 0, "manifest": key, "digest": blake3(storage.get(key)).hexdigest()}
    assert good.entry.body == body
    return good.manifest


def test_small_tensors_share_a_chunk_until_it_is_full(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_tensors, "SMALL_BYTES", 64)
    monkeypatch.setattr(import_tensors, "PACK_BYTES", 100)
    writer = TensorWriter(storage, "none")
    for at, (name, count) in enumerate({"a": 63, "b": 37, "c": 1, "large": 64, "d": 9}.items()):
        writer.add(name, np.full(count, at, np.uint8))
    writer.flush()
    writer.flush()  # nothing waits any more
    placed = [(part.shard.name, part.start, writer.chunks[part.chunk].raw_size) for part in writer.shards]
    assert placed == [("a", 0, 100), ("b", 63, 100), ("large", 0, 64), ("c", 0, 10), ("d", 1, 10)]
    assert len(writer.chunks) == 3


def test_what_is_imported_is_step_0_of_weights_alone(storage: LocalStorage) -> None:
    weights = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "scalar": np.array(2.5)}
    manifest = imported(storage, weights)
    assert manifest == Manifest(
        step=0,
        term=1,
        n=0,
        cursor=0,
        layout=json.loads(json.dumps(Layout().to_dict())),
        shards=manifest.shards,
        chunks=manifest.chunks,
        extra={"init_from": {"from": "elsewhere"}, "weights_only": True},
    )
    (address,) = manifest.chunks
    raw = storage.get(f"chunks/{address[:2]}/{address}")
    assert raw == weights["w"].tobytes() + weights["scalar"].tobytes()
    with pytest.raises(StorageError, match=r"has commits already; choose another name$"):
        imported(storage, weights)


def test_a_copy_checks_each_shard_in_its_chunk(storage: LocalStorage, memory_path: Path) -> None:
    manifest = imported(storage, {"a": np.arange(5, dtype=np.uint8), "b": np.arange(3, dtype=np.uint8)})
    first, second = manifest.shards
    wrong = replace(manifest, shards=(first, replace(second, digest=first.digest))).encode()
    storage.put("manifests/x.json", wrong)
    target = LocalStorage(str(memory_path), "r2")
    with pytest.raises(CorruptError, match="b does not match its digest"):
        copy_commit(storage, "manifests/x.json", "", target, (1, 0), True)
    storage.put("manifests/y.json", replace(manifest, cursor=7, extra={"weights_only": True}).encode())
    key, _ = copy_commit(storage, "manifests/y.json", "", target, (3, 2), True)
    assert key == "manifests/0-3-2.json"
    assert b'"cursor":0' in target.get(key)
    assert b'"weights_only":true' in target.get(key)
