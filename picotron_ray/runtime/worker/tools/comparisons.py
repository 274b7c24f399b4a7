"""Looks at one step for ranks that differ (``debug NAME inconsistency``), and for races (``... race``).

Both work on the step at hand and, at the boundary after it, on held-out rows. All ranks take part at once,
since passes may communicate; so what fails here on one rank ends the generation, as a failed step does.
Nothing of the state is changed: gradients are cleared by the next step, as after any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from picotron_ray.checkpoint.torch_state import StateTensor
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.data.dataset import DataSplits
from picotron_ray.runtime.worker.tools.layer_hashes import Hashed, LayerHashes
from picotron_ray.train.engine import Engine
from picotron_ray.train.tensor_hash import tensor_hash, tensor_hashes

RUNS = 2
"""Times that a race is looked for by the same passes."""


class StepComparison:
    """Recording of one step, told in one JSON file; what it notes is up to its two kinds.

    Fields:
        together: all ranks communicate in it, so an error of one may not be swallowed.
    """

    together = True

    def __init__(self, job: JobConfig, engine: Engine, data: DataSplits) -> None:
        self._held: Engine | None = engine
        self._data = data
        self._compiled = engine.job.kernels.compile is True
        self._found: dict[str, Any] = {}

    @property
    def _engine(self) -> Engine:
        assert self._held is not None, "asked before it is stopped"
        return self._held

    def prepare(self) -> None:
        """Nothing is to be prepared."""

    def start(self) -> None:
        """Begin with the next step."""

    def begin(self, step: int) -> None:
        """Hear that the step begins."""
        self._found["step"] = step

    def end(self, step: int) -> None:
        """Hear that the step has ended."""

    def stop(self) -> None:
        """Let go of the engine, which its generation throws away."""
        self._held = None

    def save(self, path: Path, limit_bytes: int) -> Mapping[str, Any]:
        """Write what was found."""
        data = json.dumps(self._found)
        if len(data) > limit_bytes:
            raise ValueError(f"saw {len(data)} bytes of hashes, expected at most {limit_bytes}")
        path.write_text(data)
        return {"step": self._found["step"]}

    def _rows(self, replica: int) -> StepBatch:
        """Held-out rows of a data-parallel replica, of the shape of a step's."""
        samples = self._data.global_batch
        return self._data.eval_batches(self._engine.layout, replica, samples)[0]

    def _hashes(self) -> LayerHashes:
        return LayerHashes(self._engine, compiled=self._compiled)


class InconsistencyProbe(StepComparison):
    """Hashes of what ranks hold alike before and after a step, of its gradients, and of activations.

    Activations are those of the same held-out rows on all replicas, whose own rows differ.
    """

    def begin(self, step: int) -> None:
        """Note the state before the step."""
        super().begin(step)
        self._found["before"] = _of_state(self._engine.replicated())

    def end(self, step: int) -> None:
        """Note its gradients, the state after it, and the activations of the same rows everywhere."""
        engine, layout = self._engine, self._engine.layout
        self._found["gradients"] = _of_state(engine.replicated_gradients())
        self._found["after"] = _of_state(engine.replicated())
        if len(set(layout.replica_rows)) > 1:
            self._found["activations"] = None  # replicas compute on other shapes, and so with other kernels
            return
        hashes = self._hashes()
        try:
            engine.evaluate([self._rows(0)])
            forward, _ = hashes.take()
        finally:
            hashes.close()
        self._found["activations"] = [(self._place(), name, value) for name, value in forward]

    def _place(self) -> str:
        """Name the ranks that see the same activations, where all replicas are fed the same rows."""
        layout, rank = self._engine.layout, self._engine.rank
        at = layout.coordinates(rank)
        return f"activations:{at.pp},{at.cp},{at.tp},{layout.expert_index(rank) if layout.ep > 1 else -1}"


class RaceProbe(StepComparison):
    """Passes that are run twice on the same rows and state, and sums of gradients that are watched.

    The sums of the step itself are watched too.
    """

    def begin(self, step: int) -> None:
        """Watch sums from here on."""
        super().begin(step)
        self._found |= {"writes": [], "runs": []}
        self._when = "the step"
        self._engine.watch_sums(tensor_hash, self._written)

    def _written(self, place: str) -> None:
        self._found["writes"].append((self._when, place))

    def end(self, step: int) -> None:
        """Run the same passes twice."""
        rows = self._rows(self._engine.layout.coordinates(self._engine.rank).dp)
        hashes = self._hashes()
        try:
            for number in range(1, RUNS + 1):
                self._when = f"run {number}"
                self._found["runs"].append(self._run(hashes, rows))
        finally:
            hashes.close()
            self._engine.watch_sums(None)

    def _run(self, hashes: LayerHashes, rows: StepBatch) -> dict[str, Hashed]:
        engine = self._engine
        loss = engine.forward_backward(rows)
        engine.reduce()
        forward, backward = hashes.take()
        gradients = engine.gradients()
        values = tensor_hashes([_live(tensor) for tensor in gradients])
        summed = [(tensor.shard.name, value) for tensor, value in zip(gradients, values, strict=True)]
        total = tensor_hash(loss)
        return {"forward": [*forward, ("loss", int(total))], "backward": backward, "gradients": summed}

    def stop(self) -> None:
        """Watch no longer."""
        if self._held is not None:
            self._held.watch_sums(None)
        super().stop()


def _of_state(parts: list[tuple[str, StateTensor]]) -> list[tuple[str, str, int]]:
    """Keys, names and hashes of a rank's tensors."""
    held = [(key, tensor) for key, tensor in parts if tensor.shard.box.numel]
    values = tensor_hashes([_live(tensor) for _, tensor in held])
    return [(key, tensor.shard.name, value) for (key, tensor), value in zip(held, values, strict=True)]


def _live(tensor: StateTensor) -> torch.Tensor:
    assert isinstance(tensor.tensor, torch.Tensor)
    return tensor.tensor.detach()
