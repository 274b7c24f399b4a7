"""Recording of steps by torch's profiler: operators, kernels, memory; shapes and stacks where asked for.

Steps and phases are marked in the trace by their names. The trace is written as the profiler gives it and
then compressed, on disk and not in the memory file system of snapshots.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, _KinetoProfile  # type: ignore[attr-defined]

from picotron_ray.runtime.telemetry_page import read_rows

AN_EVENT_BYTES = 450
"""Of one event in a trace, at most about."""
STEP = "ProfilerStep#"
"""Name of a step's range, as the TensorBoard plugin looks for."""
OnPhase = Callable[[int, str], None]


class Profile:
    """Profile of one rank.

    Args:
        listen: has a function hear of each phase; None ends that.
        telemetry: path of the page with the rank's steps; None: none is kept.
    """

    def __init__(
        self,
        device: torch.device,
        listen: Callable[[OnPhase | None], None],
        telemetry: Path | None,
        *,
        shapes: bool,
        stacks: bool,
    ) -> None:
        self._cuda, self._listen, self._telemetry = device.type == "cuda", listen, telemetry
        self._shapes, self._stacks = shapes, stacks
        self._profile: _KinetoProfile | None = None
        self._recording = False
        self._step: record_function | None = None
        self._phase: record_function | None = None
        self._steps: list[int] = []

    def prepare(self) -> None:
        """Get the profiler ready."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile = _KinetoProfile(
            activities=activities, record_shapes=self._shapes, profile_memory=True, with_stack=self._stacks
        )
        self._profile.prepare_trace()

    def start(self) -> None:
        """Begin to record."""
        assert self._profile is not None
        self._profile.start_trace()
        self._recording = True
        self._listen(self._entered)

    def begin(self, step: int) -> None:
        """Mark a step."""
        self._steps.append(step)
        self._step = record_function(f"{STEP}{step}")
        self._step.__enter__()

    def _entered(self, step: int, phase: str) -> None:
        self._leave_phase()
        self._phase = record_function(phase)
        self._phase.__enter__()

    def _leave_phase(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def end(self, step: int) -> None:
        """Mark the end of a step."""
        self._leave_phase()
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def stop(self) -> None:
        """Stop recording."""
        self._listen(None)
        self.end(-1)
        if self._recording and self._profile is not None:
            self._recording = False
            self._profile.stop_trace()

    def save(self, path: Path, limit_bytes: int) -> Mapping[str, Any]:
        """Write the trace, compressed.

        Raises:
            ValueError: there are too many events for ``limit_bytes``, or for the disk.
        """
        assert self._profile is not None
        profiler: Any = self._profile.profiler
        events = len(profiler.kineto_results.events())
        self._refuse_large(events * AN_EVENT_BYTES, limit_bytes, path.parent)
        with tempfile.TemporaryDirectory(prefix="trace-", dir=path.parent) as folder:
            raw = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(raw))
            self._profile = None
            with raw.open("rb") as source, gzip.open(path, "wb", 3) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            raw_bytes = raw.stat().st_size
        return {"events": events, "raw_bytes": raw_bytes, "rows": self._rows()}

    def _refuse_large(self, estimate: int, limit_bytes: int, folder: Path) -> None:
        most = min(limit_bytes, shutil.disk_usage(folder).free // 2)
        if estimate > most:
            raise ValueError(
                f"the trace has about {estimate >> 20} MiB, expected at most {most >> 20}: record fewer"
                " steps, or leave stacks out with --no-stacks"
            )

    def _rows(self) -> list[dict[str, Any]]:
        """Rows of telemetry of the recorded steps."""
        page = None if self._telemetry is None else read_rows(self._telemetry)
        rows = () if page is None else page.rows
        return [
            {
                "step": row.step,
                "step_s": row.step_s,
                "phase_s": list(row.phase_s),
                "waits_seen": row.waits_seen,
                "peak_bytes": row.memory.peak,
                "device_bytes": row.memory.device,
                "allocated_bytes": row.memory.allocated,
                "reserved_bytes": row.memory.reserved,
            }
            for row in rows
            if row.step in self._steps
        ]
