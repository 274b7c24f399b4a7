"""Scripted faults that the coordinator carries out: its own, and those of whole nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from picotron_ray.config.schema.chaos import ChaosFault
from picotron_ray.runtime.chaos.faults import FAULTS, NodeFault, Nodes, ProcessFault


class CoordinatorChaos:
    """Strikes once the run has reached the step that a fault names, or in the midst of a commit."""

    def __init__(
        self,
        faults: tuple[ChaosFault, ...],
        claim: Callable[[int], bool],
        nodes: Nodes,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """
        Args:
            claim: whether fault ``index`` is to strike now; writes to storage.
            spawn: runs a task on the coordinator's loop.
        """
        ours = {i: f for i, f in enumerate(faults) if not f.target.startswith("worker:")}
        self._in_commits = {i: f for i, f in ours.items() if f.phase == "commit"}
        self._at_steps = {i: f for i, f in ours.items() if f.phase != "commit"}
        self._claim, self._nodes, self._spawn = claim, nodes, spawn

    def reached(self, step: int) -> None:
        """Strike all that is due at ``step``; on the loop's thread."""
        for index, fault in list(self._at_steps.items()):
            if step >= fault.step:
                del self._at_steps[index]
                self._spawn(self._strike_once(index, fault))

    async def _strike_once(self, index: int, fault: ChaosFault) -> None:
        if await asyncio.to_thread(self._claim, index):
            self._strike(fault)

    def committing(self, step: int) -> None:
        """Strike between the manifest of ``step`` and its log entry; on the storage's thread."""
        for index, fault in self._in_commits.items():
            if step >= fault.step and self._claim(index):
                self._strike(fault)

    def _strike(self, fault: ChaosFault) -> None:
        kind = FAULTS[fault.fault]
        if isinstance(kind, ProcessFault):
            kind.strike()
        else:
            assert isinstance(kind, NodeFault), "the config lets no other fault target a node"
            kind.strike(self._nodes, int(fault.target.removeprefix("node:")))
