"""Activation recomputation: torch's non-reentrant checkpoint around the forward of chosen blocks.

It replaces ``forward`` and wraps no module, so that names stay canonical. It lies inside ZeRO's units:
weights are gathered before the backward pass of a block begins, and so before its activations are computed
again. Collectives inside a block (sequence parallel, ring, experts) run again in the same order on every
rank, because all ranks of a group hold the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from picotron_ray.layout.recompute_policy import RecomputeKind

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_flash_attention_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn::_flash_attn_forward",  # registered from flash-attn 2.7 on
    }
)
"""Operators whose results are kept, as they are expensive to compute. By name: some may be missing."""

SAC_IGNORED_OPS.update(
    (
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    )
)
"""Torch matches the operators of both forward passes by their number. Marks for profilers are none of them:
ZeRO's units inside a block (routers, experts) set one more in a second pass, where one is taken for the root.
"""


def _policy(context: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _matching_what_is_kept(mode: Any) -> type[TorchDispatchMode]:
    """Derive from torch's mode of a second forward pass one that matches only what is kept.

    What is made once for all layers (masks of documents) is made again where another micro-batch came in
    between. To torch's own mode those operators would be more than the first pass had.
    """

    class SecondPass(mode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.name() in KEPT:
                return super().__torch_dispatch__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))

    return SecondPass


@contextmanager
def _again(routers: Sequence[Any]) -> Iterator[None]:
    """Run a second forward pass, in which routers do not count tokens again."""
    for router in routers:
        router.counting = False
    try:
        yield
    finally:
        for router in routers:
            router.counting = True


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def _contexts(kind: RecomputeKind, routers: Sequence[Any]) -> tuple[Any, Any]:
    """Return contexts of the first forward pass, and of the one in the backward pass."""
    if kind == "full":
        return nullcontext(), _again(routers)
    forward, recompute = create_selective_checkpoint_contexts(_policy)
    mode: Any = type(recompute)
    recompute.__class__ = _matching_what_is_kept(mode)
    return forward, _both(recompute, _again(routers))


def apply_recompute(
    blocks: Sequence[nn.Module], kinds: Sequence[RecomputeKind], routers: Sequence[Sequence[Any]]
) -> int:
    """Let chosen blocks compute their activations again in the backward pass, in place; return their number.

    Args:
        blocks: of one stage, in order.
        kinds: of treatment, for each block; int8 is `activation_quantization`'s.
        routers: the modules of each block that count tokens (``counting``).
    """
    count = 0
    for block, kind, inside in zip(blocks, kinds, routers, strict=True):
        if kind in ("kept", "int8"):
            continue
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(_contexts, kind, inside),
        )
        count += 1
    return count
