"""Calls of an agent for a person's tools: orders to its node's workers, and what these recorded, in pages.

They decide nothing of the run, and any of the coordinator's terms is answered: who asks has it from an agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from picotron_ray.coordinator.messages import GenerationSpec
from picotron_ray.runtime.node_agent.debugger_calls import DebuggerCalls
from picotron_ray.runtime.ray_cluster.names import ledger_folder
from picotron_ray.runtime.worker.tool_names import SUFFIX

ANSWER_S = 30.0
PAGE_BYTES = 4 << 20


class ToolCalls(DebuggerCalls):
    """Part of the agent's actor, which runs its methods on threads of their own."""

    _folder: Path
    _newest_spec: Callable[[], GenerationSpec | None]
    _worker: Callable[[str], Any]

    def generation(self) -> GenerationSpec | None:
        """Return the newest generation that workers of this node were told to run."""
        return self._newest_spec()

    def tools(
        self, term: int, generation: tuple[int, int], orders: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """Have workers of this node carry out orders; their answers by worker.

        Args:
            orders: by worker.
        """
        asked: dict[str, Any] = {}
        found: dict[str, dict[str, Any]] = {}
        for worker, order in orders.items():
            try:
                asked[worker] = self._worker(worker).tool.remote(term, generation, order)
            except ValueError:
                found[worker] = {"refused": f"worker {worker} has ended"}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
        return found | {worker: _answer(worker, reference) for worker, reference in asked.items()}

    def recording(self, worker: str, offset: int) -> bytes:
        """Return a page of what a worker recorded; nothing at its end, or where there is none."""
        path = ledger_folder(self._folder) / f"{Path(worker).name}{SUFFIX}"
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(PAGE_BYTES)
        except FileNotFoundError:
            return b""


def _answer(worker: str, reference: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = ray.get(reference, timeout=0)
    except RayError as error:
        return {"refused": f"worker {worker} does not answer: {type(error).__name__}"}
    return found


def by_node(members: Sequence[tuple[int, str, str]]) -> dict[str, list[tuple[int, str]]]:
    """Ranks and workers by node, from (rank, worker, node)."""
    found: dict[str, list[tuple[int, str]]] = {}
    for rank, worker, node in members:
        found.setdefault(node, []).append((rank, worker))
    return found
