"""torch's CUDA attention operators on a CPU, as its sources describe them, which check what they are given.

Results are by the formulas, in any type. A GPU is needed to know that the description is right
(tests/gpu/test_attention.py); here it shows what our side makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from picotron_ray.parallel.attention.lse_kernels import KeyMask, MathKernel

MATH = MathKernel()
ALIGNED = 4
"""Elements at a multiple of which a bias's rows start, at least."""
Sides = dict[str, int]


def _band(causal: bool, sides: Sides) -> KeyMask:
    """FlashAttention's window over one sequence, counted from the ends; a negative side has no end."""
    left, right = sides["window_size_left"], 0 if causal else sides["window_size_right"]
    assert right in (-1, 0)
    return KeyMask(right == 0, None if left < 0 else left)


def _sequences(
    q: Tensor, k: Tensor, starts: Tensor | None, of_keys: Tensor | None
) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Index of each sequence's queries and keys in ``[batch, tokens, ...]`` or in rows laid end to end."""
    if starts is None or of_keys is None:
        yield from (((entry, slice(None)),) * 2 for entry in range(q.size(0)))
        return
    for x, given in ((q, starts), (k, of_keys)):
        assert given.dtype == torch.int32
        assert int(given[0]) == 0
        assert int(given[-1]) == x.size(0)
    for queries, keys in zip(pairwise(starts.tolist()), pairwise(of_keys.tolist()), strict=True):
        yield (slice(*queries),), (slice(*keys),)


def _heads(x: Tensor, at: tuple[Any, ...]) -> Tensor:
    """``[..., tokens, heads, head]`` → ``[1, heads, tokens of one sequence, head]``."""
    return x[at].transpose(0, 1)[None]


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, of_keys: Tensor | None, *rest: Any, **sides: int
) -> tuple[Tensor, ...]:
    """Where nothing is seen, out is 0 and the log-sum-exp inf."""
    longest, longest_keys, _, causal, _ = rest
    ends_meet = starts is not None
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:-1]).transpose(-1, -2).contiguous()  # [heads, tokens], a batch before it
    for queries, keys in _sequences(q, k, starts, of_keys):
        parts = [_heads(x, at) for x, at in ((q, queries), (k, keys), (v, keys))]
        assert parts[0].size(-2) <= longest
        assert parts[1].size(-2) <= longest_keys
        of = (slice(None), *queries) if ends_meet else queries[:1]
        if not parts[1].size(-2):
            out[queries], lse[of] = 0.0, float("inf")
            continue
        found, level = MATH.forward(*parts, _band(causal, sides))
        out[queries] = found[0].transpose(0, 1)
        lse[of] = level[0].masked_fill(level[0] == float("-inf"), float("inf"))
    state = torch.zeros(2, dtype=torch.uint64)
    return out, lse, state, state.new_empty(()), q.new_empty(0)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **sides: int
) -> tuple[Tensor, ...]:
    starts, of_keys, causal = rest[0], rest[1], rest[5]
    assert lse.is_contiguous()
    ends_meet = starts is not None and starts.numel() > 0
    found = tuple(torch.zeros_like(x) for x in (q, k, v))
    for queries, keys in _sequences(q, k, starts if ends_meet else None, of_keys if ends_meet else None):
        places = (queries, queries, keys, keys, queries)
        parts = [_heads(x, at) for x, at in zip((grad, q, k, v, out), places, strict=True)]
        if not parts[0].size(-2) or not parts[2].size(-2):
            continue
        level = lse[(slice(None), *queries) if ends_meet else queries[:1]][None]
        gradients = MATH.backward(*parts, level, _band(causal, sides))
        for whole, at, one in zip(found, places[1:4], gradients, strict=True):
            whole[at] = one[0].transpose(0, 1)
    return found


def _seen(bias: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> KeyMask:
    if bias is None:
        return KeyMask(causal)
    assert bias.shape == (*q.shape[:-1], k.size(-2))
    assert bias.dtype == q.dtype
    assert all(stride % ALIGNED == 0 for stride in bias.stride()[:-1])
    assert bias.stride(-1) == 1
    shown: Any = SimpleNamespace(same=bias == 0)
    return KeyMask(False, None, shown)


def efficient_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Out lies token by token; the log-sum-exp is padded by inf, and 0 where nothing is seen."""
    with_lse, _, causal = (*rest, 0.0, False)[:3] if len(rest) < 3 else rest  # defaults are not passed on
    assert with_lse
    out, lse = MATH.forward(q, k, v, _seen(bias, causal, q, k))
    padded = lse.new_full((*q.shape[:2], -(-q.size(2) // 32) * 32), float("inf"))
    padded[..., : q.size(2)] = lse.masked_fill(lse == float("-inf"), 0.0)
    seed = torch.zeros((), dtype=torch.int64)
    return out.transpose(1, 2).contiguous().transpose(1, 2), padded, seed, seed.clone()


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    """Reads out as if it lay token by token, whatever its strides."""
    assert lse.stride(1) % 8 == 0, "LSE is not correctly aligned"
    assert (lse[..., q.size(2) :] == float("inf")).all()
    batch, heads, tokens, head = out.shape
    strides = out.stride(0), heads * head, head, 1
    lying = out.as_strided((batch, tokens, heads, head), strides, out.storage_offset())
    assert tuple(rest[3]) == (True, True, True, False)
    seen = _seen(bias, (*rest, False)[4], q, k)
    return (*MATH.backward(grad, q, k, v, lying.transpose(1, 2), lse[..., : q.size(2)], seen), None)


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, bias: None, *rest: Any) -> tuple[Any, ...]:
    with_lse, _, causal = (*rest, 0.0, False)[:3] if len(rest) < 3 else rest[:3]
    assert with_lse
    assert bias is None
    out, lse = MATH.forward(q, k, v, KeyMask(causal))
    others = [torch.zeros((), dtype=torch.int64) for _ in range(5)]
    return out, lse.unsqueeze(-1), *others[:2], q.size(2), k.size(2), *others[2:]


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    assert lse.shape == (*q.shape[:-1], 1)
    assert rest[5:7] == (q.size(2), k.size(2))
    return MATH.backward(grad, q, k, v, out, lse.squeeze(-1), KeyMask(rest[8]))


@contextmanager
def emulated() -> Iterator[None]:
    """The operators have CPU kernels within."""
    flash, efficient = "_flash_attention", "_scaled_dot_product_efficient_attention"
    cudnn = "_scaled_dot_product_cudnn_attention"
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(f"{flash}_forward", flash_forward, "CPU")
        library.impl(f"{flash}_backward", flash_backward, "CPU")
        library.impl(efficient, efficient_forward, "CPU")
        library.impl(f"{efficient}_backward", efficient_backward, "CPU")
        library.impl(cudnn, cudnn_forward, "CPU")
        library.impl(f"{cudnn}_backward", cudnn_backward, "CPU")
        yield
