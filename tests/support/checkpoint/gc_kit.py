"""A run with garbage, and what collections need: a config, and objects as old as a test wants them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store import gc
from picotron_ray.checkpoint.store.gc import collect
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.schema.service import CheckpointConfig
from tests.support.checkpoint.checkpoint_kit import make_state, save

NOW_S = 1_000_000.0


def run_with_garbage(storage: LocalStorage, folder: Path) -> RunLog:
    """The log of a run with commits of steps 1 to 3, of which retention keeps one."""
    log = RunLog(storage)
    log.claim_term("test")
    for step in (1, 2, 3):
        save(storage, log, folder / str(step), make_state(step), (1, 1, step))
    return log


def config(**values: Any) -> CheckpointConfig:
    return CheckpointConfig(**{"keep_last": 1, "gc_grace_s": 100.0, **values})


def age(storage: LocalStorage, age_s: float, prefix: str = "") -> None:
    for path in (Path(storage.where) / entry.key for entry in storage.list(prefix)):
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))


def condemned(storage: LocalStorage, log: RunLog, patch: pytest.MonkeyPatch) -> set[str]:
    """All chunks, once a list of those that go is due."""
    age(storage, 500.0)
    collect(storage, log, config())
    patch.setattr(gc, "_now", lambda storage: NOW_S)
    age(storage, 200.0, "condemned/")
    return {entry.key for entry in storage.list("chunks/")}
