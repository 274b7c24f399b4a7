"""fp8 training by torchao (extra ``fp8``), for the products of the linear layers inside blocks.

Inputs and weights are cast to e4m3 (Micikevicius et al. 2022, FP8 Formats for Deep Learning), with scales
from the largest values at every use, in one of three ways (``fp8.scaling``):

- tensorwise: one scale for a tensor; gradients in e5m2,
- rowwise: one for each row or column along which a product adds up, a power of two; gradients in e4m3,
- mxfp8: one for every 32 values, a power of two (OCP Microscaling Formats, 2023); gradients in e4m3.

Products accumulate in a wider type and are returned in bf16. Weights come in bf16, their masters are fp32.
Head, embeddings, router, norms and stacked experts are not converted.

torchao replaces each layer by a subclass of nn.Linear with the same parameters under the same names. That
happens before anything cuts the model. Under tensor parallelism each rank's part of a weight has its own
scale, so that losses differ between layouts by roundings.

Under FSDP tensorwise weights may be gathered in 8 bits: each rank casts its shard by the scale of the whole
weight. The scales are made once a step, before the first gather, by one all-reduce of all largest values; a
gather then waits for nothing else. Weights go from fp32 to 8 bits without bf16 between. Shards must be of
equal size, as torchao pads none. What is updated and kept stays fp32, in the same boxes: `local_tensor` of
`parallel.local_shards` looks inside.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from picotron_ray.comm.wire_bytes import PARAMETERS, SENT
from picotron_ray.config.schema.compute import Fp8Scaling
from picotron_ray.errors import LayoutError
from picotron_ray.parallel.precision import torchao_layers as torchao

EMULATE = False
"""Emulate fp8: the same roundings by wider products, for tests on devices without it."""


def apply_fp8(blocks: Sequence[nn.Module], scaling: Fp8Scaling = "tensorwise") -> int:
    """Convert every linear layer inside the blocks to fp8, in place; return their number.

    Raises:
        LayoutError: torchao is missing, or has not this scaling here.
    """
    return sum(len(torchao.convert(block, scaling, emulate=EMULATE)) for block in blocks)


def gather_in_fp8(blocks: Sequence[nn.Module], shards: int) -> int:
    """Make FSDP, which is applied next, gather the blocks' fp8 weights in 8 bits; return their number.

    Raises:
        LayoutError: a weight's rows do not divide into the shards.
    """
    layers = [m for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
    for layer in layers:
        rows = layer.weight.shape[0]
        if rows % shards:
            raise LayoutError(
                f"fp8.gather: saw fp8 with weights of {rows} rows over {shards} ranks, expected a multiple"
                " of these; use bf16"
            )
        torchao.gather_narrow(layer)
    return len(layers)


class GatherScales:
    """Scales of the weights that FSDP gathers in 8 bits.

    Args:
        model: one stage, its weights sharded; it may have none such.
        group: the ranks that share each weight. None: no ranks do.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._model, self._group = model, group
        self._weights = len(torchao.narrow_gathers(model))

    def refresh(self) -> None:
        """Compute them from the weights as they are, all of which must be sharded; all ranks together."""
        if self._weights and self._group is not None:
            found = torchao.narrow_gathers(self._model)
            assert len(found) == self._weights, "a gathered weight would keep an old scale"
            SENT.add(PARAMETERS, torchao.fill_scales(found, self._group))
