"""Recordings of clean runs: windows of telemetry of real runs of two workers in which nothing was planted.

A window here is `STEPS` consecutive steps of all ranks, without overlap. Its figures are made by the code
that makes those of a live round; loss and gradient norm are the last step's, by the run's own ledger. A live
window is of up to 100 steps, so that these are noisier, and rules find more in them.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Member, Source
from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.layout.layout import Layout
from picotron_ray.observability.archive import ArchiveSegment, decode_segment, encode_segment
from picotron_ray.observability.host import Host
from picotron_ray.observability.windows import TelemetryWindow, known, run_figures, window_of_round
from picotron_ray.runtime.coordinator.telemetry import Round
from picotron_ray.runtime.driver.driver import ensure_coordinator
from picotron_ray.runtime.driver.follow_run import poll, take_down
from picotron_ray.runtime.ray_cluster import connect
from picotron_ray.runtime.ray_cluster.names import run_folder
from picotron_ray.runtime.telemetry_page import SUFFIX, StepRow, read_rows
from picotron_ray.runtime.telemetry_window import WARM_UP, figures_of
from picotron_ray.train.step_clock import PIPELINE_EVERY

STEPS = 4
"""Steps of a window."""
SUFFIX_OF_WINDOWS = ".windows"
POLL_S = 0.1
STATUS_S = 1.0
TINY: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "layers": 2,
    "heads": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dp-fp32": {"model": TINY, "layout": {"dp": 2, "zero": 0}},
    "zero2-bf16": {"model": TINY, "layout": {"dp": 2, "zero": 2}, "precision": "bf16"},
    "tp-fp32": {"model": TINY, "layout": {"tp": 2, "zero": 0}},
    "pp-fp32": {"model": TINY, "layout": {"pp": 2, "zero": 0}},
    "gpt2-dp": {
        "model": {**TINY, "family": "gpt2"}, "layout": {"dp": 2, "zero": 0},
        "optimizer": {"learning_rate": 1e-3, "schedule": {"kind": "cosine"}},
    },
    "wide-dp-long": {
        "model": {**TINY, "hidden_size": 64, "intermediate_size": 128},
        "data": {"sequence_length": 64, "global_batch": 4}, "layout": {"dp": 2, "zero": 0},
    },
}  # fmt: skip
"""Configurations that are recorded."""


def chosen(configs: str) -> list[str]:
    """Return the configurations that are asked for.

    Raises:
        ConfigError: one is not known.
    """
    names = list(CONFIGS) if configs == "all" else configs.split(",")
    for name in names:
        if name not in CONFIGS:
            raise ConfigError(f"--configs: saw {name!r}, expected all, or of {', '.join(CONFIGS)}")
    return names


def job_of(name: str, seed: int, windows: int, folder: Path) -> JobConfig:
    """Return the job of a configuration, long enough for so many windows."""
    values: dict[str, Any] = {
        "name": f"clean-{name}-{seed}",
        "seed": seed,
        "steps": (windows + 1) * STEPS * steps_apart(Layout(**CONFIGS[name]["layout"])) + WARM_UP,
        "data": {"sequence_length": 16, "global_batch": 4},
        "cluster": {"device": "cpu", "min_workers": 2, "max_workers": 2},
        "checkpoint": {"interval_steps": 500},
        "evaluate": {"interval_steps": 2000, "samples": 2},
        "storage": {"url": str(folder / "runs")},
        "trackers": [{"kind": "jsonl", "folder": str(folder / "trackers" / f"{name}-{seed}")}],
        **CONFIGS[name],
    }
    return JobConfig.model_validate(values)


def steps_apart(layout: Layout) -> int:
    """Steps from one that is timed to the next: pipelines time every other one."""
    return PIPELINE_EVERY if layout.pp > 1 else 1


class Recorder:
    """Windows of one run, as its pages are read."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._apart = steps_apart(layout)
        self._rows: dict[int, dict[int, StepRow]] = {}  # by step and rank
        self._next, self._id = 0, (0, 0)
        self.found: list[TelemetryWindow] = []

    def take(self, rows: tuple[StepRow, ...], more: dict[str, float]) -> None:
        """Take the rows of a page; those that were seen before are none."""
        for row in rows:
            if (row.term, row.n) != self._id and row.step > self._next:
                self._id, self._rows, self._next = (row.term, row.n), {}, row.step
            if row.ordinal >= WARM_UP and row.step >= self._next and (row.term, row.n) == self._id:
                self._rows.setdefault(row.step, {})[row.rank] = row
        self._close(more)

    def _close(self, more: dict[str, float]) -> None:
        """Make windows of what is complete; steps that were written over unread are left out."""
        whole = sorted(step for step, by in self._rows.items() if len(by) == self._layout.world_size)
        while len(whole) >= STEPS:
            steps = whole[:STEPS]
            if steps[-1] - steps[0] == (STEPS - 1) * self._apart:
                self.found.append(self._window(steps, more))
            self._next = steps[-1] + 1
            whole = whole[STEPS:]
        self._rows = {step: by for step, by in self._rows.items() if step >= self._next}

    def _window(self, steps: list[int], more: dict[str, float]) -> TelemetryWindow:
        members = tuple(Member(f"w{rank}", "n0") for rank in range(self._layout.world_size))
        spec = GenerationSpec(GenerationId(*self._id), members, self._layout, Source("init", 0), "")
        held = Round(spec, 0.0)
        for rank in range(self._layout.world_size):
            one = figures_of([self._rows[step][rank] for step in steps])
            if one is not None:
                held.add(one)
        return window_of_round(time.time(), held.status(held.figures()), more, held.table)


