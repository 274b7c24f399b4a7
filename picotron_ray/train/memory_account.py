"""Account of one step's memory, by class: what an engine's tensors are, and what the step makes besides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from picotron_ray.checkpoint.torch_state import StateTensor
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.parallel.memory.trace import MemoryAccount, MemoryTrace
from picotron_ray.train.engine import Engine

T = TypeVar("T")


def untraceable(job: JobConfig) -> str:
    """Reason why steps of a job cannot be traced; empty: they can."""
    kernels = job.kernels
    compiled = kernels.compile is True or "compiled" in (kernels.norm, kernels.activation)
    if compiled:
        return "compiled code runs no operators that could be counted"
    if kernels.cuda_graphs:
        return "a graph that is replayed runs no operators that could be counted"
    return ""


def accounted_step(engine: Engine, body: Callable[[Callable[[str], None]], T]) -> tuple[T, MemoryAccount]:
    """Take one step under a trace.

    Args:
        engine: whose step it is; it has taken one before.
        body: takes the step. It is given a function that hears of each phase.

    Returns:
        What ``body`` returned, and the account.
    """
    trace = MemoryTrace(held(engine))
    with trace:
        found = body(trace.phase)
    return found, trace.account(held(engine))


def held(engine: Engine) -> dict[str, list[Tensor]]:
    """Tensors that an engine has between two steps, by class of memory."""
    weights = [*_tensors(engine.weights()), *engine.compute_weights.copies]
    storages = {tensor.untyped_storage()._cdata for tensor in weights}
    state = [t for t in _tensors(engine.state()) if t.untyped_storage()._cdata not in storages]
    return {"weights": weights, "gradient": list(_tensors(engine.gradients())), "optimizer": state}


def held_bytes(engine: Engine) -> dict[str, int]:
    """Bytes of what an engine has between two steps, by class; several views of a storage count once."""
    return {kind: _bytes(tensors) for kind, tensors in held(engine).items()}


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _tensors(items: Iterable[StateTensor]) -> Iterator[Tensor]:
    for item in items:
        held: Any = item.tensor
        for part in (held,) if isinstance(held, Tensor) else (held.codes, held.scales):
            yield part.to_local() if hasattr(part, "to_local") else part
