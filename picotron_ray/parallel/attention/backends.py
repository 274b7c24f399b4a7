"""Attention over whole rows, by the implementation that was asked for and no other.

Every one takes documents and windows (``models.documents``) in its own way:

- FlashAttention on CUDA, torch's and the package's, is told where documents start and how far a query looks
  back, and computes nothing that is not seen. Rows are laid end to end, one sequence per document.
- The others get a mask, ``[row, row]`` per row of the batch, which they add to all scores. cuDNN gets none.

What follows from the documents is made once per micro-batch, not per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from picotron_ray.config.support.kernels import Backend
from picotron_ray.errors import LayoutError
from picotron_ray.models.layers.document_mask import document_starts, seen_in_row
from picotron_ray.parallel.attention.lse_kernels import additive

WholeKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, int | None], Tensor]
"""See `models.layers.attention.sdpa`; or with where documents start, for their numbers."""

NO_MASK = "kernels.attention: saw cudnn, which takes neither document masks nor windows here; use auto"


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The attention of one model: which modules, by which implementation, over rows of how many tokens.

    Fields:
        modules: by name, ``*`` standing for one part.
        window: tokens that a query sees at most; None: all.
    """

    modules: tuple[str, ...]
    backend: Backend
    length: int
    window: int | None = None

    def __str__(self) -> str:
        within = f", window of {self.window}" if self.window is not None else ""
        return f"{self.backend} attention{within}"


class OfDocuments:
    """What follows from the documents at hand, made once for all layers that ask for it.

    It is found again by the numbers' own tensor, which a micro-batch keeps for its whole life: another one in
    flight, or a forward that runs again, can cost time here but never get another's.

    Args:
        make: of the numbers ``[batch, row]`` and whatever else it takes.
    """

    def __init__(self, make: Callable[..., Tensor]) -> None:
        self._make = make
        self._documents, self._rest, self._made = torch.empty(0), (), torch.empty(0)

    def __call__(self, documents: Tensor, *rest: Any) -> Tensor:
        if documents is not self._documents or rest != self._rest:
            self._documents, self._rest, self._made = documents, rest, self._make(documents, *rest)
        return self._made


