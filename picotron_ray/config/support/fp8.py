"""fp8: the widths that its products take, and in which layouts ZeRO gathers weights in 8 bits. Torch-free."""

from __future__ import annotations

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.kernels import hidden_widths
from picotron_ray.layout.layout import Layout

MULTIPLE = 16
"""Of every dimension of an fp8 product (cuBLASLt); tokens too, over which weights' gradients are sums."""
MX_MULTIPLE = 32
"""Of MXFP8's: values that share a scale, along either dimension (OCP Microscaling Formats, 2023)."""


def least_multiple(job: JobConfig) -> int:
    """Return what every dimension of the job's fp8 products must be a multiple of."""
    return MX_MULTIPLE if job.fp8.scaling == "mxfp8" else MULTIPLE


def product_widths(job: JobConfig, tp: int) -> dict[str, int]:
    """List widths of the inputs and outputs of a tensor-parallel rank's fp8 layers, by key or in words."""
    model = job.model
    parts = {key: size for key, size in hidden_widths(job).items() if key != "model.moe.intermediate_size"}
    parts |= {"query heads": model.query_width, "key heads": model.key_width}
    sizes = {"model.hidden_size": model.hidden_size}
    mla = model.mla
    if mla.kv_lora_rank:
        parts |= {"value heads": model.value_width}
        parts |= {"keys and values": model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)}
        sizes |= {"model.mla.kv_lora_rank": mla.kv_lora_rank, "model.mla.q_lora_rank": mla.q_lora_rank or 0}
        sizes |= {"kv_lora_rank + qk_rope_head_dim": mla.kv_lora_rank + mla.qk_rope_head_dim}
    return sizes | {key: size // tp for key, size in parts.items()}


def unshared_widths(job: JobConfig, layout: Layout) -> dict[str, int]:
    """Find the widths that do not divide into ZeRO's shards: torchao pads no shard of 8 bits."""
    return {key: size for key, size in product_widths(job, layout.tp).items() if size % layout.shards}


def gathers_in_fp8(job: JobConfig, layout: Layout) -> bool:
    """Whether ZeRO gathers the weights of fp8 layers in 8 bits."""
    if job.precision != "fp8" or job.fp8.gather == "bf16" or job.fp8.scaling != "tensorwise":
        return False
    return layout.zero > 0 and layout.replicas > 1 and not unshared_widths(job, layout)
