"""Attention backends over whole rows. The backend that was asked for runs, and no other.

Each takes documents and windows (``models.layers.document_mask``) in its own way:

- FlashAttention on CUDA, torch's and the package's, is told where documents start and how far a query looks
  back. It computes no masked score. Rows are laid end to end, one sequence per document.
- The others add a mask to all scores, ``[row, row]`` per row of the batch. cuDNN takes none.

Scores are capped (``models.layers.softcap``) by the formulas, ``math``, with all scores in memory, and by the
package flash-attn.

Masks and starts of documents are made once per micro-batch, not per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from picotron_ray.config.support.kernels import Backend
from picotron_ray.errors import LayoutError, install_extra
from picotron_ray.models.layers.document_mask import document_starts, seen_in_row
from picotron_ray.models.layers.softcap import capped_attention
from picotron_ray.parallel.attention.flash_operators import Sequences, TorchFlash
from picotron_ray.parallel.attention.lse_kernels import additive_mask

RowAttention = Callable[..., Tensor]
"""See ``models.layers.attention.sdpa``; or with the starts of documents in place of their numbers.

With sinks (``sinks``) they come after the window.
"""

NO_MASK = "kernels.attention: saw cudnn, which takes neither document masks nor windows here; use auto"
NO_CAP = (
    "kernels.attention: saw {}, which caps no scores (model.attention_softcap); use auto, math or flash-attn"
)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention plan of one model.

    Fields:
        modules: names of the attention modules, ``*`` standing for one part.
        backend: the implementation.
        length: tokens of a row.
        window: tokens that a query sees at most, in blocks that have one; None: all.
        softcap: bound of scores; None: there is none.
        whole_every: every so many blocks one has no window; None: none.
        full: the implementation for parts in fp32, where ``backend`` has none for them; None: the same.
        sinks: whether heads have sinks (``models.layers.sinks``).
    """

    modules: tuple[str, ...]
    backend: Backend
    length: int
    window: int | None = None
    softcap: float | None = None
    whole_every: int | None = None
    full: Backend | None = None
    sinks: bool = False

    def __str__(self) -> str:
        within = f", window of {self.window}" if self.window is not None else ""
        if within and self.whole_every is not None:
            within += f", of every {self.whole_every} blocks but one"
        within += f", scores capped at {self.softcap:g}" if self.softcap is not None else ""
        within += ", with sinks" if self.sinks else ""
        full = f", in fp32 {self.full}" if self.full is not None else ""
        return f"{self.backend}{full} attention{within}"


Made = TypeVar("Made")


class DocumentCache(Generic[Made]):
    """Cache of what is made from document numbers, for all layers of a micro-batch.

    The key is the numbers' own tensor, which a micro-batch keeps for its whole life. Another micro-batch in
    flight, or a repeated forward pass, may make it again but never gets another's.

    Args:
        make: makes it from the numbers ``[batch, row]`` and further arguments.
    """

    def __init__(self, make: Callable[..., Made]) -> None:
        self._make = make
        self._documents, self._made = torch.empty(0), dict[tuple[Any, ...], Made]()

    def __call__(self, documents: Tensor, *rest: Any) -> Made:
        if documents is not self._documents:
            self._documents, self._made = documents, {}
        if rest not in self._made:  # layers with a window and without are two
            self._made[rest] = self._make(documents, *rest)
        return self._made[rest]


def _mask(documents: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive mask of documents, ``[batch, 1, row, row]`` in the type of scores."""
    return additive_mask(seen_in_row(documents.size(-1), documents, window, documents.device), dtype)


@lru_cache(maxsize=4)
def _window_mask(row: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask of a window, ``[1, 1, row, row]``, for all layers and steps."""
    with torch.inference_mode(False):  # evaluation may be the first to ask
        return additive_mask(seen_in_row(row, None, window, device), dtype)


def _seen(documents: Tensor, window: int | None) -> Tensor:
    """Mask of what a query sees in its document, bool ``[batch, 1, row, row]``."""
    return seen_in_row(documents.size(-1), documents, window, documents.device)


@lru_cache(maxsize=4)
def _seen_before(row: int, window: int | None, device: torch.device) -> Tensor:
    """Mask of what a query sees in a row, bool ``[1, 1, row, row]``, for all layers and steps."""
    with torch.inference_mode(False):
        return seen_in_row(row, None, window, device)


def capped_kernel(cap: float) -> RowAttention:
    """Kernel of capped scores, as `attention_kernel`."""
    mask = DocumentCache(_seen)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, window: int | None = None
    ) -> Tensor:
        if documents is not None:
            seen = mask(documents, window)
        else:
            seen = _seen_before(q.size(-2), window, q.device)
        return capped_attention(q, k, v, seen, cap)

    return attend


