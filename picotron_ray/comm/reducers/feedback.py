"""Error feedback: the next step's sum takes in what a compressed one leaves out (Karimireddy et al. 2019).

Each rank ``r`` of ``R`` keeps the part ``e_r`` of its gradients that was not sent. The parameters are owed
the sum of all ``e_r``, a tensor of the parameter's shape that knows no layout. That is what checkpoints
hold: every rank keeps ``E_r = R x e_r`` and adds ``E_r / R`` to its next gradient, so that the mean of all
``E_r`` is what is owed. `agree` makes all of them that mean, the same bits on every rank. The loop calls it
before each checkpoint and at the end of a generation. A rank of another layout, with another ``R``, goes on
from there and nothing is lost. A slot that was sealed in between, as a fault leaves it, holds the ``E_r``
of the rank that wrote it: its own share stands for the others'.

Errors of a step count once its update is applied (`commit`): a step that is repeated or left out leaves none.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.wire_bytes import GRADIENTS, SENT, ring_share


class Feedback:
    """Error feedback of one buffer of gradients.

    Args:
        like: the buffer of gradients ``[n]``.
        ranks: number of ranks that sum it.

    Fields:
        owed: ``[n]``, as the module says: the state, in storage that stays. directions: factors of the last
        step, with which PowerSGD's next one begins. They are no state: `agree`
            drops them, so that a run goes on from a checkpoint as if it had never stopped.
    """

    def __init__(self, like: Tensor, ranks: int) -> None:
        self.owed = torch.zeros_like(like)
        self._next = torch.zeros_like(like)
        self._ranks = ranks
        self._scale = 1.0
        self._found = False
        self.directions: list[Tensor] = []

    def begin(self, scale: float) -> None:
        """Begin a step whose gradients are multiplied by ``scale`` (fp16)."""
        self._scale, self._found = scale, False

    def add_to_(self, flat: Tensor) -> None:
        """Add this rank's share of what is owed to its gradients."""
        flat.add_(self.owed, alpha=self._scale / self._ranks)

    def keep(self, error: Tensor) -> None:
        """Note what this step leaves out, of gradients as `begin` scales them."""
        torch.mul(error, self._ranks / self._scale, out=self._next)
        self._found = True

    def commit(self) -> None:
        """Take over the error of the step whose update is applied."""
        if self._found:
            self.owed.copy_(self._next)
            self._found = False

    def agree(self, group: dist.ProcessGroup | None) -> None:
        """Make what is owed the same on all ranks of the group; all of them call it. None: there is one."""
        self.directions = []
        if group is None:
            return
        dist.all_reduce(self.owed, group=group)
        self.owed.div_(self._ranks)
        SENT.add(GRADIENTS, 2 * ring_share(self.owed.numel() * self.owed.element_size(), self._ranks))
