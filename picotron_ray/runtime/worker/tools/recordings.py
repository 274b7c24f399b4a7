"""Recordings by the name that a person gives."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.dataset import DataSplits
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.worker.tools.comparisons import InconsistencyProbe, RaceProbe
from picotron_ray.runtime.worker.tools.profiler import OnPhase, Profile
from picotron_ray.runtime.worker.tools.step_times import StepSeconds
from picotron_ray.runtime.worker.tools.traces import MemoryRecording, PythonTrace
from picotron_ray.runtime.worker.tools.window import Recording
from picotron_ray.train.engine import Engine

COMPARISONS = {"inconsistency": InconsistencyProbe, "race": RaceProbe}
Listen = Callable[[str, OnPhase | None], None]


def recording_of(
    order: Mapping[str, Any],
    job: JobConfig,
    device: torch.device,
    listen: Listen,
    telemetry: Path | None,
    engine: Engine,
    data: DataSplits | None,
) -> Recording:
    """Return what records as an order asks.

    Args:
        data: of the run, whose held-out rows some look at; None: it has none.

    Raises:
        ConfigError: it asks for what this version does not know.
    """
    kind = order["kind"]
    hear = partial(listen, kind)
    if kind == "profile":
        return Profile(device, hear, telemetry, shapes=order["shapes"], stacks=order["stacks"])
    if kind == "times":
        return StepSeconds()
    if kind == "memory":
        return MemoryRecording(partial(memory_bytes, device), hear)
    if kind in COMPARISONS and data is not None:
        return COMPARISONS[kind](job, engine, data)
    if kind in ("call", "line"):
        return PythonTrace(lines=kind == "line", model_file=_model_file(job))
    raise ConfigError(f"trace: saw {kind!r}, expected call, line or memory")


def memory_bytes(device: torch.device) -> dict[str, float]:
    """Bytes of a device's allocator, or of this process where it is a CPU."""
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        return {"allocated": allocated, "reserved": torch.cuda.memory_reserved(device)}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"resident": pages * os.sysconf("SC_PAGE_SIZE")}


def _model_file(job: JobConfig) -> str:
    """File of a model of the user's own; empty where there is none, or it is not found."""
    import sys

    builder = job.model.builder or ""
    module = sys.modules.get(builder.partition(":")[0])
    if module is None:
        return ""
    try:
        return inspect.getfile(module)
    except TypeError:
        return ""
