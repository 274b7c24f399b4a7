"""Cost of one decoder block on one rank: products, attention and single-element operations, in seconds.

    t(product) = 2·m·n·k / flops · (1 + half / min(m, n, k)),  at least its bytes over the memory's bandwidth
    t(attention) = work of the causal half / its kernel's rate, or products and passes over the scores
    t(pointwise) = bytes moved / the memory's bandwidth

The backward pass takes two products for every one (Narayanan et al. 2021), and attention's 2.5 times its
forward work (Dao 2023). Rates come from a `DeviceProfile`, habits from its `SoftwareProfile`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.fast_path import compiles_blocks
from picotron_ray.config.support.precision import COMPUTE_BYTES
from picotron_ray.layout.layout import Layout
from picotron_ray.models.sizes import BlockProduct
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.model_sizes import remember_latest, sizes_of
from picotron_ray.planner.software_profile import FLASH_1, FORWARD_POINTWISE, SCORE_PASSES, UNFUSED_FLOPS

ATTENTION_BACKWARD = 2.5
UNFUSED_BACKWARD = 1.2
"""Passes over the scores in the backward pass of unfused attention, against its forward pass."""


class BlockTimes(NamedTuple):
    """Seconds of one block and micro-batch on one rank."""

    products_forward: float
    products_backward: float
    attention_forward: float
    attention_backward: float
    pointwise_forward: float
    pointwise_backward: float
    accumulate: float
    """reading weights and adding up their gradients, besides the products' own traffic"""
    last_product: float
    """the forward pass of its last product"""

    @property
    def forward(self) -> float:
        return self.products_forward + self.attention_forward + self.pointwise_forward

    @property
    def backward(self) -> float:
        return self.products_backward + self.attention_backward + self.pointwise_backward + self.accumulate

    @property
    def total(self) -> float:
        return self.forward + self.backward


def block_times(job: JobConfig, layout: Layout, profile: DeviceProfile) -> BlockTimes:
    """Seconds of one block of ``layout`` for one micro-batch."""
    rows = layout.widest_rows(job.data.global_batch)
    compiled = compiles_blocks(job, job.cluster.device, layout)
    return _block_times(job, rows, layout.tp, layout.cp, layout.ep, compiled, profile)


@remember_latest
def _block_times(
    job: JobConfig, rows: int, tp: int, cp: int, ep: int, compiled: bool, profile: DeviceProfile
) -> BlockTimes:
    tokens = rows * job.data.sequence_length / cp
    sizes = sizes_of(job.model)
    products = _products(job, tokens, tp, ep, profile)
    pointwise = tokens * _pointwise_bytes(job, tp, compiled, profile) / profile.memory_bytes_s
    held = (sizes.matrices - sizes.experts + sizes.experts / ep) / tp
    return BlockTimes(
        sum(products),
        2 * sum(products),
        *attention_s(job, tokens, tp, profile),
        FORWARD_POINTWISE * pointwise,
        (1 - FORWARD_POINTWISE) * pointwise,
        held * profile.software.accumulate_bytes / profile.memory_bytes_s,
        products[-1],
    )