def _mask(documents: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """What is added to scores, ``[batch, 1, row, row]`` in their type."""
    return additive(seen_in_row(documents.size(-1), documents, window, documents.device), dtype)


@lru_cache(maxsize=4)
def _window_mask(row: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Likewise, where rows are one document: ``[1, 1, row, row]`` for all layers and steps."""
    with torch.inference_mode(False):  # evaluation may be the first to ask
        return additive(seen_in_row(row, None, window, device), dtype)


def whole_kernel(backend: Backend, *, compiled: bool = False) -> WholeKernel:
    """Causal attention over whole rows, by that implementation and no other.

    It takes ``q [batch, heads, seq, head]``, ``k, v [batch, kv_heads, seq, head]``, the numbers of documents
    ``[batch, seq]`` or None, and a window or None, and raises RuntimeError where the implementation cannot:
    torch alone would use another without a word.

    Args:
        compiled: whether torch.compile looks into what calls it.
    """
    if backend == "flash-attn":
        return _package(compiled)
    masked = _masked(backend)
    if backend != "flash":
        return masked
    of_documents = _apart(flash, compiled)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, window: int | None = None
    ) -> Tensor:
        if q.device.type == "cpu" or (documents is None and window is None):
            return masked(q, k, v, documents, window)
        attention = flash if documents is None else of_documents
        return attention(q, k, v, documents, window)

    return attend


def _masked(backend: Backend) -> WholeKernel:
    """One of torch's, with a mask for documents and windows."""
    chosen, mask = _TORCH[backend], OfDocuments(_mask)
    shares_keys = backend in ("flash", "math")

    def attend(
        q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, window: int | None = None
    ) -> Tensor:
        bias = None
        if backend == "cudnn" and (documents is not None or window is not None):
            raise LayoutError(NO_MASK)
        if documents is not None:
            bias = mask(documents, window, q.dtype)
        elif window is not None:
            bias = _window_mask(q.size(-2), window, q.dtype, q.device)
        grouped = k.size(1) != q.size(1)
        if grouped and not shares_keys:
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=bias is None, enable_gqa=grouped and shares_keys
            )

    return attend


_TORCH: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def _apart(varied: WholeKernel, compiled: bool) -> WholeKernel:
    """Attention by a kernel that is told where documents start, as one that is given their numbers.

    How many documents there are is known when the host has waited for the device: once per micro-batch and
    stage, and again where a recomputed forward finds those of another. A length that is the same for every
    micro-batch would wait for nothing, but the kernels launch blocks and take memory (128 rows of fp32
    gradients) per sequence: ``batch x row`` of them, nearly all empty, cost more than attention itself.

    Compiled blocks leave it to Python, or each number of documents would be compiled for anew.
    """
    starts = OfDocuments(document_starts)

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
        return varied(q, k, v, None if documents is None else starts(documents), window)

    return torch.compiler.disable(attend) if compiled else attend


def flash(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None) -> Tensor:
    """Torch's FlashAttention-2 with documents or a window, on CUDA in bf16 and fp16.

    The operator under ``torch.nn.attention.varlen.varlen_attn``, called as there; it takes whole batches too,
    which then need not be laid end to end, and has the arguments below in torch 2.11 to 2.13.

    Args:
        q: ``[batch, heads, row, head]``; k, v ``[batch, kv_heads, row, head]``.
        starts: see `document_starts`; None: every row is one document.
        window: how many tokens a query sees at most; None: all before it.

    Returns: ``[batch, heads, row, head]``.
    """
    row, looks_back = q.size(-2), -1 if window is None else window - 1
    q, k, v = laid_out(q, k, v, ends_meet=starts is not None)
    out, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, starts, starts, row, row, 0.0),
        window is None,  # causal; with a window that is its right side
        False,
        window_size_left=looks_back,
        window_size_right=0,
    )
    return _as_heads(out, row)


def laid_out(q: Tensor, k: Tensor, v: Tensor, *, ends_meet: bool) -> tuple[Tensor, ...]:
    """Heads ``[batch, heads, row, head]`` as FlashAttention wants them, in the type of autocast.

    Returns: each ``[batch, row, heads, head]``, or ``[batch x row, heads, head]`` where the rows' ends meet.
    """
    kind, dtype = q.device.type, q.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    laid = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    return tuple(x.flatten(0, 1) if ends_meet else x for x in laid)


def _as_heads(out: Tensor, row: int) -> Tensor:
    """What `laid_out` changed, back: ``[batch, heads, row, head]``."""
    return (out.unflatten(0, (-1, row)) if out.dim() == 3 else out).transpose(1, 2)


def _package(compiled: bool) -> WholeKernel:
    """FlashAttention of its authors' package (Dao 2023)."""
    try:
        from flash_attn import flash_attn_func, flash_attn_varlen_func
    except ImportError as error:
        raise LayoutError(
            "kernels.attention: saw flash-attn, which is not installed; pip install 'picotron-ray[flash]'"
        ) from error

    def varied(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None) -> Tensor:
        row, sides = q.size(-2), (-1, -1) if window is None else (window - 1, 0)
        heads = laid_out(q, k, v, ends_meet=starts is not None)
        if starts is None:
            out: Tensor = flash_attn_func(*heads, causal=True, window_size=sides)
        else:
            out = flash_attn_varlen_func(*heads, starts, starts, row, row, causal=True, window_size=sides)
        return _as_heads(out, row)

    of_documents = _apart(varied, compiled)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, window: int | None = None
    ) -> Tensor:
        return (
            varied(q, k, v, None, window) if documents is None else of_documents(q, k, v, documents, window)
        )

    return attend
