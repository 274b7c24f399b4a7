"""FlashAttention-2 as an operator with log-sum-exp: torch's, and that of its authors' package.

Torch's public functions hide what a merge needs: a backward pass that takes the whole row's log-sum-exp. So
its operators are private; ``native_functions.yaml`` of torch 2.11 to 2.13 declares them alike, and their
results were read in ``aten/src/ATen/native/transformers/cuda``. The package's functions have an underscore
too, and these arguments from 2.7 on.

Both take tensors ``[batch, row, heads, head]``, or ``[tokens, heads, head]`` of sequences laid end to end,
with fewer key heads than query heads, in bf16 and fp16 on CUDA. Their log-sum-exp is ``[batch, heads, row]``,
or ``[heads, tokens]``, in fp32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from picotron_ray.errors import LayoutError, install_extra


class Sequences(NamedTuple):
    """Sequences of queries and keys, and how far a query sees in its own.

    Fields:
        starts: of sequences in queries and in keys laid end to end, int32 ``[sequences + 1]``; None: whole
            batches.
        longest: queries and keys of the longest sequence, or more.
        left: keys that a query sees before its neighbour, counted from the ends of both; None: all.
        causal: whether it sees none after its neighbour.
    """

    starts: tuple[Tensor, Tensor] | None
    longest: tuple[int, int]
    left: int | None
    causal: bool

    @property
    def sides(self) -> tuple[int, int]:
        """Keys to the left and to the right of a query's neighbour; -1: all."""
        return -1 if self.left is None else self.left, 0 if self.causal else -1

    @property
    def flag(self) -> bool:
        """Whether the kernel is asked to be causal; with a window that is its right side."""
        return self.causal and self.left is None


class FlashOperators(ABC):
    """Forward and backward operator."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, of: Sequences) -> tuple[Tensor, Tensor]:
        """``(out, lse)``."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, of: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""


class TorchFlash(FlashOperators):
    """The kernels that torch ships."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, of: Sequences) -> tuple[Tensor, Tensor]:
        """As above; autograd has a formula for ``out``."""
        left, right = of.sides
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, *(of.starts or (None, None)), *of.longest, 0.0, of.flag, False),
            window_size_left=left,
            window_size_right=right,
        )
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, of: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        left, right = of.sides
        # without dropout the random state is not read
        seed, offset = (torch.zeros(n, dtype=torch.uint64, device=q.device) for n in ((2,), ()))
        starts = of.starts or (None, None)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(grad, q, k, v, out, lse, *starts, *of.longest, 0.0, of.flag, seed, offset),
            window_size_left=left,
            window_size_right=right,
        )
        return dq, dk, dv


PACKAGE_LEAST = (2, 7)


class PackageFlash(FlashOperators):
    """Kernels of the package flash-attn (Dao 2023), which also cap scores.

    Args:
        softcap: bound of scores; None: there is none.

    Raises:
        LayoutError: it is not installed, or older than its functions.
    """

    def __init__(self, softcap: float | None = None) -> None:
        need = f"{install_extra('flash')}, or use kernels.attention=auto"
        try:
            from flash_attn import flash_attn_interface
        except ImportError as error:
            raise LayoutError(f"kernels.attention: saw flash-attn, which is not installed; {need}") from error
        version = metadata.version("flash-attn")
        if tuple(int(part) for part in version.split(".")[:2]) < PACKAGE_LEAST:
            least = ".".join(map(str, PACKAGE_LEAST))
            raise LayoutError(
                f"kernels.attention: saw flash-attn {version}, expected {least} or later for attention over"
                f" parts of rows (layout.cp) and with sinks; {need}"
            )
        self._package, self._softcap = flash_attn_interface, softcap or 0.0

    def _options(self, q: Tensor, of: Sequences) -> dict[str, Any]:
        left, right = of.sides
        named: dict[str, Any] = {
            "dropout_p": 0.0, "softmax_scale": q.size(-1) ** -0.5, "causal": of.flag,
            "window_size_left": left, "window_size_right": right, "softcap": self._softcap,
            "alibi_slopes": None,
        }  # fmt: skip
        if of.starts is not None:
            named |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), of.starts, strict=True))
            named |= dict(zip(("max_seqlen_q", "max_seqlen_k"), of.longest, strict=True))
        return named

    def forward(self, q: Tensor, k: Tensor, v: Tensor, of: Sequences) -> tuple[Tensor, Tensor]:
        varied = of.starts is not None
        call = self._package._flash_attn_varlen_forward if varied else self._package._flash_attn_forward
        out, lse, *_ = call(q=q, k=k, v=v, return_softmax=False, **self._options(q, of))
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, of: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        varied = of.starts is not None
        call = self._package._flash_attn_varlen_backward if varied else self._package._flash_attn_backward
        q, k, v = (x.contiguous() for x in (q, k, v))
        found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        options = {
            **self._options(q, of),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "rng_state": None,
        }
        dq, dk, dv = found
        call(dout=grad, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv, **options)
        return found
