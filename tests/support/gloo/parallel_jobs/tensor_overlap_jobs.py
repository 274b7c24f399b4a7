"""What processes do in the tests of overlapped tensor parallelism, and what is broken on purpose."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from picotron_ray.comm.sequence_collectives import Shift
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.tensor import ring_overlap, symmetric_memory
from picotron_ray.parallel.tensor.overlap import overlapped_products
from picotron_ray.parallel.tensor.ring_overlap import RingOverlap
from picotron_ray.parallel.tensor.symmetric_memory import SymmetricOverlap
from picotron_ray.parallel.tensor.tensor_parallel import _Gather, _ReduceScatter
from picotron_ray.train import build_stages
from picotron_ray.train.engine import build_engine
from tests.support.gloo.faults import replace
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, Result, batch, run_layout
from tests.support.gloo.pool import Job

WIDTHS = (6, 4, 2)


def in_a_generation(job: Job, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(group, ...)`` with the group of all ranks."""
    groups = job.groups()
    groups.connect()
    try:
        return function(torch.distributed.group.WORLD, *arguments)
    finally:
        groups.close()
        gc.collect()


def unfused(job: Job | None = None) -> Callable[[], None]:
    """Let symmetric memory's operators run on CPUs as in torch's test mode: a collective and a product."""
    import torch.distributed._symmetric_memory as torchs

    library = torch.library.Library("symm_mem", "IMPL")
    operators = {"fused_all_gather_matmul": torchs._fused_all_gather_matmul}
    operators["fused_matmul_reduce_scatter"] = torchs._fused_matmul_reduce_scatter
    for name, operator in operators.items():
        library.impl(name, operator, "CPU")
    mode = torchs._test_mode()
    mode.__enter__()

    def undo() -> None:
        mode.__exit__(None, None, None)
        library._destroy()

    return undo


def made(kind: str, group: Any) -> tuple[Any, Callable[[], None]]:
    """An overlap, and what ends it; symmetric memory in torch's test mode, taken for fused."""
    if kind == "ring":
        return RingOverlap(group), lambda: None
    undo, undo_fused = unfused(), replace(symmetric_memory, "FUSED", frozenset())
    overlap = SymmetricOverlap(group, CPU)
    return overlap, lambda: (overlap.close(), undo_fused(), undo())  # type: ignore[func-returns-value]


def both_ways(job: Job, kind: str, biased: bool, rows: int, low: bool) -> list[tuple[float, float]]:
    """Distances of results and gradients from those of plain collectives and linear layers in full precision.

    Of those layers themselves, and of the overlap; ``low``: both under autocast.
    """
    return in_a_generation(job, _both_ways, kind, biased, rows, low)


def _both_ways(group: Any, kind: str, biased: bool, rows: int, low: bool) -> list[tuple[float, float]]:
    dtype, rank = torch.float32 if low else torch.float64, group.rank()
    torch.manual_seed(rank)
    x = torch.randn(rows, 3, 8, dtype=dtype)
    weights = [torch.randn(width, 8, dtype=dtype) for width in WIDTHS]
    biases = [torch.randn(width, dtype=dtype) for width in WIDTHS] if biased else [None] * len(WIDTHS)
    down = torch.randn(8, sum(WIDTHS), dtype=dtype)
    leaves = [x, *weights, *(bias for bias in biases if bias is not None), down]
    overlap, end = made(kind, group)
    means = overlapped_products(overlap, compiled=False)

    def plainly(y: Tensor) -> list[Tensor]:
        whole = _Gather.apply(y, group)
        return [F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    plain = (plainly, lambda y: _ReduceScatter.apply(F.linear(y, down), group))
    overlapped = (lambda y: means.products(y, weights, biases), lambda y: means.scattered(y, down))
    found = []
    for (first, last), cast in ((plain, False), (plain, low), (overlapped, low)):
        for leaf in leaves:
            leaf.requires_grad_().grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            middle = first(x)
            out = last(torch.cat([y.sin() for y in middle], dim=-1))
        (out.float() if low else out).square().sum().backward()
        found.append([*(y.detach() for y in middle), out.detach(), *(leaf.grad for leaf in leaves)])
    end()
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(*found[1:], strict=True))
    return [
        tuple(float((x - expected).norm() / expected.norm()) for x in others)
        for expected, *others in zip(*found, strict=True)
    ]


