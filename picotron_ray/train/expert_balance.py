"""Load of experts over a step's global batch, and the bias that balances it.

The bias of an expert moves by ``bias_rate`` against its load's distance from the mean, once per step, by the
sign alone (Wang et al. 2024, "Auxiliary-Loss-Free ExpertLoad Balancing Strategy for Mixture-of-Experts").

Loads of the last steps, by which a later generation places experts, go to the host in the background and are
taken in one step late. They are whole numbers, summed over the replicas: all ranks of a stage have the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.models.layers.moe import MixtureOfExperts
from picotron_ray.train.late_numbers import LateNumbers

WINDOW_STEPS = 100
"""Steps whose loads are kept."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Load of experts in a step, over the global batch; nothing is read by the host.

    Fields:
        imbalance: assignments of the most used expert of any layer here / the mean over its layer's experts,
            fp64 scalar; 0.0 where there are no experts.
        dropped: assignments over capacity in all layers here, fp64 scalar. They reach no expert.
    """

    imbalance: Tensor | float = 0.0
    dropped: Tensor | float = 0.0


class ExpertBalance:
    """Balances the mixtures of one pipeline stage.

    Args:
        mixtures: layer number and module.
        group: ranks that feed other tokens to the same layers. None: there are none.
        keeps: whether the loads of the last steps are kept.

    Fields:
        per_layer: ``[layers, experts + 1]`` fp64 of the step that `reduce` ended: assignments of each expert
            over the global batch, and last those over capacity. None: there are no mixtures.
    """

    def __init__(
        self,
        mixtures: Sequence[tuple[int, MixtureOfExperts]],
        group: dist.ProcessGroup | None,
        *,
        keeps: bool = False,
    ) -> None:
        self._mixtures, self._group, self._keeps = list(mixtures), group, keeps
        self._last: deque[Tensor] = deque(maxlen=WINDOW_STEPS)
        self._arriving: LateNumbers | None = None
        self.per_layer: Tensor | None = None

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
        self.per_layer = loads

    @torch.no_grad()
    def step(self) -> None:
        """Move every bias against its expert's load, but for frozen ones; keep the step's loads."""
        if self._keeps and self.per_layer is not None:
            if self._arriving is not None:
                self._last.append(self._arriving.arrived())
            self._arriving = LateNumbers(self.per_layer[:, :-1])
        for number, (_, mixture) in enumerate(self._mixtures):
            router = mixture.router
            if router.bias is not None and not router.held:
                assert self.per_layer is not None, "a step is reduced before its update"
                used = self.per_layer[number, :-1]
                router.bias.add_(
                    (used.mean() - used).sign().to(router.bias.dtype), alpha=router.config.bias_rate
                )

    def recent(self) -> dict[int, tuple[int, ...]]:
        """Return by layer each expert's assignments in the last steps but the newest; empty: none are kept.

        The host does not wait for the device: it may be called where that has failed.
        """
        if not self._last:
            return {}
        total = torch.stack(tuple(self._last)).sum(dim=0).long().tolist()
        return {layer: tuple(loads) for (layer, _), loads in zip(self._mixtures, total, strict=True)}

    def load(self) -> ExpertLoad:
        """Return the load of the step that `reduce` ended."""
        if self.per_layer is None:
            return ExpertLoad()
        used = self.per_layer[:, :-1]
        return ExpertLoad((used.amax(dim=1) / used.mean(dim=1)).amax(), self.per_layer[:, -1].sum())
