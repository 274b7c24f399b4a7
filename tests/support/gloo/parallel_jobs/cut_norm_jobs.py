"""Jobs of the tests of a norm over a cut width."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_ray.comm.all_reduce import Group
from picotron_ray.models.layers.rms_norm import RMSNorm
from picotron_ray.parallel.shard_boxes import chunk
from picotron_ray.parallel.tensor.tensor_parallel import apply_tensor_parallel
from tests.support.gloo.pool import Job

EPS = 1e-3


def operands(width: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Input ``[2, 5, width]``, weight, and the gradient of the output: the same in every process."""
    generator = torch.Generator().manual_seed(width)
    x, up = (torch.randn(2, 5, width, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.rand(width, generator=generator, dtype=torch.float64) + 0.5
    return x.to(dtype), weight, up.to(dtype)


def whole(width: int) -> list[Tensor]:
    """Output and gradients of x and weight, by torch's operator over the whole width in fp64."""
    x, weight, up = operands(width)
    x.requires_grad_(), weight.requires_grad_()
    found = F.rms_norm(x, [width], weight, EPS)
    return [found.detach(), *torch.autograd.grad(found, (x, weight), up)]


def part(group: Group, width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The same of this rank's columns, by a module that tensor parallelism cut."""
    x, weight, up = operands(width, dtype)
    start, count = chunk(width, group.size(), group.rank())
    x, weight, up = (tensor.narrow(-1, start, count).contiguous() for tensor in (x, weight, up))
    with torch.device("meta"):
        model = nn.ModuleDict({"norm": RMSNorm(width, EPS)})
    assert apply_tensor_parallel(model, group, [("norm", "cut_norm")]) == (1, 0)
    norm = model["norm"]
    assert norm.weight.shape == (count,)
    norm.weight = nn.Parameter(weight.to(torch.promote_types(dtype, torch.float32)))
    x.requires_grad_()
    found = norm(x)
    kept = torch.autograd.grad(found, (x, norm.weight), up, retain_graph=True)
    again = torch.autograd.grad(found, (x, norm.weight), up)  # as schedules that split the backward pass do
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    return [found.detach(), *again]


def in_processes(job: Job, width: int, dtype: str) -> list[Any]:
    """`part`, with the group of all ranks."""
    groups = job.groups()
    groups.connect()
    try:
        found = part(torch.distributed.group.WORLD, width, getattr(torch, dtype))
        return [(tensor.dtype == getattr(torch, dtype), tensor.double().numpy()) for tensor in found]
    finally:
        groups.close()
