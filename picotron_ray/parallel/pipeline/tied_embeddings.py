"""Tied embedding in a pipeline: the first stage looks tokens up in it, the last one makes logits of it.

Each end computes with a copy of its own. The gradient of the one parameter is the sum over both (Narayanan et
al. 2021, Megatron-LM).

- Ends on two ranks send each other their gradients. Both then hold the same gradient and moments, bit by
  bit, and take the same step.
- A V-shaped schedule puts both ends on one rank. Gradients are added there and nothing is sent. The head's
  copy has no moments; it takes over the weight after every update. The ends are two ``nn.Parameter`` even
  then, for two reasons: each stage is a root of FSDP, which owns its parameters, and a gradient of two stages
  is complete after twice as many passes as `ReplicatedGradients` waits for.

The state knows one tensor, under the embedding's name. Both ends restore from it. The first stage's stands
for it and counts in the norm (`shard_boxes.is_primary`).
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
    """Synchroniser of the two ends of a tied embedding, on one rank.

    Args:
        parameters: all parameters of this rank.
        copies: parameters of the head's stage that are copies, on any rank.
        group: the ranks of the pipeline; None where there is none.
        peer: the rank in the group of the other end; None where this rank holds both ends or neither.
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
        """Whether a parameter is a copy without an update of its own: this rank holds the original too."""
        return any(parameter is copy for _, copy in self._followers.values())

    def sum_(self, parameters: Sequence[LocalParameter], gradients: Sequence[Tensor]) -> None:
        """Sum the gradients of tied parameters over both ends, in place. ``parameters`` holds no follower."""
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
        """Copy the originals' weights to their followers."""
        for original, copy in self._followers.values():
            copy.local.copy_(original.local)
