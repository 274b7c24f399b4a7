"""Deletions that hang amid a collection hold nothing else up, and no commit counts on what may go yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from picotron_ray.checkpoint.storage.deadline import DeadlineStorage
from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.commit import commit
from picotron_ray.checkpoint.store.gc import collect
from picotron_ray.checkpoint.store.manifest import committed_manifest
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.schema.service import CheckpointConfig
from picotron_ray.errors import PartsGoneError, StorageUnavailableError
from tests.support.checkpoint.checkpoint_kit import generation, load, make_state, same, save, upload

LIMIT_S = 2.0
CONFIG = CheckpointConfig(keep_last=1, gc_grace_s=0)


class Mount(LocalStorage):
    """A folder that deletes chunks and intents only once its server is back."""

    def __init__(self, root: str) -> None:
        super().__init__(root, "r1")
        self.back = threading.Event()
        self.back.set()

    def delete(self, key: str) -> None:
        if key.startswith(("chunks/", "intents/")):
            self.back.wait(60)
        super().delete(key)


@pytest.fixture
def mount(memory_path: Path) -> Iterator[Mount]:
    made = Mount(str(memory_path / "runs"))
    yield made
    made.back.set()


def two_commits(mount: Mount, folder: Path) -> tuple[DeadlineStorage, RunLog]:
    storage = DeadlineStorage(mount, LIMIT_S)
    log = RunLog(storage)
    log.claim_term("test")
    for step in (1, 2):
        save(storage, log, folder / str(step), make_state(step), (1, 1, step))
    return storage, log


def test_a_commit_waits_for_a_deletion_of_what_it_needs(mount: Mount, memory_path: Path) -> None:
    storage, log = two_commits(mount, memory_path)
    mount.back.clear()
    with pytest.raises(StorageUnavailableError, match="gave no answer"):
        collect(storage, log, CONFIG)
    (chunk,) = (key for key in storage.leaving if key.startswith("chunks/"))
    with pytest.raises(StorageUnavailableError, match=f"a deletion of {chunk} hangs, another is not tried"):
        collect(storage, log, CONFIG)

    log.append("generation", generation(1, 2))  # the log is in nobody's way
    parts = upload(storage, memory_path / "3", make_state(1), (1, 1, 3))  # the same chunks, put again
    assert storage.size(chunk) is not None
    with pytest.raises(StorageUnavailableError, match=f"a deletion of {chunk} hangs, which step 3 needs"):
        commit(storage, log, parts)

    mount.back.set()
    for _ in range(1000):
        if not storage.leaving:
            break
        time.sleep(0.01)
    assert storage.size(chunk) is None, "it went after all"
    with pytest.raises(PartsGoneError, match=chunk.rpartition("/")[2]):
        commit(storage, log, parts)
    save(storage, log, memory_path / "4", make_state(1), (1, 1, 3))
    newest = committed_manifest(storage, log.commits()[-1].body)
    assert newest.step == 3
    assert same(load(storage, newest), make_state(1))


def test_other_commits_do_not_wait(mount: Mount, memory_path: Path) -> None:
    storage, log = two_commits(mount, memory_path)
    parts = upload(storage, memory_path / "3", make_state(3), (1, 1, 3))
    mount.back.clear()
    with pytest.raises(StorageUnavailableError, match="gave no answer"):
        collect(storage, log, CONFIG)
    with pytest.raises(StorageUnavailableError, match="gave no answer at intents/"):
        commit(storage, log, parts)
    assert log.commits()[-1].body["step"] == 3, "it is durable; only its intent is left"
