"""Long runs: their ledger is read segment by segment, their log's older entries from blocks."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from picotron_ray.checkpoint.store import log_blocks
from picotron_ray.checkpoint.store.manifest import Manifest, Segment
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Source
from picotron_ray.data.batch import make_batch
from picotron_ray.data.plan.sample_plan import Feed
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.driver.storage_commands import list_commits, verify_commits, verify_ledger
from picotron_ray.runtime.run_storage import data_record
from picotron_ray.runtime.run_storage.generation_entries import generation_body
from picotron_ray.runtime.run_storage.run_store import RunStore

BATCH, SEQ, EACH = 4, 8, 20


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for index in range(8):
        (tmp_path / "text" / f"{index}.txt").write_text(f"the quick brown fox jumps {index} " * 20)
    data = {
        "source": "text", "path": str(tmp_path / "text"), "global_batch": BATCH, "sequence_length": SEQ,
        "held_out_fraction": 0.3,
    }  # fmt: skip
    values = {"name": "long", "storage": {"url": str(tmp_path / "runs")}, "data": data}
    return JobConfig.model_validate(values)


def committed(job: JobConfig, steps: int) -> RunStore:
    """A run's storage with the commit of its last step; of the ledger there is one segment in 20 steps."""
    store = RunStore(job, lambda step: None)
    store.claim()
    identity = GenerationId(1, 1)
    store._log.append(
        "generation", generation_body(GenerationSpec(identity, (), Layout(), Source("init"), "start"))
    )
    data = data_record.open_data(job, data_record.cache_folder()).train
    segments = []
    for first in range(1, steps + 1, EACH):
        text = "".join(
            json.dumps(line(job, data, step)) + "\n" for step in range(first, first + EACH)
        ).encode()
        key = f"ledger/1-1-{first}-{first + EACH - 1}.jsonl"
        store._storage.put(key, text)
        segments.append(Segment(key, first, first + EACH - 1, blake3(text).hexdigest()))
    manifest = Manifest(steps, 1, 1, steps * BATCH, {}, (), {}, tuple(segments), {})
    encoded = manifest.encode()
    store._storage.put(manifest.key, encoded)
    digest = blake3(encoded).hexdigest()
    store._log.append(
        "commit", {"term": 1, "n": 1, "step": steps, "manifest": manifest.key, "digest": digest}
    )
    return store


def line(job: JobConfig, data: Any, step: int) -> dict[str, Any]:
    part = make_batch(Feed.uniform(data, job.seed, BATCH), Layout(), 0, step)
    samples = [(step - 1) * BATCH, step * BATCH]
    rows = [[*part.rows, part.digest.hex()]]
    return {"step": step, "term": 1, "n": 1, "samples": samples, "rows": rows, "tokens": BATCH * SEQ,
            "loss": 1 / step, "padding": "x" * 2000}  # fmt: skip


def peak_bytes(look: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        look()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("who", ["the end of the run", "ledger verify"])
def test_memory_does_not_grow_with_the_run(job: JobConfig, who: str) -> None:
    peaks = []
    for name, steps in (("short", 200), ("long", 600)):
        run = job.model_copy(update={"name": name})
        store = committed(run, steps)
        look = store._ledger_figures if who == "the end of the run" else lambda run=run: verify_ledger(run)
        look()  # what is loaded once is not counted
        peaks.append(peak_bytes(look))
    assert peaks[1] < peaks[0] + 500_000, "it took a MB more"


def test_figures_of_the_end_are_those_of_all_segments(job: JobConfig) -> None:
    figures = committed(job, 200)._ledger_figures()
    assert (figures["tokens"], figures["first_loss"], figures["final_loss"]) == (
        200 * BATCH * SEQ,
        1.0,
        1 / 200,
    )
    assert (figures["ledger"]["samples"], figures["ledger"]["lost"]) == (200 * BATCH, 0)
    assert (figures["ledger"]["repeated"], figures["ledger"]["checked"]) == (0, "rows")


def test_the_coordinator_writes_blocks_of_the_log_after_a_collection(
    job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_blocks, "BLOCK", 8)
    store = committed(job, 200)
    for at in range(15):
        store._log.append("retire", {"manifests": [f"manifests/{at}"]})
    store.collect_garbage()
    blocks = sorted((tmp_path / "runs" / "long" / "log_blocks" / store.identity).iterdir())
    assert [path.name for path in blocks] == ["00000000.jsonl", "00000001.jsonl"]
    assert [row["step"] for row in list_commits(job)] == [200]
    assert [row["problems"] for row in verify_commits(job)] == [[]]
    entry = tmp_path / "runs" / "long" / "log" / "00000005.json"
    stat = entry.stat()
    entry.write_bytes(b"x" * stat.st_size)
    os.utime(entry, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert "log/00000005.json" in verify_commits(job)[0]["problems"][0], "each entry is read where it lies"
    store.collect_garbage()
    assert (tmp_path / "runs" / "long" / "log_blocks" / store.identity).is_dir(), "collection leaves them"