def attention_kernel(
    backend: Backend, *, compiled: bool = False, softcap: float | None = None
) -> RowAttention:
    """Causal attention kernel over whole rows, by one implementation.

    The kernel takes ``q [batch, heads, seq, head]``, ``k, v [batch, kv_heads, seq, head]``, document numbers
    ``[batch, seq]`` or None, and a window or None. It raises RuntimeError where the implementation cannot do
    that; torch by itself would silently use another.

    Args:
        compiled: whether torch.compile traces the caller.
        softcap: bound of scores; None: there is none.
    """
    if backend == "flash-attn":
        return _flash_attn_kernel(compiled, softcap)
    if softcap is not None:
        if backend != "math":
            raise LayoutError(NO_CAP.format(backend))
        return capped_kernel(softcap)
    masked = _torch_kernel(backend)
    if backend != "flash":
        return masked
    of_documents = _with_document_starts(flash, compiled)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, window: int | None = None
    ) -> Tensor:
        if q.device.type == "cpu" or (documents is None and window is None):
            return masked(q, k, v, documents, window)
        attention = flash if documents is None else of_documents
        return attention(q, k, v, documents, window)

    return attend


def _torch_kernel(backend: Backend) -> RowAttention:
    """One of torch's implementations, with a mask for documents and windows."""
    chosen, mask = _TORCH[backend], DocumentCache(_mask)
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


def _with_document_starts(varied: RowAttention, compiled: bool) -> RowAttention:
    """Adapt a kernel that takes the starts of documents to one that takes their numbers.

    The host waits for the device to learn the number of documents: once per micro-batch and stage, and again
    where a recomputed forward pass finds those of another micro-batch. A fixed length for all micro-batches
    would need no wait. But the kernels launch blocks and take memory (128 rows of fp32 gradients) per
    sequence, and ``batch x row`` nearly empty sequences cost more than attention itself.

    Compiled blocks call it in Python, because each number of documents would be compiled for anew.
    """
    starts = DocumentCache(document_starts)

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
        return varied(q, k, v, None if documents is None else starts(documents), window)

    return torch.compiler.disable(attend) if compiled else attend


def flash(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None) -> Tensor:
    """Torch's FlashAttention-2 with documents or a window, on CUDA in bf16 and fp16.

    It calls the operator under ``torch.nn.attention.varlen.varlen_attn`` as that function does. The operator
    takes whole batches too, which then need not be laid end to end.

    Args:
        q: ``[batch, heads, row, head]``; k, v ``[batch, kv_heads, row, head]``.
        starts: see `document_starts`; None: every row is one document.
        window: tokens that a query sees at most; None: all before it.

    Returns: ``[batch, heads, row, head]``.
    """
    row = q.size(-2)
    heads = to_flash_layout(q, k, v, ends_meet=starts is not None)
    left = None if window is None else window - 1
    of = Sequences(None if starts is None else (starts, starts), (row, row), left, causal=True)
    out, _ = TorchFlash().forward(heads[0], heads[1], heads[2], of)
    return _from_flash_layout(out, row)


def to_flash_layout(q: Tensor, k: Tensor, v: Tensor, *, ends_meet: bool) -> tuple[Tensor, ...]:
    """Lay out heads ``[batch, heads, row, head]`` for FlashAttention, in the type of autocast.

    Returns: each ``[batch, row, heads, head]``, or ``[batch x row, heads, head]`` where the rows' ends meet.
    """
    kind, dtype = q.device.type, q.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    laid = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    return tuple(x.flatten(0, 1) if ends_meet else x for x in laid)


def _from_flash_layout(out: Tensor, row: int) -> Tensor:
    """Invert `to_flash_layout`: ``[batch, heads, row, head]``."""
    return (out.unflatten(0, (-1, row)) if out.dim() == 3 else out).transpose(1, 2)


def _flash_attn_kernel(compiled: bool, softcap: float | None = None) -> RowAttention:
    """FlashAttention from its authors' package (Dao 2023), which caps scores from 2.6 on."""
    try:
        from flash_attn import flash_attn_func, flash_attn_varlen_func
    except ImportError as error:
        raise LayoutError(
            f"kernels.attention: saw flash-attn, which is not installed; {install_extra('flash')}"
        ) from error

    more: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
    if torch.are_deterministic_algorithms_enabled():  # torch's kernels look at that by themselves
        more["deterministic"] = True

    def varied(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None) -> Tensor:
        row, sides = q.size(-2), (-1, -1) if window is None else (window - 1, 0)
        heads = to_flash_layout(q, k, v, ends_meet=starts is not None)
        options: dict[str, Any] = {"causal": True, "window_size": sides, **more}
        if starts is None:
            out: Tensor = flash_attn_func(*heads, **options)
        else:
            out = flash_attn_varlen_func(*heads, starts, starts, row, row, **options)
        return _from_flash_layout(out, row)

    of_documents = _with_document_starts(varied, compiled)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, window: int | None = None
    ) -> Tensor:
        return (
            varied(q, k, v, None, window) if documents is None else of_documents(q, k, v, documents, window)
        )

    return attend
