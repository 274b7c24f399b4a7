"""Store of measured runs, a file for each kind of hardware, in the user's state folder.

It lies on the coordinator's machine, which is what a cluster has for longest. Nothing that fails here stops a
run: a file that cannot be read counts as none, one that cannot be written is warned of.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.settings import with_settings
from picotron_ray.planner.calibration_history import (
    CalibrationHistory,
    Correction,
    RunMeasure,
    correction,
    sections_of,
)
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.runtime.ray_cluster.names import event_folder
from picotron_ray.runtime.ray_cluster.private_folder import write_text

if TYPE_CHECKING:
    from picotron_ray.coordinator.messages import GenerationSpec, RunFigures

log = logging.getLogger(__name__)
MOST_BYTES = 1 << 22
WAITS = ("data", "snapshot", "sync")


def folder() -> Path:
    """Folder of the histories of this user's machine."""
    return event_folder("any").parents[1] / "calibration"


def hardware_here(device: str) -> str:
    """Name of this machine's hardware: its card's, or its processor's with the cores that may be used."""
    if device == "cuda":
        from picotron_ray.observability.nvml import Gpus  # plans import this file, and should be quick

        cards = Gpus().cards()
        return cards[0].name if cards else "cuda"
    names = re.findall(r"model name\s*:\s*(.+)", _text(Path("/proc/cpuinfo")))
    return f"{names[0].strip() if names else os.uname().machine}, {len(os.sched_getaffinity(0))} cores"


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def path_of(device: str, hardware: str) -> Path:
    """File of a kind of hardware."""
    words = re.sub(r"[^a-z0-9]+", "-", f"{device} {hardware}".lower()).strip("-")
    return folder() / f"{words[:80]}.json"


def load(path: Path) -> CalibrationHistory | None:
    """The history of a file; None where there is none, or it is damaged."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"larger than {MOST_BYTES} bytes")
        return CalibrationHistory.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValueError, ValidationError) as error:
        log.warning("the history of measured runs in %s is left out: %s", path, str(error).splitlines()[0])
        return None


class CalibrationStore:
    """History of the hardware here. May be called from several threads."""

    def __init__(self, job: JobConfig, device: str) -> None:
        self._job, self._device = job, device
        self._hardware = hardware_here(device)
        self.path = path_of(device, self._hardware)
        self._lock = threading.Lock()

    def correction(self, device_bytes: int = 0) -> Correction:
        """Factors for this job on the assumed profile, as the coordinator's planner has it."""
        assumed = profile_of(self._device, device_bytes)
        return correction(
            load(self.path), self._job, lambda measure, layout: assumed, assumed=self._device == "cpu"
        )

    def add(self, spec: GenerationSpec, step_s: float, figures: RunFigures | None, device_bytes: int) -> None:
        """Keep what a generation's steps took; a later word of the same generation replaces it."""
        counts: dict[str, int] = {}
        for member in spec.members:
            counts[member.node] = counts.get(member.node, 0) + 1
        phases = {} if figures is None else figures.phase_s
        told_apart = figures is not None and figures.waits_seen
        measure = RunMeasure(
            at_s=time.time(),
            run=self._job.name,
            generation=f"{spec.id} since {spec.resume_step}",
            job=sections_of(with_settings(self._job, spec.settings)),
            layout=spec.layout.to_dict(),
            node_sizes=tuple(sorted(counts.values(), reverse=True)),
            device_bytes=device_bytes,
            step_s=step_s,
            reduce_s=phases.get("reduce", 0.0) if told_apart else 0.0,
            waits_s=sum(phases.get(phase, 0.0) for phase in WAITS),
            peak_bytes=0 if figures is None else figures.peak_bytes,
        )
        with self._lock:
            self._write(measure)

    def _write(self, measure: RunMeasure) -> None:
        """Replace the file; of two runs that write at a time the last one's measure is kept."""
        known = load(self.path) or CalibrationHistory(device=self._device, hardware=self._hardware)
        text = known.with_measure(measure).model_dump_json(indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, text)
        except OSError as error:
            log.warning("what was measured is not kept in %s: %s", self.path, error)