def record(name: str, seed: int, windows: int, folder: Path, say: Callable[[str], None]) -> Path:
    """Run a configuration to its end and keep its windows; returns the file that holds them.

    What an earlier recording of it left in the folder gives way: to go on from there would record the rest.

    Raises:
        ConfigError: the folder cannot be made, or cannot be cleared of an earlier recording.
        PicotronError: the run did not finish.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from error
    job = job_of(name, seed, windows, folder)
    tracked = folder / "trackers" / f"{name}-{seed}"
    for old in (folder / "runs" / job.name, tracked):
        _clear(old)
    layout = Layout(**CONFIGS[name]["layout"])
    recorder, host = Recorder(layout), Host({"storage": folder})
    local = connect.connect(job)
    coordinator = None
    try:
        coordinator, _ = ensure_coordinator(job, owns_ray=local is not None)
        _watch(job, coordinator, recorder, host)
    finally:
        if coordinator is not None:
            take_down(local, coordinator)
    found = list(_with_losses(recorder.found, tracked / "metrics.jsonl", job))
    file = folder / f"{name}-{seed}{SUFFIX_OF_WINDOWS}"
    file.write_bytes(encode_segment(ArchiveSegment(tuple(found))))
    say(f"{name}: {len(found)} windows of {STEPS} steps, {file.stat().st_size / 1024:.0f} KiB")
    return file


def _clear(folder: Path) -> None:
    """Remove a folder, where it is there."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(
            f"{folder} of an earlier recording cannot be removed: {error.strerror}; remove it, or name"
            " another folder"
        ) from error


def _watch(job: JobConfig, coordinator: Any, recorder: Recorder, host: Host) -> None:
    """Read the pages of a run until it has ended."""
    pages = run_folder(job.snapshot.folder, job.name)
    more: dict[str, float] = {}
    due = 0.0
    while True:
        for path in pages.glob(f"*/*{SUFFIX}"):
            if (page := read_rows(path)) is not None:
                recorder.take(page.rows, more)
        if time.monotonic() >= due:
            due = time.monotonic() + STATUS_S
            status = poll(coordinator, 0)
            if status is not None and status["done"]:
                if status["exit_code"]:
                    raise PicotronError(f"run {job.name} did not finish: {status['detail']}")
                return
            if status is not None:
                more = {**run_figures(status, {}), **host.health()}
        time.sleep(POLL_S)


def _with_losses(windows: list[TelemetryWindow], curve: Path, job: JobConfig) -> Iterator[TelemetryWindow]:
    """Add what the ledger says of a window's last step."""
    rows = (json.loads(line) for line in curve.read_text().splitlines())
    by_step = {row["step"]: row for row in rows if "loss" in row}
    tokens = job.data.global_batch * job.data.sequence_length
    for window in windows:
        row = by_step.get(int(window.figures["step"]), {})
        said = {name: row.get(name) for name in ("loss", "grad_norm", "learning_rate")}
        pace = tokens / window.figures["step_s"]
        figures = {**window.figures, **known(said), "tokens_per_s": pace}
        yield replace(window, figures=figures)


def recorded(folder: Path) -> dict[str, tuple[TelemetryWindow, ...]]:
    """Return the recordings of a folder, by name.

    Raises:
        ConfigError: there are none.
    """
    found = {}
    for file in sorted(folder.glob(f"*{SUFFIX_OF_WINDOWS}")):
        segment = decode_segment(file.read_bytes())
        if segment is not None:
            found[file.name.removesuffix(SUFFIX_OF_WINDOWS)] = segment.windows
    if not found:
        raise ConfigError(f"FOLDER: saw no recordings in {str(folder)!r}; make them with --record")
    return found
