"""What is used of torchao's fp8, which torchao does not promise: this fails where a version changes it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from picotron_ray.parallel.precision import torchao_layers
from tests.support.gloo.pool import Job, Pool

pytest.importorskip("torchao")


def arguments(function: Any) -> str:
    return " ".join(inspect.signature(function).parameters)


def test_float8_layers() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    assert arguments(convert_to_float8_training).split()[0] == "module"
    assert "config" in arguments(convert_to_float8_training).split()
    assert (
        arguments(matmul_with_hp_or_float8_args.forward) == "ctx input_hp weight_hp_t linear_mm_config config"
    )
    for recipe, granularity in (("tensorwise", "tensorwise"), ("rowwise", "axiswise")):
        config = Float8LinearConfig.from_recipe_name(recipe)
        assert config.cast_config_weight.scaling_granularity.value == granularity
        assert config.cast_config_weight.target_dtype is torch.float8_e4m3fn
        assert not config.emulate
        assert not config.enable_fsdp_float8_all_gather
    with pytest.raises(AssertionError, match="only supports tensorwise"):
        Float8LinearConfig(cast_config_weight=config.cast_config_weight, enable_fsdp_float8_all_gather=True)
    block = nn.Sequential(nn.Linear(16, 32, bias=False))
    (layer,) = torchao_layers.convert(block, "tensorwise", emulate=True)
    assert isinstance(layer, Float8Linear)
    assert layer is block[0]


def test_weights_that_are_gathered_in_8_bits() -> None:
    from torchao.float8.float8_utils import EPS
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    assert arguments(WeightWithDynamicFloat8CastTensor.__init__).split()[1:] == [
        "tensor",
        "linear_mm_config",
        "dtype",
        "precomputed_scale",
    ]
    assert arguments(WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather) == "self mesh"
    assert 0 < EPS < 1e-9
    (layer,) = torchao_layers.convert(nn.Sequential(nn.Linear(16, 32)), "tensorwise", emulate=True)
    before = layer.weight
    torchao_layers.gather_narrow(layer)
    assert torchao_layers.plain(layer.weight.detach()).data_ptr() == before.data_ptr()
    assert torchao_layers.plain(before) is before


def test_microscaled_layers() -> None:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear, _to_mxfp8_then_scaled_mm

    assert arguments(_to_mxfp8_then_scaled_mm) == (
        "input_hp weight_hp kernel_preference scale_calculation_mode wgrad_with_hp"
    )
    block = nn.Sequential(nn.Linear(32, 64), nn.Sequential(nn.Linear(64, 32, bias=False)))
    weights = [block[0].weight, block[1][0].weight]
    found = torchao_layers.convert(block, "mxfp8", emulate=True)
    assert [type(layer) for layer in found] == [MXFP8Linear, MXFP8Linear]
    assert [layer.weight for layer in found] == weights
    x = torch.randn(32, 32)
    torch.testing.assert_close(block[0](x), block[0].product(x) + block[0].bias)
    assert torchao_layers.has_mx_kernels() in (True, False)


def scales_of_both(job: Job) -> tuple[list[float], list[float], int]:
    """Ours, torchao's, and the bytes that ours sent."""
    groups = job.groups()
    groups.connect()
    try:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(*(nn.Linear(16, 32, bias=False) for _ in range(3)))
        with torch.no_grad():
            for number, layer in enumerate(model):
                layer.weight.copy_(torch.arange(512.0).view(32, 16) * 0.37 * 10**-number)
            model[2].weight.zero_()
        for layer in torchao_layers.convert(model, "tensorwise", emulate=True):
            torchao_layers.gather_narrow(layer)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        weights = torchao_layers.narrow_gathers(model)
        sent = torchao_layers.fill_scales(weights, mesh.get_group())
        ours = [float(weight._local_tensor._precomputed_scale) for weight in weights]
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
        return ours, [float(weight._local_tensor._precomputed_scale) for weight in weights], sent
    finally:
        groups.close()


def test_scales_are_torchaos(pool: Pool) -> None:
    first, second = pool.run(2, scales_of_both)
    assert first == second
    ours, theirs, sent = first
    assert ours == theirs
    assert len(set(ours)) == 3
    assert sent == 2 * 3 * 4 // 2
