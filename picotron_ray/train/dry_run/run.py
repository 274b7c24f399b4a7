"""A dry run: one rank's real engine stepped with fake tensors, what it does counted, nothing computed.

``FakeTensorMode`` gives every operator's result its shape, dtype and storage but no memory, and torch's fake
process group answers every collective at once, so that one process stands for one rank of any layout. The
engine is the one that trains: its stages, hooks, schedule, reduction, clipping, the exchange that ends a
step, and the optimizer's update.

What is not as in training, and named here:

- every value that the host reads from a tensor (loss, norms) is 1, and a mixture's router spreads tokens
  evenly over its experts (`even_routes`),
- kernels are those of the CPU, but for sums that products are added to (`parallel.precision.wide_sums`),
- workspaces inside kernels and the allocator's rounding are not seen.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.fast_path import settled
from picotron_ray.data.batch import StepBatch, batch_shape
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.mesh import Mesh, make_mesh
from picotron_ray.parallel.precision import wide_sums
from picotron_ray.train.dry_run.call_order import Call
from picotron_ray.train.dry_run.even_routes import routes_are_even
from picotron_ray.train.dry_run.step_counter import StepCounter
from picotron_ray.train.engine import Engine
from picotron_ray.train.step_sync import Contribution, gather, to_host

WORLD = "world"
"""Axis of what all ranks do together."""
STEPS = 2  # the second one has the moments, gradients and buffers that the first one leaves


@dataclass(frozen=True, slots=True)
class DryRun:
    """Bytes, calls, kernels and reads of one rank in a step.

    Fields:
        peak_bytes: storage alive at most, from the engine's first tensor on.
        by_class: the parts of it that live on after a step, ``weights``, ``gradients`` and ``optimizer``,
            and what is left: ``activations``, gathered weights and temporaries.
        setup: operations between ranks that make the groups, once a generation.
        calls: those of a step, in order.
        kernels: numbers of operators that launch at least one kernel, by name.
        reads: times that the host reads a value from the device, by place in the code.
    """

    peak_bytes: int
    by_class: dict[str, int]
    calls: tuple[Call, ...]
    kernels: dict[str, int]
    reads: dict[str, int]
    setup: tuple[Call, ...] = ()

    @property
    def all_calls(self) -> tuple[Call, ...]:
        """Operations of a communicator's whole life: `setup` and one step."""
        return self.setup + self.calls

    @property
    def sent_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes that the rank sends by axis of the mesh (``world``: all ranks) and type, as rings send them.

        A gather, a scatter or an exchange sends (n-1)/n of the whole buffer, an all-reduce twice that.
        """
        found: dict[str, dict[str, int]] = {}
        for call in self.calls:
            by_type = found.setdefault(call.axis or WORLD, {})
            by_type[call.dtype] = by_type.get(call.dtype, 0) + call.sent_bytes
        return found

    @property
    def sent_bytes_by_axis(self) -> dict[str, int]:
        """`sent_bytes` of all types."""
        return {axis: sum(by_type.values()) for axis, by_type in self.sent_bytes.items()}


def dry_run(job: JobConfig, layout: Layout, rank: int = 0, *, fake: bool = True) -> DryRun:
    """Step one rank's engine with fake tensors, and count.

    Args:
        fake: False computes with real tensors on the CPU, peers being fake all the same: their parts of
            gathered tensors hold whatever was there.

    Raises:
        LayoutError: the layout cannot be applied, or this process is in a process group already.
    """
    if dist.is_initialized():
        raise LayoutError("dry run: saw a process group, expected a process of its own without one")
    mode: Any = _fake_tensors(job.cluster.device) if fake else contextlib.nullcontext()
    with fake_world(layout, rank):
        with StepCounter({}) as made:
            mesh = make_mesh(layout, rank, "cpu")
        counter = StepCounter(_axes(mesh))
        with mode, counter, counter.reads.watching():
            found = _stepped(job, mesh, counter)
            by_ranks = {call.ranks: call.axis for call in found.calls}
            setup = (
                call._replace(axis=by_ranks[call.ranks]) for call in made.calls if call.ranks in by_ranks
            )
            return replace(found, setup=tuple(setup))


@contextlib.contextmanager
def _fake_tensors(kind: str) -> Iterator[None]:
    """Enter fake tensors, in which modules may be moved and cast, and sums widen as on a ``kind`` of device.

    torch refuses to swap a parameter that has weak references; those that its fake mode keeps do not mind.
    """
    unseen = SimpleNamespace(getweakrefs=lambda tensor: [])
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    widening = frozenset({"cpu"} if kind in wide_sums.WIDENING else ())  # where fake tensors are
    with (
        patch.object(torch.utils, "weakref", unseen),
        patch.object(wide_sums, "WIDENING", widening),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UserWarning)  # of gradients and addresses that fake tensors lack
        _forget_tables()
        try:
            with fake, routes_are_even():
                yield
        finally:
            _forget_tables()


def _forget_tables() -> None:
    """Empty the caches of models and parallel: fake tables (of rotary positions) would meet real tensors."""
    below = ("picotron_ray.models.", "picotron_ray.parallel.")
    for name, module in list(sys.modules.items()):
        if name.startswith(below):
            for member in list(vars(module).values()):
                if isinstance(member, functools._lru_cache_wrapper):
                    member.cache_clear()


def _stepped(job: JobConfig, mesh: Mesh, counter: StepCounter) -> DryRun:
    engine = Engine(settled(job, job.cluster.device), mesh, torch.device("cpu"))
    batch = token_batch(job, mesh.layout, mesh.at.dp)
    for _ in range(STEPS):
        counter.begin_step()
        _step(engine, batch)
    weights = _storages(item.tensor for item in engine.weights())
    moments = _storages(item.tensor for item in engine.state()) - weights
    gradients = _storages(engine._gradients.values) - weights
    living = counter.bytes
    by_class = {
        "weights": living.alive(weights),
        "gradients": living.alive(gradients),
        "optimizer": living.alive(moments),
    }
    by_class["activations"] = living.peak - sum(by_class.values())
    calls, kernels = tuple(counter.calls), dict(counter.kernels)
    found = DryRun(living.peak, by_class, calls, kernels, dict(counter.reads.found))
    engine.close()
    del engine
    gc.collect()
    return found


def _step(engine: Engine, batch: StepBatch) -> None:
    """Step as the loop does, up to what is on no device."""
    loss, norm = engine.gradients_of(batch)
    load = engine.expert_load()
    told = Contribution(loss, norm, imbalance=load.imbalance, dropped=load.dropped, step=batch.step)
    to_host(gather(told, engine.layout, engine.device))
    engine.optimizer_step(1e-3)


def token_batch(job: JobConfig, layout: Layout, dp_index: int) -> StepBatch:
    """Make rows of token 0, all of weight 1."""
    size, length = job.data.global_batch, job.data.sequence_length
    shape = batch_shape(layout, dp_index, size)
    tokens = np.zeros((*shape, length + 1), dtype=np.int64)
    return StepBatch(1, tokens, np.ones(shape), size * length, (0, shape[0] * shape[1]), bytes(16))


@contextlib.contextmanager
def fake_world(layout: Layout, rank: int) -> Iterator[None]:
    """Enter a fake process group of the layout's size as ``rank``."""
    if layout.world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _axes(mesh: Mesh) -> dict[str, str]:
    """Axis by the names under which a group is known to torch and to the mesh."""
    found = {name: name.split("-")[1] for name in mesh.names}
    for axis in ("copy", "edp", "ep", "cp", "shard", "data", "tp", "pp"):  # an alias yields to the axis
        group = mesh.group(axis)
        if group is not None:
            found[group.group_name] = axis
    return found


def _storages(tensors: Iterable[Any]) -> set[int]:
    found = set()
    for tensor in tensors:
        for part in (tensor,) if isinstance(tensor, Tensor) else (tensor.codes, tensor.scales):
            local = part.to_local() if hasattr(part, "to_local") else part
            found.add(local.untyped_storage()._cdata)
    return found
