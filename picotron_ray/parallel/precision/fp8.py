"""fp8 training by torchao (extra ``fp8``): the products of the linear layers inside blocks.

Inputs and weights are cast to e4m3, gradients to e5m2 (Micikevicius et al. 2022, FP8 Formats for Deep
Learning), each tensor with a scale of its own that is made from its largest value at every use; products
accumulate wider and come out in bf16. Weights stay fp32. Head, embeddings, router, norms and stacked experts
are no such layers.

torchao puts a subclass of nn.Linear in each one's place, which has the same parameters under the same names.
It is applied before anything cuts the model. Under tensor parallelism each rank's part of a weight is scaled
by itself, so that losses differ between layouts as roundings do.
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
"""For tests: the same roundings by wider products, on devices that have no fp8."""


def apply_fp8(blocks: Sequence[nn.Module]) -> int:
    """Let every linear layer inside the blocks compute in fp8, in place; returns how many.

    Raises LayoutError where torchao is missing.
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
    """``x`` times the weight as torchao's layer computes it, without its bias."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    if torch.is_autocast_enabled():
        x = x.to(torch.get_autocast_dtype("cuda"))
    found: Tensor = matmul_with_hp_or_float8_args.apply(
        x, module.weight.t(), module.linear_mm_config, module.config
    )
    return found
