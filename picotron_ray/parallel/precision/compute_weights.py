"""Weights in 16 bits to compute with, beside fp32 masters, where no FSDP unit gathers them so.

In 16 bits are what products read, the residual stream and all transfers of both. The masters are what the
optimizer updates and checkpoints hold: in 16 bits they would lose small updates (Micikevicius et al. 2018,
Mixed Precision Training, section 3.1). Copies are filled from them once a step, not at each use.

FSDP does the same by its own policy (`parallel.data.fsdp`), and its parameters are left alone here. What it
does not hold (replicas, one rank, experts that no two ranks share) gets copies by this module, and not
torch's ``replicate`` with a policy or a unit over one rank, for these reasons:

- Their sums are FSDP's, which the reducers of `comm.reducers` (compressed, hierarchical, chosen while the run
  goes on) could not replace. A unit over one rank needs a process group, which a single process has not.
- Their hooks put other parameters into modules around each pass. These copies stay where they are. So a CUDA
  graph reads them at fixed addresses, and compiled code is not guarded by hooks.
- Names and order of parameters stay. A copy is the module's parameter; its master is known here alone.

A gradient is made in 16 bits by its product, and added up in the master's type over micro-batches and
replicas: a hook adds it to the master's as it arrives, in one pass over both, and the copy keeps none.
Autograd casts it first (``Tensor.grad_dtype``) for schedules that split the backward pass, which add
gradients up by themselves, and for fp8, whose products give some in fp32.

Routers stay as they are: a rounded score sends tokens elsewhere. Norms read weights in 16 bits and compute in
fp32. Rotary tables and losses are fp32 by themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from picotron_ray.parallel.precision.fp8 import GatherScales


class ComputeWeights:
    """Copies in the place of the parameters of a rank's stages, and their masters.

    Args:
        dtype: of the copies. None: modules compute with the masters.
        wide: whether autograd casts gradients as they arrive.
        sharing: the ranks that share what FSDP holds. None: no ranks do.
    """

    def __init__(
        self,
        dtype: torch.dtype | None,
        *,
        wide: bool = False,
        sharing: dist.ProcessGroup | None = None,
    ) -> None:
        self._dtype, self._wide, self._sharing = dtype, wide, sharing
        self._scales: list[GatherScales] = []
        self._masters: dict[Tensor, nn.Parameter] = {}

    @property
    def copies(self) -> list[Tensor]:
        """All of them."""
        return list(self._masters)

    @property
    def masters(self) -> Mapping[Tensor, nn.Parameter]:
        """The master of every copy."""
        return self._masters

    def master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what a module's parameter is a copy of; itself where it is none."""
        return self._masters.get(parameter, parameter)

    @torch.no_grad()
    def take(self, model: nn.Module, wide: Collection[nn.Module] = ()) -> int:
        """Put copies in the place of the parameters of ``model``, values undefined; return their number.

        Args:
            model: one stage, with storage; what FSDP holds is left alone. The scales of what it gathers in 8
                bits are refreshed with the copies.
            wide: modules that compute with their masters.
        """
        if self._dtype is None:
            return 0
        self._scales.append(GatherScales(model, self._sharing))
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module, name, parameter in _narrowed(model, wide):
            if parameter not in made:  # a shared one stays shared
                copy = nn.Parameter(parameter.to(self._dtype), requires_grad=parameter.requires_grad)
                if self._wide:
                    copy.grad_dtype = parameter.dtype
                if copy.requires_grad:
                    copy.register_post_accumulate_grad_hook(partial(_pour, parameter))
                made[parameter] = copy
            setattr(module, name, made[parameter])
        self._masters |= {copy: master for master, copy in made.items()}
        return len(made)

    @torch.no_grad()
    def refresh(self) -> None:
        """Fill the copies from the masters, and the scales of fp8 gathers; all ranks together."""
        for scales in self._scales:
            scales.refresh()
        if self._masters:
            torch._foreach_copy_([copy.data for copy in self._masters], [*self._masters.values()])

    def collect(self) -> None:
        """Add what copies still hold to the masters': no hook runs where a schedule adds by itself."""
        for copy, master in self._masters.items():
            _pour(master, copy)

    def close(self) -> None:
        """Drop both."""
        self._masters.clear()
        self._scales.clear()


def _narrowed(model: nn.Module, wide: Collection[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Modules and names of the parameters that get copies."""
    for module in model.modules():
        if any(module is one for one in wide):
            continue
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_floating_point() and not isinstance(parameter, DTensor):
                yield module, name, parameter


def _pour(master: nn.Parameter, copy: Tensor) -> None:
    """Add the gradient of a copy to its master's."""
    gradient, copy.grad = copy.grad, None
    if gradient is None:
        return
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
