"""fp8 training by torchao (extra ``fp8``), for the products of the linear layers inside blocks.

Inputs and weights are cast to e4m3, gradients to e5m2 (Micikevicius et al. 2022, FP8 Formats for Deep
Learning). Each tensor has a scale of its own, computed from its largest value at every use. Products
accumulate in a wider type and are returned in bf16. Weights stay fp32. Head, embeddings, router, norms and
stacked experts are not converted.

torchao replaces each layer by a subclass of nn.Linear with the same parameters under the same names. That
happens before anything cuts the model. Under tensor parallelism each rank's part of a weight has its own
scale, so that losses differ between layouts by roundings.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from picotron_ray.config.support.precision import TORCHAO
from picotron_ray.errors import LayoutError

EMULATE = False
"""Emulate fp8: the same roundings by wider products, for tests on devices without it."""


def apply_fp8(blocks: Sequence[nn.Module]) -> int:
    """Convert every linear layer inside the blocks to fp8, in place; return their number.

    Raises:
        LayoutError: torchao is missing.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise LayoutError(f"precision: saw fp8, {TORCHAO}") from error

    config, count = Float8LinearConfig(emulate=EMULATE), 0
    for block in blocks:
        convert_to_float8_training(block, config=config)
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.product = partial(_product, module)  # type: ignore[assignment]
                count += 1
    return count


def _product(module: Any, x: Tensor) -> Tensor:
    """Multiply ``x`` by the weight as torchao's layer does, without its bias."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    if torch.is_autocast_enabled():
        x = x.to(torch.get_autocast_dtype("cuda"))
    found: Tensor = matmul_with_hp_or_float8_args.apply(
        x, module.weight.t(), module.linear_mm_config, module.config
    )
    return found
