"""Sharded data parallelism by torch's FSDP2: ZeRO 1 to 3, HSDP. ddp.py has replicated data parallelism.

Gradients are *summed* over replicas (divide factor 1). The loss of every micro-batch is already divided by
the global token count, so that the gradient is exact whatever the number of rows per replica.

In mixed precision a unit's shards, and what is updated and kept, are fp32. It gathers and computes in 16
bits, and adds up and sums gradients in fp32 (``comm.reduce_dtype`` makes the sum itself travel in bf16, see
`data.fsdp_collectives`). Inputs are not cast: the residual stream is in 16 bits by itself. Routers are units
of their own, in fp32.

What stands before and after the blocks is gathered once per micro-batch, also under ZeRO-3:

- The embedding is a unit. Its weights are freed after its forward pass; its backward pass needs none.
- The head and the norm before it are a unit. Their backward pass follows the forward pass at once, so that
  they stay gathered. Their gradients travel while the blocks' are computed.
- A head that shares the embedding's parameter lies in the root's unit with it, because a parameter has one
  unit. So does all that a model of the user's own has outside blocks: what runs when is not known there. The
  root is gathered before all else, stays so until its backward pass ends, and is reduced last.

FSDP2 fetches a unit ahead of its use in the order of the last forward pass in the backward pass. In the
forward pass it does so only as far as the host runs ahead of the device. The host does not at the start of
a step, so what is gathered first fetches the first block, and the last block fetches the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True, slots=True)
class FsdpUnits:
    """FSDP units: the modules that are gathered together, and the parameters that stay whole.

    Fields:
        blocks: modules that are gathered ``together`` at a time, in the order of their use.
        experts: modules inside them whose parameters are shared by the ranks of ``expert_mesh`` only.
        expert_mesh: None where no two ranks hold the same experts.
        whole: parameters that are not sharded.
        wide: modules inside blocks that are gathered by themselves and not cast.
        dtype: in which the others are gathered and compute. None: that of the parameters.
        dims: the dimension along which a parameter is cut, where it is not the first (`zero_dim`).
        embedding: modules before the blocks, one unit, whose backward pass reads no weights.
        head: modules after the blocks, one unit. What is in neither is the root's.
        together: consecutive blocks that are one unit.
    """

    blocks: Sequence[nn.Module]
    experts: Sequence[nn.Module] = ()
    expert_mesh: DeviceMesh | None = None
    whole: frozenset[nn.Parameter] = frozenset()
    wide: Sequence[nn.Module] = ()
    dtype: torch.dtype | None = None
    dims: Mapping[nn.Parameter, int] = field(default_factory=dict)
    embedding: Sequence[nn.Module] = ()
    head: Sequence[nn.Module] = ()
    together: int = 1

    def placement(self, parameter: nn.Parameter) -> Shard | None:
        """FSDP's ``shard_placement_fn``."""
        return Shard(self.dims[parameter]) if parameter in self.dims else None

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """Of all units but the wide ones."""
        if self.dtype is None:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(self.dtype, torch.float32, cast_forward_inputs=False)


def apply_fsdp(model: nn.Module, units: FsdpUnits, mesh: DeviceMesh, zero: int) -> None:
    """Shard ``model`` in place: blocks are units, so are embedding and head, and the rest is one.

    Args:
        mesh: the ranks over which the model is cut; with a dimension of copies before them, HSDP.
        zero: 1 and 2 keep weights gathered between forward and backward, 3 frees and gathers those of blocks.
    """
    reshard, whole, policy = zero == 3, set(units.whole), units.policy
    for module in units.wide if units.dtype is not None else ():
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, ignored_params=whole)
    for experts in units.experts:
        if units.expert_mesh is None:
            whole |= set(experts.parameters())
        else:
            fully_shard(
                experts,
                mesh=units.expert_mesh,
                reshard_after_forward=reshard,
                shard_placement_fn=units.placement,
                mp_policy=policy,
            )
    common: Any = {
        "mesh": mesh,
        "shard_placement_fn": units.placement,
        "mp_policy": policy,
        "ignored_params": whole,
    }
    each = units.together
    parts = [(list(units.blocks[at : at + each]), reshard) for at in range(0, len(units.blocks), each)]
    parts += [(list(units.embedding), reshard), (list(units.head), False), ([model], False)]
    for modules, freed in parts:
        for module in modules:
            clone_output_views(module)
        if modules:
            together: Any = modules if len(modules) > 1 else modules[0]
            fully_shard(together, reshard_after_forward=freed, **common)
    for unit in _units_in(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    _fetch_ahead(model, units)


def _fetch_ahead(model: nn.Module, units: FsdpUnits) -> None:
    """Let the ends of the blocks be gathered before their turn, and the embedding for no backward pass.

    Where micro-batches are reduced together, torch takes the last unit of the micro-batch before for the one
    that follows the embedding in the backward pass, and would gather the head once more. A unit that is named
    takes that one's place; the embedding itself costs nothing.
    """
    for unit in _units_in(*units.embedding):
        unit.set_unshard_in_backward(False)
        unit.set_modules_to_backward_prefetch([unit])
    pairs = ((units.embedding[:1] or [model], units.blocks[:1]), (units.blocks[-1:], units.head[:1]))
    for gathered, following in pairs:
        if gathered and following:
            first = _units_in(*gathered)[0]
            first.set_modules_to_forward_prefetch(_units_in(*following))


def _units_in(*modules: nn.Module) -> list[FSDPModule]:
    return [unit for module in modules for unit in module.modules() if isinstance(unit, FSDPModule)]


def clone_output_views(module: nn.Module) -> None:
    """Clone outputs of ``module`` that are views; patches its ``forward`` in place.

    FSDP attaches the hook that gathers weights for the backward pass to a module's output. A model of the
    user's own may write into that output (``x += y``). A view would silently lose the hook, and gradients
    would be wrong.
    """
    inner = module.forward

    def own(x: Tensor) -> Tensor:
        return x.clone() if x._is_view() and x.requires_grad else x

    def forward(*inputs: Any, **named: Any) -> Any:
        return tree_map_only(Tensor, own, inner(*inputs, **named))

    module.forward = forward


def prepare_backward(model: nn.Module, zero: int, last: bool) -> None:
    """Set how the next backward pass treats weights and gradients.

    ZeRO-1 and 2 gather weights once per step. ZeRO-1 also reduces once per step. Copies are always summed
    once per step.

    Args:
        last: whether the micro-batch is the last of the step.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_all_reduce(last)
    if zero < 3:
        model.set_reshard_after_backward(last)
    if zero == 1:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)


def free_gathered_weights(model: nn.Module) -> None:
    """Free gathered weights after a forward pass without a backward pass; ZeRO-1 and 2 keep them.

    Until then the module's parameters are the gathered ones. Gradients would be cleared there and go on
    growing in the shards, and an update of the shards would not be seen.
    """
    for module in _units_in(model):
        module.reshard()


def pad_shards(model: nn.Module) -> None:
    """Make FSDP pad its shards now rather than at the first forward pass.

    It moves the shards into padded storage lazily. References to shards that were taken before would be
    stale.
    """
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()
