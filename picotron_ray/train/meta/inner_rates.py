"""Inner rates that are learned (Meta-SGD): one for every weight, α = ``meta.inner_rate`` + a learned shift.

The state holds the shift, which begins at zero. It is trained as the weights are: its gradient is summed over
replicas, clipped and applied with theirs, and it has moments of its own. In snapshots and commits it is
``inner_rate_shift/NAME``, in the boxes of the weight, and so it is cut again and restored with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from picotron_ray.config.schema.meta import MetaConfig
from picotron_ray.parallel.local_shards import LocalParameter

SHIFT = "inner_rate_shift"


def shift_parameters(meta: MetaConfig, parameters: Sequence[LocalParameter]) -> Iterator[LocalParameter]:
    """Yield the shift of each trained weight as a parameter of its own; none where rates are not learned."""
    for one in parameters if meta.strategy == "metasgd" else ():
        if one.spec.trained:
            spec = replace(one.spec, name=f"{SHIFT}/{one.spec.name}", decay=False)
            yield replace(one, spec=spec, parameter=nn.Parameter(torch.zeros_like(one.local)))


def shifts_of(trained: Sequence[LocalParameter]) -> Mapping[str, Mapping[str, Tensor]]:
    """Return the live storage of shifts as moments are listed: by the name of the weight."""
    names = {one.spec.name.removeprefix(f"{SHIFT}/"): one for one in trained if _is_shift(one)}
    return {SHIFT: {name: one.local for name, one in names.items()}} if names else {}


def _is_shift(parameter: LocalParameter) -> bool:
    return parameter.spec.name.startswith(f"{SHIFT}/")
