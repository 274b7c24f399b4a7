"""Training step for the benchmarks: our engine's, and one written by hand in plain PyTorch.

What the benchmarks compare: both train the same model on the same batches (`Replica`), and both clip.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from picotron_ray.bench.recovery.peers.replica import Replica
from picotron_ray.data.batch import StepBatch
from picotron_ray.parallel.memory.trace import MemoryAccount
from picotron_ray.train.engine import Engine
from picotron_ray.train.memory_account import accounted_step
from picotron_ray.train.optim.lr_schedule import learning_rate
from picotron_ray.train.passes import OnPhase, silent
from picotron_ray.train.training_state import MadeWeights


class Training(Protocol):
    """Training on one batch after the other."""

    def step(self, batch: StepBatch, on_phase: OnPhase = silent) -> float | Tensor:
        """Take one step; returns this rank's loss, of whatever scale. ``on_phase`` gets each phase's name."""

    def close(self) -> None:
        """Release the process groups."""


class EngineTraining:
    """The service's own step (`train.loop.Loop`) without exchange, ledger line and snapshot."""

    def __init__(self, engine: Engine, made: MadeWeights | None = None) -> None:
        """
        Args:
            made: see `Engine.initialise`.
        """
        self._engine = engine
        engine.initialise(engine.job.seed, made=made)

    def step(self, batch: StepBatch, on_phase: OnPhase = silent) -> Tensor:
        engine = self._engine
        loss, _ = engine.gradients_of(batch, on_phase)
        on_phase("optimizer")
        engine.optimizer_step(learning_rate(engine.job.optimizer, batch.step, engine.job.steps))
        return loss

    @property
    def applied(self) -> list[str]:
        """Phrases for what the engine computes with."""
        return list(self._engine.applied)

    def accounted(self, batch: StepBatch) -> MemoryAccount:
        """Take one step, not the first, and account its memory."""
        _, account = accounted_step(self._engine, lambda phase: self.step(batch, phase))
        return account

    def close(self) -> None:
        self._engine.close()


class PlainTraining:
    """The replica's model, in DistributedDataParallel where there are several, and torch's AdamW."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._model: nn.Module = replica.model
        if dist.is_initialized():
            self._model = DistributedDataParallel(replica.model)

    def step(self, batch: StepBatch, on_phase: OnPhase = silent) -> Tensor:
        replica = self._replica
        replica.set_rate(batch.step)
        replica.optimizer.zero_grad()
        losses = []
        for number in range(len(batch.tokens)):
            with self._unsynchronised(last=number == len(batch.tokens) - 1):
                loss = replica.loss(self._model, batch, number)
                loss.backward()
            losses.append(loss.detach())
        replica.clip()
        replica.optimizer.step()
        return torch.stack(losses).sum()

    def _unsynchronised(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Skip the averaging of gradients but for the last micro-batch."""
        if last or not isinstance(self._model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._model.no_sync()

    def close(self) -> None:
        del self._model
