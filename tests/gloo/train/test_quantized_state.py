"""Moments in 8 bits: rounded as torchao rounds, there and back with no bit changed, AdamW in cut buckets."""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest
import torch
from torch import Tensor

from picotron_ray.config.schema.optimizer import OptimizerConfig
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import build_engine
from picotron_ray.train.optim import adamw
from picotron_ray.train.optim.adamw import AdamW, QuantizedAdamW
from picotron_ray.train.optim.adamw_offload import ParameterGroup
from picotron_ray.train.optim.quantized_state import (
    BLOCK,
    QuantizedTensor,
    codebook_of,
    decode,
    encode,
    is_quantizable,
)
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU
from tests.support.gloo.parity import distance
from tests.support.gloo.train_jobs.quantized_jobs import job_of, with_zeros

pytest.importorskip("torchao")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


# --- the code ---------------------------------------------------------------------------------------------


def drawn(kind: str, signed: bool) -> Tensor:
    """Blocks of values as moments have them: group, far apart within blocks or between them, mostly zero."""
    torch.manual_seed(0)
    values = torch.randn(512, BLOCK)
    if kind == "within":
        values *= 10 ** (torch.rand(512, BLOCK) * 10 - 10)
    if kind == "between":
        values *= 10 ** (torch.rand(512, 1) * 10 - 8)
    if kind == "zeros":
        values *= torch.rand(512, BLOCK) > 0.99
    return (values if signed else values.square()).view(-1)


KINDS = ["group", "within", "between", "zeros"]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("kind", ["group", "within"])
def test_values_are_rounded_as_torchao_rounds(kind: str, signed: bool) -> None:
    """Every code, but of values half way between two numbers; of squares only zero becomes zero."""
    from torchao.optim.quant_utils import dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor

    values, codebook = drawn(kind, signed), codebook_of(signed, CPU)
    codes, scales = encode(values, codebook)
    scaled, wanted_scales = scale_tensor(values, BLOCK)
    wanted = quantize_8bit_with_qmap(scaled, codebook.numbers)
    if not signed:
        assert torch.equal(codes == 0, values == 0)
        wanted = wanted.clamp(min=1)
    assert int((codes != wanted).sum()) <= len(values) // 10**4
    torch.testing.assert_close(scales, wanted_scales, rtol=2**-16, atol=0)
    found = decode(wanted, wanted_scales, codebook)
    assert torch.equal(found, dequant_with_qmap(wanted, codebook.numbers, wanted_scales))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_changes_no_bit(kind: str, signed: bool) -> None:
    codebook = codebook_of(signed, CPU)
    codes, scales = encode(drawn(kind, signed), codebook)
    values = decode(codes, scales, codebook)
    again, scales_again = encode(values, codebook, stored=True)
    assert torch.equal(again, codes)
    assert torch.equal(scales_again, scales)
    if signed and kind == "group":  # else the scale of a block with a negative largest value shrinks
        assert not torch.equal(encode(values, codebook)[1], scales)


def test_which_tensors_are_kept_in_8_bits() -> None:
    sizes = (4096 - BLOCK, 4096, 4096 + 1, 4096 + BLOCK)
    assert [is_quantizable(torch.empty(size)) for size in sizes] == [False, True, False, True]


def test_squares_of_small_gradients_are_kept() -> None:
    """torchao's smallest scale of 1e-12 makes zeros of most of them."""
    codebook = codebook_of(False, CPU)
    squares = (1e-10 * torch.randn(16, BLOCK)).square().view(-1)
    kept = decode(*encode(squares, codebook), codebook)
    assert distance(kept.numpy(), squares.numpy()) < 0.01
    codes, scales = encode(torch.zeros(BLOCK), codebook)
    assert not decode(codes, scales, codebook).any()
    assert not codes.any()
    assert 0 < float(scales) < 1e-29, "nothing was divided by zero"


def test_rows_of_a_tensor_are_decoded_by_themselves() -> None:
    """Also where rows begin within a block."""
    values = drawn("group", True)[: 40 * 160].view(40, 160)[:32].reshape(-1)  # 20 blocks
    codebook = codebook_of(True, CPU)
    kept = QuantizedTensor(*encode(values, codebook), codebook, (32, 160))
    whole = kept.decoded()
    for first, last in ((0, 32), (0, 1), (3, 7), (31, 32)):
        rows = kept[first:last]
        assert rows.shape == (last - first, 160)
        assert torch.equal(rows.decoded(), whole[first:last])


