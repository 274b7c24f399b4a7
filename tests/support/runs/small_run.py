"""The summary of a run of two steps with one failure: the coordinator's own record and storage, no Ray."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.upload import upload_slots
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.driver.submission import Submission
from picotron_ray.runtime.run_storage.run_store import RunStore
from tests.support.checkpoint.checkpoint_kit import make_state, write_slots

STEPS = 2


def ledger_line(step: int) -> str:
    """A step of 8 samples, as the ledger holds it."""
    samples = [8 * (step - 1), 8 * step]
    rows = [[*samples, "00" * 16]]
    line = {"step": step, "term": 1, "n": 2, "loss": 2.0, "tokens": 64, "samples": samples, "rows": rows}
    return json.dumps(line)


def summary(folder: Path) -> dict[str, Any]:
    """Train nothing, but commit and lose a worker; then end the run and sum it up."""
    job = JobConfig.model_validate(
        {"name": "small", "storage": {"url": str(folder / "runs")}, "data": {"global_batch": 8}}
    )
    store = RunStore(job, lambda step: None)
    record = RunRecord(job)
    record.begin(store.claim(), store.commit_figures)
    record.attached(Submission("raysubmit_1", {}, uploaded=False).plain())
    members = (m.Member("a", "node"), m.Member("b", "node"))
    first = m.GenerationSpec(m.GenerationId(1, 1), members, Layout(dp=2), m.Source("init", 0), "")
    record.observe(m.Tick(), [m.RunGeneration(first)], time.time())
    record.observe(m.WorkerExited("a", "process died"), [], time.time())
    alone = replace(first, id=m.GenerationId(1, 2), members=members[1:], layout=Layout())
    record.observe(m.Tick(), [m.RunGeneration(alone)], time.time())
    record.observe(_committed(store, job, alone, folder), [], time.time())
    return dict(store.finish(record.summary(m.Finish("finished"))))


def _committed(store: RunStore, job: JobConfig, spec: m.GenerationSpec, folder: Path) -> m.Appended:
    key = (spec.id.term, spec.id.n, STEPS)
    lines = tuple(ledger_line(step) for step in range(1, STEPS + 1))
    store.append_generation(spec)
    slots = write_slots(folder, make_state(0), spec.layout, key, lines)
    part = upload_slots(slots, open_storage(job.storage, job.name), *key, owner="node")
    event = store.commit(spec.id, STEPS, [part.encode()])
    assert event.seq, event.error
    return event
