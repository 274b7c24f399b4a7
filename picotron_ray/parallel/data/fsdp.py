"""Sharded data parallelism by torch's FSDP2: ZeRO 1 to 3, HSDP. The replicated kind: parallel/replicated.py.

Gradients are *summed* over replicas (divide factor 1): the loss of every micro-batch is already divided
by the global token count, which makes the gradient exact whatever the number of rows per replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True, slots=True)
class FsdpUnits:
    """What is gathered together, and what is left whole.

    Fields:
        blocks: the modules that are gathered one at a time.
        experts: modules inside them whose parameters only the ranks of ``expert_mesh`` share.
        expert_mesh: None where no two ranks hold the same experts.
        whole: parameters that are not sharded.
    """

    blocks: Sequence[nn.Module]
    experts: Sequence[nn.Module] = ()
    expert_mesh: DeviceMesh | None = None
    whole: frozenset[nn.Parameter] = frozenset()


def apply_fsdp(model: nn.Module, units: FsdpUnits, mesh: DeviceMesh, zero: int) -> None:
    """Shard ``model`` in place: each block a unit, and one for what is left.

    Args:
        mesh: the ranks over which it is cut; with a dimension of copies before it, HSDP.
        zero: 1 and 2 keep weights gathered between forward and backward, 3 frees and gathers them again.
    """
    reshard, whole = zero == 3, set(units.whole)
    for experts in units.experts:
        if units.expert_mesh is None:
            whole |= set(experts.parameters())
        else:
            fully_shard(experts, mesh=units.expert_mesh, reshard_after_forward=reshard)
    for block in (*units.blocks, model):
        clone_output_views(block)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, ignored_params=whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def clone_output_views(module: nn.Module) -> None:
    """Let what ``module`` puts out be no view, in place: a copy where it is one.

    FSDP hangs what gathers weights for the backward pass on a module's output. A model of the user's own may
    write into that (``x += y``), and a view would lose it, without a word, to wrong gradients.
    """
    inner = module.forward

    def own(x: Tensor) -> Tensor:
        return x.clone() if x._is_view() and x.requires_grad else x

    def forward(*inputs: Any, **named: Any) -> Any:
        return tree_map_only(Tensor, own, inner(*inputs, **named))

    module.forward = forward


def prepare_backward(model: nn.Module, zero: int, last: bool) -> None:
    """Say what the backward pass of a micro-batch is to do with weights and gradients.

    ZeRO-1 and 2 gather weights once per step, 1 reduces once per step too; copies meet once per step always.

    Args:
        last: whether no micro-batch of the step comes after it.
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
    """Free the weights that a forward pass without a backward pass gathered and, under ZeRO-1 and 2, kept.

    Until then the module's parameters are the gathered ones: gradients would be cleared there and go on
    growing in the shards, and an update of the shards would not be seen.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def pad_shards(model: nn.Module) -> None:
    """Let FSDP pad its shards now rather than at the first forward pass.

    It moves the shards into padded storage lazily; state that was listed before would be stale after.
    """
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()
