"""A run's storage in memory, and its log with a term claimed."""

from __future__ import annotations

from pathlib import Path

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.run_log import RunLog


@pytest.fixture
def storage(memory_path: Path) -> LocalStorage:
    return LocalStorage(str(memory_path / "runs"), "r1")


@pytest.fixture
def log(storage: LocalStorage) -> RunLog:
    log = RunLog(storage)
    log.claim_term("test")
    return log
