"""A tied embedding in a pipeline: the first stage looks tokens up in it, the last one makes logits of it.

Each end computes with a copy of its own, and the gradient of the one parameter is the sum over both
(Narayanan et al. 2021, Megatron-LM). Where the ends lie on two ranks, these send each other their gradients:
both then hold the same gradient and moments, bit by bit, and take the same step. Where a V-shaped schedule
puts both on one rank, gradients are added there and nothing is sent. They are not one ``nn.Parameter`` even
then: each stage is a root of FSDP, which owns its parameters, and a gradient that two stages add to is
complete after twice as many passes as `replicated` waits for. The head's copy has no moments there; it takes
over the weight after every update.

The state knows one tensor, under the embedding's name: both ends restore from it, the first stage's speaks
for it and counts in the norm (`boxes.is_primary`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.p2p import sum_with_peer_
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.local_shards import LocalParameter, local_tensor


class TiedEmbeddings:
    """What one rank does to keep the ends alike.

    Args:
        parameters: all that this rank holds.
        copies: what the head's stage holds, of any rank.
        group: the ranks of the pipeline; None where there is none.
        peer: which of them holds the other end; None where this rank holds both or neither.
    """

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        copies: Iterable[ParameterSpec],
        group: dist.ProcessGroup | None,
        peer: int | None,
    ) -> None:
        self._names, self._group, self._peer = {spec.name for spec in copies}, group, peer
        held = {parameter.spec.name: parameter for parameter in parameters if not parameter.spec.copy}
        self._followers = {
            parameter.spec.name: (held[parameter.spec.name], parameter)
            for parameter in parameters
            if parameter.spec.copy and parameter.spec.name in held
        }

    def follows(self, parameter: LocalParameter) -> bool:
        """Whether it is a copy of one that this rank holds too, and has no update of its own."""
        return any(parameter is copy for _, copy in self._followers.values())

    def sum_(self, parameters: Sequence[LocalParameter], gradients: Sequence[Tensor]) -> None:
        """Make the gradients of tied parameters, without followers, the sums over both ends, in place."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.spec.name not in self._names:
                continue
            if parameter.spec.name in self._followers:
                _, copy = self._followers[parameter.spec.name]
                if copy.parameter.grad is not None:
                    gradient += local_tensor(copy.parameter.grad)
            elif self._group is not None and self._peer is not None:
                sum_with_peer_(gradient, self._peer, self._group)

    @torch.no_grad()
    def follow(self) -> None:
        """Give followers the weights that their originals have now."""
        for original, copy in self._followers.values():
            copy.local.copy_(original.local)
