"""Store of measured runs, a file for each kind of hardware, in the user's state folder.

It lies on the coordinator's machine, which is what a cluster has for longest. GPUs go by the names that the
nodes' drivers tell, as the coordinator's machine may have none. What ran on unknown ones is not kept, since
it would correct the estimates of others. Nothing that fails here stops a run: a file that cannot be read
counts as none, one that cannot be written is warned of.
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
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.calibration_history import (
    CalibrationHistory,
    Correction,
    RunMeasure,
    correction,
    sections_of,
)
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.planner.device_profile import DeviceProfile
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


def hardware_here() -> str:
    """Name of this machine's processor, with the cores that may be used."""
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


def read(path: Path) -> CalibrationHistory:
    """The history of a file. Raises OSError or ValueError where it cannot be read, or is none."""
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES} bytes")
    return CalibrationHistory.model_validate_json(path.read_text(encoding="utf-8"))


def load(path: Path) -> CalibrationHistory | None:
    """The history of a file; None where there is none, or it is damaged."""
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValueError, ValidationError) as error:
        log.warning("the history of measured runs in %s is left out: %s", path, str(error).splitlines()[0])
        return None


class CalibrationStore:
    """Histories of a run's hardware. May be called from several threads.

    Hardware: product names of the GPUs; of CPUs it is the machine here, whatever is given.
    """

    def __init__(self, job: JobConfig, device: str) -> None:
        self._job, self._device = job, device
        self._lock = threading.Lock()
        self._warned = False

    def path(self, hardware: str = "") -> Path | None:
        """File of a kind of hardware; None where that is not known."""
        if self._device == "cpu":
            return path_of("cpu", hardware_here())
        return path_of(self._device, hardware) if hardware else None

    def like(self, kind: str) -> Path | None:
        """The one file of GPUs whose name has this kind in it (``H100``); None where there are several."""
        found = []
        for path in sorted(folder().glob(f"{self._device}-*.json")) if kind else ():
            history = load(path)
            if history is not None and kind.upper() in history.hardware.upper():
                found.append(path)
        return found[0] if len(found) == 1 else None

    def correction(self, path: Path | None, device_bytes: int = 0) -> Correction:
        """Factors for this job on the assumed profile, as the coordinator's planner has it.

        Args:
            device_bytes: of the devices, where a measure does not know its own.
        """

        def profile(measure: RunMeasure, layout: Layout) -> DeviceProfile:
            return profile_of(self._device, measure.device_bytes or device_bytes)

        history = None if path is None else load(path)
        return correction(history, self._job, profile, assumed=self._device == "cpu")

    def add(
        self,
        spec: GenerationSpec,
        step_s: float,
        figures: RunFigures | None,
        device_bytes: int,
        hardware: str = "",
    ) -> None:
        """Keep what a generation's steps took; a later word of the same generation replaces it.

        Nothing is kept of steps with inner steps, which estimates do not count.
        """
        if self._job.meta.on:
            return
        path = self.path(hardware)
        if path is None:
            if not self._warned:
                log.warning("what steps take is not kept: no node tells which GPUs it has")
            self._warned = True
            return
        named = hardware_here() if self._device == "cpu" else hardware
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
            self._write(path, named, measure)

    def _write(self, path: Path, hardware: str, measure: RunMeasure) -> None:
        """Replace the file; of two runs that write at a time the last one's measure is kept."""
        known = load(path) or CalibrationHistory(device=self._device, hardware=hardware)
        text = known.with_measure(measure).model_dump_json(indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
        except OSError as error:
            log.warning("what was measured is not kept in %s: %s", path, error)