class Events(TorchDispatchMode):
    """Sends, waits and products in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split("::")[1].split(".")[0] in ("mm", "addmm", "addmm_"):
            self.seen.append("product")
        return func(*args, **(kwargs or {}))

    def recorded(self) -> Callable[[], None]:
        """Note the shifts too; returns what undoes it."""
        seen = self.seen

        class Noted(Shift):
            def __init__(self, *arguments: Any, **named: Any) -> None:
                seen.append(f"send {id(self)}")
                super().__init__(*arguments, **named)

            def wait(self) -> Tensor:
                seen.append(f"wait {id(self)}")
                return super().wait()

        return replace(ring_overlap, "Shift", Noted)


def order(job: Job) -> list[list[str]]:
    """Events of gather and scatter, forward and backward."""
    return in_a_generation(job, _order)


def _order(group: Any) -> list[list[str]]:
    means, found = overlapped_products(RingOverlap(group), compiled=False), []
    x, weights = torch.randn(1, 4, 8, requires_grad=True), [torch.randn(6, 8, requires_grad=True)] * 2
    down = torch.randn(8, 6, requires_grad=True)

    def noted(call: Callable[[], Any]) -> Any:
        events = Events()
        undo = events.recorded()
        with events:
            result = call()
        undo()
        found.append(events.seen)
        return result

    first, _ = noted(lambda: means.products(x, weights, [None, None]))
    noted(lambda: first.sum().backward())
    inner = torch.randn(1, 4 * group.size(), 6, requires_grad=True)
    out = noted(lambda: means.scattered(inner, down))
    noted(lambda: out.sum().backward())
    return found


def kept(job: Job, config: JobConfig, layout: Layout) -> int:
    """Bytes that forward keeps for backward, parameters aside."""
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    engine.initialise(config.seed)
    storages: dict[int, torch.UntypedStorage] = {}
    own = {p.data_ptr() for model in engine._models.values() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.forward_backward(batch(config, layout, 0, 1))
    engine.close()
    groups.close()
    gc.collect()
    return sum(storage.nbytes() for storage in storages.values())


def shifts(job: Job, configs: list[JobConfig], layout: Layout) -> tuple[Result, int]:
    """Training, and how many transfers round the ring of tensor parallelism it took."""
    events = Events()
    undo = events.recorded()
    try:
        (result,) = run_layout(job, configs, layout)
    finally:
        undo()
    return result, sum(event.startswith("send") for event in events.seen)


def run_unfused(job: Job, configs: list[JobConfig], layout: Layout, refuse: bool) -> list[Result]:
    """Training over symmetric memory in torch's test mode; ``refuse``: as on a device that did not fuse."""
    undos = [unfused(), replace(build_stages, "overlap_problem", lambda job, device: None)]
    if not refuse:
        undos.append(replace(symmetric_memory, "FUSED", frozenset()))
    try:
        return run_layout(job, configs, layout)
    finally:
        for undo in reversed(undos):
            undo()


def drop_part() -> Callable[[], None]:
    """Of what comes last round the ring nothing arrives."""
    plain = ring_overlap.RingOverlap._parts

    def parts(self: Any, x: Tensor) -> Any:
        for step, (source, part) in enumerate(plain(self, x)):
            yield source, part * (step < self._ranks - 1)

    return replace(ring_overlap.RingOverlap, "_parts", parts)


def exchange_parts() -> Callable[[], None]:
    """Parts are put where those of the next rank belong."""
    plain = ring_overlap.RingOverlap._parts

    def parts(self: Any, x: Tensor) -> Any:
        for source, part in plain(self, x):
            yield (source + 1) % self._ranks, part

    return replace(ring_overlap.RingOverlap, "_parts", parts)


def forget_sum() -> Callable[[], None]:
    """A rank passes on its own share alone."""
    return replace(ring_overlap, "_added", lambda coming, share: share + (coming.wait() * 0 if coming else 0))


def exchange_targets() -> Callable[[], None]:
    """A rank adds its share of another rank's tokens."""
    plain = ring_overlap.RingOverlap._share
    return replace(
        ring_overlap.RingOverlap,
        "_share",
        lambda self, xs, factors, target: plain(self, xs, factors, (target + 1) % self._ranks),
    )


PLANTS = {
    "dropped": drop_part,
    "order": exchange_parts,
    "sum": forget_sum,
    "target": exchange_targets,
}
