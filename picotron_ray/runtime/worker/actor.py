"""The worker's actor class, thin and free of torch until the worker's process starts.

The coordinator imports it to start workers. A coordinator and agents that never import torch start a second
sooner and stay 250 MB smaller each.
"""

from __future__ import annotations

from typing import Any

from picotron_ray.coordinator.messages import GenerationSpec, Outcome


class WorkerActor:
    """Actor that passes every call to ``runtime.worker.Worker``, imported in the worker's own process."""

    def __init__(self, *arguments: Any) -> None:
        from picotron_ray.runtime.worker.worker import Worker

        self._worker = Worker(*arguments)

    def ready(self) -> str:
        return self._worker.ready()

    def run_generation(self, term: int, spec: GenerationSpec, store: tuple[str, int] | None) -> Outcome:
        return self._worker.run_generation(term, spec, store)

    def interrupt(self, term: int, generation: tuple[int, int], mode: str) -> bool:
        return self._worker.interrupt(term, generation, mode)

    def committed(self, term: int, generation: tuple[int, int], step: int) -> bool:
        return self._worker.committed(term, generation, step)
