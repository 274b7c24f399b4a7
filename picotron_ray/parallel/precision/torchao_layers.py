"""torchao's fp8, as far as it is used: layers, weights that FSDP gathers in 8 bits, their scales.

torchao promises the layers' names to nobody, and MXFP8's lie among its prototypes.
``tests/gloo/parallel/precision/test_torchao_layers.py`` fails where a version changes what is used here.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from picotron_ray.comm.wire_bytes import ring_share, size_bytes
from picotron_ray.config.schema.compute import Fp8Scaling
from picotron_ray.config.support.precision import TORCHAO
from picotron_ray.errors import LayoutError


def convert(block: nn.Module, scaling: Fp8Scaling, *, emulate: bool) -> list[nn.Module]:
    """Replace every linear layer inside ``block`` by torchao's, in place; return those.

    The parameters are the same under the same names. ``product`` of a layer is its product without the bias.

    Raises:
        LayoutError: torchao is missing, or has not these layers here.
    """
    try:
        return _microscaled(block, emulate) if scaling == "mxfp8" else _scaled(block, scaling, emulate)
    except ImportError as error:
        raise LayoutError(f"precision: saw fp8, {TORCHAO}") from error


def _scaled(block: nn.Module, scaling: Fp8Scaling, emulate: bool) -> list[nn.Module]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulate)
    convert_to_float8_training(block, config=config)
    found = [module for module in block.modules() if isinstance(module, nn.Linear)]
    for layer in found:
        layer.product = partial(_scaled_product, layer)  # type: ignore[assignment]
    return [*found]


def _scaled_product(layer: Any, x: Tensor) -> Tensor:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    found: Tensor = matmul_with_hp_or_float8_args.apply(
        x, layer.weight.t(), layer.linear_mm_config, layer.config
    )
    return found


def _microscaled(block: nn.Module, emulate: bool) -> list[nn.Module]:
    linear, preference = _mx()
    if not emulate and not has_mx_kernels():
        text = "which torchao has for compute capability 10.0 and CUDA 12.8 or later; use rowwise"
        raise LayoutError(f"fp8.scaling: saw mxfp8, {text}")
    found = []
    for parent, name, plain in list(_linear(block)):
        with torch.device("meta"):
            layer = linear(
                plain.in_features,
                plain.out_features,
                bias=False,
                kernel_preference=preference.EMULATED if emulate else preference.AUTO,
            )
        layer.weight, layer.bias = plain.weight, plain.bias
        layer.product = partial(_microscaled_product, layer)
        setattr(parent, name, layer)
        found.append(layer)
    return found


def _linear(block: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in block.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                yield parent, name, child


def _microscaled_product(layer: Any, x: Tensor) -> Tensor:
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm

    found: Tensor = _to_mxfp8_then_scaled_mm(
        x,
        layer.weight,
        kernel_preference=layer.kernel_preference,
        scale_calculation_mode=layer.scale_calculation_mode,
        wgrad_with_hp=layer.wgrad_with_hp,
    )
    return found


def _mx() -> tuple[Callable[..., Any], Any]:
    """The layer, and the kinds of kernels that it may be asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's prototypes deprecate each other
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    return MXFP8Linear, KernelPreference


def has_mx_kernels() -> bool:
    """Whether torchao's kernels for MXFP8 run on this device."""
    from torchao.prototype.mx_formats.kernels import _mxfp8_cuda_kernels_available

    return bool(_mxfp8_cuda_kernels_available)


def gather_narrow(layer: Any) -> None:
    """Make FSDP, which comes next, gather the weight of a tensorwise layer in 8 bits."""
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    weight = layer.weight
    narrow = WeightWithDynamicFloat8CastTensor(
        weight.detach(), layer.linear_mm_config, layer.config.cast_config_weight.target_dtype
    )
    layer.weight = nn.Parameter(narrow, requires_grad=weight.requires_grad)


def narrow_gathers(model: nn.Module) -> list[DTensor]:
    """List the weights of ``model`` that are gathered in 8 bits, as far as they are sharded."""
    sharded = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return [parameter for parameter in sharded if _is_narrow(parameter._local_tensor)]


def _is_narrow(tensor: Any) -> bool:
    return hasattr(tensor, "_precomputed_scale")


@torch.no_grad()
def fill_scales(weights: Sequence[DTensor], group: dist.ProcessGroup) -> int:
    """Fill the scales of weights that are gathered in 8 bits; all ranks that share them together.

    They are those of torchao's ``precompute_float8_dynamic_scale_for_fsdp``. That reduces through DTensor,
    which takes an earlier generation's mesh for this one's, its equal: its group has gone.

    Args:
        group: those ranks.

    Returns:
        Bytes that this rank sent: one all-reduce of the weights' largest values.
    """
    from torchao.float8.float8_utils import EPS

    shards: list[Any] = [weight._local_tensor for weight in weights]
    largest = torch.stack(torch._foreach_norm([shard._tensor for shard in shards], ord=math.inf))
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    scales = torch.finfo(shards[0]._dtype).max / largest.clamp(min=EPS).double()
    for shard, scale in zip(shards, scales.float().unbind(), strict=True):
        shard._precomputed_scale = scale
    return 2 * ring_share(size_bytes(largest), group.size())


def plain(tensor: Tensor) -> Tensor:
    """Return the live storage inside a weight that is gathered in 8 bits; any other tensor as it is."""
    return getattr(tensor, "_tensor", tensor) if _is_narrow(tensor) else tensor
