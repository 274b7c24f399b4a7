"""Initial weights that depend on (seed, name, shape) alone.

Every rank can make any full tensor and keep its own box of it, so the first step is the same at every
layout and no broadcast is needed. Numbers come from numpy's counter-based Philox generator (Salmon et
al. 2011) in fp32 and are cast afterwards, so fp64 and bf16 runs start from the same weights.
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash


def initialise_(name: str, shape: tuple[int, ...], seed: int, *, init_std: float | None) -> torch.Tensor:
    """The full initial value (fp32, CPU) of one canonical parameter.

    Args:
        name: canonical name, e.g. ``layers.3.attention.wq.weight``.
        shape: full shape of the uncut parameter.
        seed: ``job.seed``.
        init_std: ``ParameterSpec.init_std``: standard deviation, or None for all ones.
    """
    if init_std is None:
        return torch.ones(shape, dtype=torch.float32)
    key = xxhash.xxh3_128_intdigest(f"{seed}/{name}".encode())
    values = np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, dtype=np.float32)
    values *= np.float32(init_std)
    return torch.from_numpy(values)
