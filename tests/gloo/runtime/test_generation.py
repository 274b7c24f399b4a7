"""A worker's generation in itself: what it makes of the source that its spec names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.coordinator.messages import GenerationId, Source
from picotron_ray.errors import CorruptError
from picotron_ray.runtime.worker.generation import GenerationRun
from tests.support.checkpoint.checkpoint_kit import make_state, save


def test_it_reads_the_manifest_that_the_log_names_and_no_other(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path / "runs"), "r1")
    log = RunLog(storage)
    log.claim_term("test")
    done = save(storage, log, tmp_path / "slots", make_state(1), (1, 2, 5))
    named = Source("commit", 5, GenerationId(1, 2), manifest=done.manifest, digest=done.digest)

    def read(source: Source) -> Any:
        generation = GenerationRun.__new__(GenerationRun)
        generation.spec = SimpleNamespace(source=source)  # type: ignore[assignment]
        return generation._manifest(storage)

    assert read(named).step == 5
    assert read(replace(named, digest="")).step == 5, "as an older version's log names it"
    with pytest.raises(CorruptError, match="digest in the log"):
        read(replace(named, digest="0" * 64))
    for other in (replace(named, step=6), replace(named, generation=GenerationId(1, 3))):
        with pytest.raises(CorruptError, match="the log says step"):
            read(other)
    storage.delete(done.manifest)
    with pytest.raises(CorruptError, match="is missing"):
        read(named)
