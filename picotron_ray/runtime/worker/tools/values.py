"""Figures of values at a stop: tensors by norm, extremes and histogram, others by a short text."""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from picotron_ray.checkpoint.torch_state import StateTensor
from picotron_ray.debug.tensor_figures import EDGES

CHUNK = 1 << 20
"""Elements of a tensor that are looked at together: a look takes little memory."""
MOST_NAMES = 64
MOST_TENSORS = 2000
_text = reprlib.Repr()
_text.maxstring = _text.maxother = 120


@torch.no_grad()
def tensor_figures(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the figures of a tensor, of a distributed one those of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    found: dict[str, Any] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    return {**found, **_figures(local.detach())}


def _figures(tensor: torch.Tensor) -> dict[str, Any]:
    edges = torch.tensor(EDGES, dtype=torch.float64, device=tensor.device)
    squares, least, most, nonfinite = 0.0, math.inf, -math.inf, 0
    counts = torch.zeros(len(EDGES) + 1, dtype=torch.int64, device=tensor.device)
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        values = flat[start : start + CHUNK].to(torch.float64)
        finite = values[values.isfinite()]
        nonfinite += values.numel() - finite.numel()
        if finite.numel():
            squares += float(finite.square().sum())
            least, most = min(least, float(finite.min())), max(most, float(finite.max()))
            places = torch.bucketize(finite, edges)
            counts += torch.bincount(places, minlength=len(EDGES) + 1)
    seen = math.isfinite(least)
    return {
        "numel": flat.numel(),
        "norm": math.sqrt(squares),
        "min": least if seen else None,
        "max": most if seen else None,
        "nonfinite": nonfinite,
        "histogram": counts.tolist(),
    }


def named_values(values: Mapping[str, Any], most: int = MOST_NAMES) -> dict[str, Any]:
    """Return figures or texts of named values, of the first ``most``."""
    return {name: shown(value) for name, value in itertools.islice(values.items(), most)}


def shown(value: Any) -> Any:
    """Return the figures of a tensor, or a text of anything else."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        value = value.item()
    if isinstance(value, torch.Tensor):
        return tensor_figures(value)
    try:
        return _text.repr(value)
    except Exception as error:  # noqa: BLE001 (of somebody's __repr__, told in its place)
        return f"<{type(value).__name__}: {type(error).__name__}>"


def state_figures(state: Iterable[StateTensor], name: str) -> list[dict[str, Any]]:
    """Return the figures of this rank's boxes of tensors.

    Args:
        name: of the tensor, or how the names of several begin; empty: all of the model.
    """
    wanted = (each for each in state if _wanted(each.shard.name, name))
    return [
        {
            "name": each.shard.name,
            "offset": list(each.shard.box.offset),
            "size": list(each.shard.box.size),
            **tensor_figures(each.values()),
        }
        for each in itertools.islice(wanted, MOST_TENSORS)
    ]


def _wanted(name: str, asked: str) -> bool:
    return not asked or name == asked or name.startswith((f"{asked}.", f"{asked}/"))


def state_names(state: Sequence[StateTensor]) -> list[str]:
    """Names of tensors that this rank holds a part of."""
    return [each.shard.name for each in state]
