"""Calibration of a run by earlier ones on its cluster, and of later ones by it: the shell's part of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.calibration import CALIBRATION
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.runtime.calibration_store import CalibrationStore
from picotron_ray.runtime.coordinator.run_record import RunRecord

if TYPE_CHECKING:
    from picotron_ray.runtime.ray_cluster.placement import NodeView


def hardware_of(names: Iterable[str]) -> str:
    """Name of the GPUs of several nodes; empty: none is known.

    >>> hardware_of(["NVIDIA H100", "", "NVIDIA A100", "NVIDIA H100"])
    'NVIDIA A100 and NVIDIA H100'
    """
    return " and ".join(sorted(set(names) - {""}))


NOT_MEASURED = {
    "cuda": "no run was measured on this hardware yet: estimates of seconds are by assumed rates",
    "cpu": "no run was measured on this hardware yet: seconds and GB/s of plans are guesses of one digit;"
    " this run measures them, and `picotron-ray probe` does for `picotron-ray plan`",
}
"""What is said once where plans go by no measurement, by device."""


class Calibrations:
    """Reads the history of measured runs at a term's beginning, and adds to it."""

    def __init__(
        self,
        job: JobConfig,
        device: str,
        record: RunRecord,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        nodes: Callable[[], Sequence[NodeView]],
    ) -> None:
        """``spawn``: runs a coroutine beside the loop's other work; ``nodes``: as Ray has them."""
        self._store, self._device = CalibrationStore(job, device), device
        self._record, self._spawn, self._nodes = record, spawn, nodes

    async def begin(self, event: m.Begin) -> m.Begin:
        """The event with the factors that the history gives; they are told."""
        sizes = [traits.device_bytes for traits in event.traits if traits.device_bytes]
        path = await asyncio.to_thread(self._path, event.traits)
        found = await asyncio.to_thread(self._store.correction, path, min(sizes, default=0))
        text = f"estimates are corrected by {found.factors}: {found.why} ({path})"
        if not found.why:
            text = NOT_MEASURED[self._device]
        self._record.note("info", CALIBRATION, text)
        return replace(event, calibration=found.factors)

    def _path(self, traits: Sequence[m.NodeTraits]) -> Path | None:
        """History of the hardware; by Ray's word, where no agent was heard yet."""
        path = self._store.path(hardware_of(one.hardware for one in traits))
        if path is not None or traits:
            return path
        kinds = {node.accelerator for node in self._nodes()} - {""}
        return self._store.like(kinds.pop()) if len(kinds) == 1 else None

    def observe(self, memory: MachineMemory, event: m.Event, commands: Sequence[m.Command]) -> None:
        """Keep what the running generation's steps take, whenever that is told."""
        told = [c.data for c in commands if isinstance(c, m.Alert) and c.kind == CALIBRATION]
        spec, known = memory.spec, memory.figures
        if spec is None:
            return
        figures = known.figures if known is not None and known.generation == spec.id else None
        if isinstance(event, m.Measured) and figures is not None and figures.steps and event is known:
            self._keep(memory, spec, figures.step_s, figures)
        elif told:
            self._keep(memory, spec, told[0]["measured_s"], figures)

    def _keep(
        self, memory: MachineMemory, spec: m.GenerationSpec, step_s: float, figures: m.RunFigures | None
    ) -> None:
        nodes = [memory.roster.nodes.get(member.node) for member in spec.members]
        device_bytes = min((node.device_bytes for node in nodes if node and node.device_bytes), default=0)
        hardware = hardware_of(node.hardware for node in nodes if node)
        add = partial(self._store.add, spec, step_s, figures, device_bytes, hardware)
        self._spawn(asyncio.to_thread(add))
