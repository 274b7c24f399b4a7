"""Runs in storage without Ray: with a failure, commits, telemetry, in each state that a run can be in."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.base import Storage, encode_json
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.upload import upload_slots
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.layout.layout import Layout
from picotron_ray.observability.archive import Segment
from picotron_ray.observability.windows import TelemetryWindow
from picotron_ray.runtime.coordinator.event_log.files import encode_record
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.run_storage.run_store import RunStore
from picotron_ray.runtime.run_storage.telemetry_archive import ArchiveWriter
from tests.support.checkpoint.checkpoint_kit import make_state, write_slots
from tests.support.runs.small_run import ledger_line

BEGAN_S = 1_750_000_000.0
STEPS = 12


def page(n: int, step: int, at_s: float, **spent: float) -> dict[str, Any]:
    known = {"worker": "a", "rank": 0, "term": 1, "n": n, "step": step, "phase": "forward", "tokens": 64}
    known |= {"eval_step": -1, "eval_loss": 0.0, "baseline_loss": 2.5, "skipped_step": -1, "loss": 2.0}
    known |= {"step_time_s": 1.0, "first_step_at_s": at_s, "step_at_s": at_s, "pinned_wait_s": 0.0}
    return {**known, "spent_s": spent}


class Made:
    """A run of 60 seconds in a clock of its own: 4 steps, a kill, 8 more steps, a commit of step 12."""

    def __init__(self, folder: Path, name: str, patch: Any, **job: Any) -> None:
        url = {"storage": {"url": str(folder / "runs")}, "data": {"global_batch": 8}}
        self.job = JobConfig.model_validate({"name": name, "steps": STEPS, **url, **job})
        self.now_s = BEGAN_S
        patch.setattr(time, "time", lambda: self.now_s)
        self.store = RunStore(self.job, lambda step: None)
        self.record = RunRecord(self.job)
        self.term = self.store.claim()
        self.record.begin(self.term, self.store.commit_figures)
        self._folder = folder
        self._live()

    def _live(self) -> None:
        both = (m.Member("a", "node"), m.Member("b", "node"))
        self._generation(1, both, 0, 2.0, m.Source("init", 0))
        self._page(10.0, page(1, 4, BEGAN_S + 10.0, build=4.0, forward=4.0))
        self.at(12.0)
        self.record.observe(m.WorkerExited("b", "process died"), [], self.now_s)
        spec = self._generation(2, both[:1], 3, 13.0, m.Source("slots", 3))
        self._page(24.0, page(2, 12, BEGAN_S + 24.0, build=1.0, restore=1.0, forward=9.0))
        self._commit(spec)
        self.at(30.0)
        self.keep()

    def at(self, seconds: float) -> None:
        self.now_s = BEGAN_S + seconds

    def _page(self, at_s: float, told: dict[str, Any]) -> None:
        self.at(at_s)
        self.record.figures("node", [told])

    def _generation(
        self, n: int, members: tuple[m.Member, ...], step: int, at_s: float, source: m.Source
    ) -> m.GenerationSpec:
        self.at(at_s)
        layout = Layout(dp=len(members))
        spec = m.GenerationSpec(m.GenerationId(self.term, n), members, layout, source, "a test <&> needs it")
        self.record.observe(m.Tick(), [m.RunGeneration(spec)], self.now_s)
        self.store.append_generation(spec)
        self.record.note("info", "generation", f"generation {n}")
        return spec

    def _commit(self, spec: m.GenerationSpec) -> None:
        key = (spec.id.term, spec.id.n, STEPS)
        lines = tuple(ledger_line(step) for step in range(1, STEPS + 1))
        slots = write_slots(self._folder, make_state(0), spec.layout, key, lines)
        part = upload_slots(slots, open_storage(self.job.storage, self.job.name), *key, owner="node")
        event = self.store.commit(spec.id, STEPS, [part.encode()])
        assert event.seq, event.error
        self.record.observe(event, [], self.now_s)

    def keep(self) -> None:
        """Store the record and telemetry, as a coordinator does with a commit."""
        self.store.save_record(encode_record(self.record.memo()))
        writer = ArchiveWriter(self.storage, self.term, lambda: True)
        figures = {"step": 12, "loss": 2.0, "tokens_per_s": 64.0, "step_s": 1.0, "forward_s": 0.6}
        windows = tuple(
            TelemetryWindow(BEGAN_S + at, "1.2", {**figures, "loss": 3 - at / 30}) for at in (15, 25)
        )
        writer.put(Segment(windows, tuple(self.record.status(0)["events"])), self.now_s)

    def finish(self) -> None:
        """End the run in order."""
        self.at(31.0)
        finish = m.Finish("finished")
        self.record.observe(m.Tick(), [finish], self.now_s)
        self.store.save_record(encode_record(self.record.memo()))
        self.store.finish(self.record.summary(finish))
        self.store.close("finished")

    @property
    def storage(self) -> Storage:
        return open_storage(self.job.storage, self.job.name)

    @property
    def folder(self) -> Path:
        return Path(self.job.storage.url) / self.job.name


def make(folder: Path, name: str, finished: bool, **job: Any) -> Path:
    """Make a run, ended or left in the middle, and return its folder."""
    with pytest.MonkeyPatch.context() as patch:
        made = Made(folder, name, patch, **job)
        if finished:
            made.finish()
        else:
            made.store.close()
        return made.folder


def sign(folder: Path, signed_s: float, ended: str = "") -> None:
    """Leave a sign of life of that time in a run's folder."""
    path = folder / "life" / "000001.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(encode_json({"term": 1, "beat": 1, "ended": ended}))
    os.utime(path, (signed_s, signed_s))