def test_without_torchao_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    codebook_of.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao.optim.subclass_8bit", None)
    with pytest.raises(LayoutError, match=r"optimizer.moments: saw 8bit, .*install the extra 8bit"):
        build_engine(job_of("8bit"), Layout(), 0, None, CPU)


# --- the update -------------------------------------------------------------------------------------------

SIZES = [(64, 128), (256,), (128, 192), (100, 100), (40, 256)]
"""Three large tensors, one that is small and one that blocks do not divide."""


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [0.1 * torch.randn(size, generator=generator) for size in SIZES]


def trained(
    kind: type[AdamW] | type[QuantizedAdamW], **options: int
) -> tuple[list[Tensor], AdamW | QuantizedAdamW]:
    weights = tensors(0)
    group = ParameterGroup([f"w{i}" for i in range(len(SIZES))], weights, range(len(SIZES)), 0.3)
    ours = kind(OptimizerConfig(), [group], True, **options)
    for step in range(1, 11):
        ours.step(tensors(step), 0.01, step)
    return weights, ours


def joined(values: list[Tensor]) -> np.ndarray:
    return np.concatenate(
        [(after - before).numpy().ravel() for after, before in zip(values, tensors(0), strict=True)]
    )


def test_updates_are_those_of_torchaos_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps, with its zeros; scales have 16 bits here, which is under a tenth of what 8 bits change."""
    from torchao.optim import AdamW8bit

    config, theirs = OptimizerConfig(), [torch.nn.Parameter(w) for w in tensors(0)]
    optimizer = AdamW8bit(theirs, 0.01, (config.beta1, config.beta2), config.eps, 0.3)
    with torch.compiler.set_stance("force_eager"):
        for step in range(1, 11):
            for parameter, gradient in zip(theirs, tensors(step), strict=True):
                parameter.grad = gradient
            optimizer.step()
    monkeypatch.setattr(adamw, "codebook_of", with_zeros)
    found, ours = trained(QuantizedAdamW)
    exact, _ = trained(AdamW)
    wanted = joined([w.detach() for w in theirs])
    error = distance(wanted, joined(exact))
    assert 1e-3 < error < 0.1
    assert distance(joined(found), wanted) < 0.1 * error
    for number, parameter in enumerate(theirs):
        large = [isinstance(optimizer.state[parameter][name], Tensor) for name in ours.moments]
        assert large == [True, True]
        kept = type(optimizer.state[parameter]["exp_avg"]).__name__ == "OptimState8bit"
        assert isinstance(ours.moments["exp_avg"][f"w{number}"], QuantizedTensor) is kept


@pytest.mark.parametrize("elements", [BLOCK, 30 * BLOCK, 100 * BLOCK])
def test_buckets_do_not_show(elements: int) -> None:
    expected, _ = trained(QuantizedAdamW)
    found, ours = trained(QuantizedAdamW, bucket_elements=elements)
    assert len(ours._buckets) > 1  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torchao warns of its cache
def test_speed_of_an_update(capsys: pytest.CaptureFixture[str]) -> None:
    """Nanoseconds per parameter on one thread of this machine; ours must be the fastest in 8 bits."""
    from torchao.optim import AdamW8bit

    weights = [torch.randn(1024, 1024) for _ in range(8)]
    gradients = [1e-3 * torch.randn(1024, 1024) for _ in weights]
    group = ParameterGroup([f"w{i}" for i in range(8)], weights, range(8), 0.1)
    parameters = [torch.nn.Parameter(w.clone()) for w in weights]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    theirs = AdamW8bit(parameters)
    full, ours = AdamW(OptimizerConfig(), [group], True), QuantizedAdamW(OptimizerConfig(), [group], True)

    def eager() -> None:
        with torch.compiler.set_stance("force_eager"):
            theirs.step()

    ways = {
        "full": lambda: full.step(gradients, 1e-3, 2),
        "8bit": lambda: ours.step(gradients, 1e-3, 2),
        "torchao, eager": eager,
        "torchao, compiled": theirs.step,
    }
    first = {name: seconds(way) for name, way in ways.items()}
    best = {name: min(seconds(way) for _ in range(3)) for name, way in ways.items()}
    with capsys.disabled():
        for name, took in best.items():
            print(
                f"\n{name}: {took * 1e9 / 2**23:.1f} ns per parameter; first step {first[name]:.1f} s", end=""
            )
    assert best["8bit"] < best["torchao, eager"]


def seconds(way: object) -> float:
    start = time.perf_counter()
    way()  # type: ignore[operator]
    return time.perf_counter() - start
