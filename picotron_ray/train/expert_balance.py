"""Load of experts over a step's global batch, and the bias that balances it.

The bias of an expert moves by ``bias_rate`` against its load's distance from the mean, once per step, by the
sign alone (Wang et al. 2024, "Auxiliary-Loss-Free ExpertLoad Balancing Strategy for Mixture-of-Experts").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.models.layers.moe import MixtureOfExperts


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Load of one layer's experts in a step, over the global batch.

    Fields:
        shares: assignments of each expert / the mean over the experts.
        dropped: assignments over capacity. They reach no expert.
    """

    shares: tuple[float, ...]
    dropped: int


class ExpertBalance:
    """Balances the mixtures of one pipeline stage.

    Args:
        mixtures: layer number and module.
        group: ranks that feed other tokens to the same layers. None: there are none.
    """

    def __init__(
        self, mixtures: Sequence[tuple[int, MixtureOfExperts]], group: dist.ProcessGroup | None
    ) -> None:
        self._mixtures, self._group = list(mixtures), group
        self._loads: list[Tensor] = []

    def begin(self, scale: float) -> None:
        """Begin a step. ``scale``: gradient of the auxiliary losses."""
        for _, mixture in self._mixtures:
            mixture.scale, mixture.router.load = scale, None

    def reduce(self) -> None:
        """Sum the load over the replicas; all ranks of the group together."""
        if not self._mixtures:
            return
        found = [mixture.router.load for _, mixture in self._mixtures]
        loads = torch.stack([load for load in found if load is not None])
        if self._group is not None:
            dist.all_reduce(loads, group=self._group)
        self._loads = list(loads)

    @torch.no_grad()
    def step(self) -> None:
        """Move every bias against its expert's load, but for frozen ones."""
        for (_, mixture), load in zip(self._mixtures, self._loads, strict=True):
            router = mixture.router
            if router.bias is not None and not router.held:
                used = load[:-1]
                router.bias.add_(
                    (used.mean() - used).sign().to(router.bias.dtype), alpha=router.config.bias_rate
                )

    def loads(self) -> dict[int, ExpertLoad]:
        """Return the loads of the step that `reduce` ended, by layer number."""
        found = {}
        for (layer, _), load in zip(self._mixtures, self._loads, strict=True):
            shares = load[:-1] / load[:-1].mean()
            found[layer] = ExpertLoad(tuple(shares.tolist()), int(load[-1]))
        return found