def _products(job: JobConfig, tokens: float, tp: int, ep: int, profile: DeviceProfile) -> list[float]:
    """Seconds of each product of a block's forward pass; of all together where shapes are not told apart."""
    sizes = sizes_of(job.model)
    if not profile.matmul_half:
        work = 2 * tokens * (sizes.block - sizes.idle) * _cut(job, tp)
        return [tensor_loss(tp, profile) * work / profile.flops]
    unknown = (BlockProduct(sizes.matrices // sizes.hidden, sizes.hidden, "out"),)
    products = sizes.block_products or unknown
    return [_product_s(job, product, tokens, tp, ep, profile) for product in products]


def _cut(job: JobConfig, tp: int) -> float:
    """Share of a block's arithmetic on one rank; what tensor parallelism leaves whole, each rank computes."""
    sizes = sizes_of(job.model)
    whole = sizes.whole_block / sizes.block if sizes.whole_block else 0.0
    return whole + (1 - whole) / tp


def _product_s(
    job: JobConfig, product: BlockProduct, tokens: float, tp: int, ep: int, profile: DeviceProfile
) -> float:
    """Seconds of a product's forward pass on one rank; each of the two backward ones takes as long.

    Expert parallelism leaves a rank ``1 / ep`` of the experts and brings them ``ep`` times the tokens.
    """
    out = product.out / (tp if product.cut == "out" else 1)
    into = product.into / (tp if product.cut == "into" else 1)  # whole: neither
    here = ep if product.copies > 1 else 1
    rows, count = tokens * product.share * here, product.copies / here
    item = COMPUTE_BYTES[job.precision]
    return count * product_s(rows, out, into, item, job.precision == "fp8", profile)


def product_s(
    rows: float, out: float, into: float, item: int, eight_bits: bool, profile: DeviceProfile
) -> float:
    """Seconds of a matrix product of ``rows`` x ``into`` by ``into`` x ``out``.

    Args:
        item: bytes of one value.
        eight_bits: whether its factors are in 8 bits.
    """
    work = 2 * rows * out * into
    rate = profile.flops * (profile.software.fp8_speedup if eight_bits else 1.0)
    compute = work / rate * (1 + profile.matmul_half / min(rows, out, into))
    return max(compute, item * (rows * into + into * out + rows * out) / profile.memory_bytes_s)


def attention_s(job: JobConfig, tokens: float, tp: int, profile: DeviceProfile) -> tuple[float, float]:
    """Seconds of a block's attention, forward and backward, without its projections."""
    software, sizes = profile.software, sizes_of(job.model)
    square = 4 * tokens * job.data.sequence_length * sizes.scores * _cut(job, tp)
    if not profile.attention_flops:
        forward = tensor_loss(tp, profile) * square / profile.flops
        return forward, 2 * forward
    if software.attention == "unfused":
        products = square / (profile.flops * UNFUSED_FLOPS)
        heads = job.model.heads / tp
        scores = tokens * job.data.sequence_length * heads * COMPUTE_BYTES[job.precision]
        passes = SCORE_PASSES * scores / profile.memory_bytes_s
        return products + passes, 2 * products + UNFUSED_BACKWARD * passes
    slower = FLASH_1 if software.attention == "flash-1" else 1.0
    forward = square / 2 / (profile.attention_flops * slower)
    backward = ATTENTION_BACKWARD * square / 2 / (profile.attention_backward_flops * slower)
    return forward, backward


def _pointwise_bytes(job: JobConfig, tp: int, compiled: bool, profile: DeviceProfile) -> float:
    """Bytes per token of single-element operations, forward and backward, on one rank.

    Without sequence parallelism every rank has norms and the residual stream whole.
    """
    software, sizes = profile.software, sizes_of(job.model)
    times = software.compiled_pointwise if compiled else software.pointwise
    whole = 0.0 if software.sequence_parallel and sizes.sequence_cut else 7.0 * sizes.hidden
    if not sizes.sequence_cut:
        whole = float(sizes.pointwise)
    return times * COMPUTE_BYTES[job.precision] * (whole + (sizes.pointwise - whole) / tp)


def head_s(job: JobConfig, layout: Layout, profile: DeviceProfile) -> float:
    """Seconds of the head and the loss on the last stage, forward and backward, for one micro-batch.

    The linear cross-entropy computes its product once more. Logits are written and read in the wide
    precision: 24 bytes each in all, 14 where a compiler fuses the loss.
    """
    sizes, rows = sizes_of(job.model), layout.widest_rows(job.data.global_batch)
    tokens = rows * job.data.sequence_length / layout.cp
    width = sizes.vocabulary / (layout.tp if sizes.sequence_cut else 1)
    times = 4 if job.kernels.loss == "linear" else 3
    if not profile.matmul_half:
        work = times * 2 * tokens * width * sizes.hidden
        return tensor_loss(layout.tp, profile) * work / profile.flops
    one = product_s(tokens, width, sizes.hidden, COMPUTE_BYTES[job.precision], False, profile)
    moved = tokens * width * (14.0 if job.kernels.compile is True else 24.0)
    return times * one + (moved / profile.memory_bytes_s if profile.software.pointwise else 0.0)


def tensor_loss(tp: int, profile: DeviceProfile) -> float:
    """Factor of arithmetic by the thinner matrices of tensor parallelism, where shapes are not told apart."""
    return 1.0 if profile.matmul_half else 1 + profile.tensor_loss * math.log2(tp)
