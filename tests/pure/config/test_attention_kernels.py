"""Which attention kernels are offered where, the one of ``auto`` first."""

from __future__ import annotations

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.config.support.kernels import attention_backends

MASKS, WINDOW = "data.document_masks=true", "model.sliding_window=64"
CAPPED = ("model.family=gemma2", "model.attention_softcap=50")
CPU, MATH = ["flash", "math"], ["math"]
FP32 = ["efficient", "math"]
VARIED = ["flash", "flash-attn", "efficient", "math"]
HALF = ["flash", "cudnn", "flash-attn", "efficient", "math"]


@pytest.mark.parametrize(
    ("device", "precision", "options", "offered"),
    [
        ("cpu", "bf16", (), CPU),
        ("cpu", "fp64", (MASKS,), CPU),
        ("cuda", "fp64", (), MATH),
        ("cuda", "fp32", (MASKS, WINDOW), FP32),
        ("cuda", "tf32", (MASKS,), FP32),
        ("cuda", "bf16", (), HALF),
        ("cuda", "bf16", ("model.sliding_window=4096",), HALF),  # as long as the row: no window
        ("cuda", "fp8", (MASKS,), VARIED),
        ("cuda", "fp16", (WINDOW,), VARIED),
        ("cuda", "bf16", (MASKS, WINDOW), VARIED),
        ("cuda", "bf16", (MASKS,), VARIED),
        ("cuda", "bf16", ("adaptive_precision.error_bound=0.01",), ["flash", "efficient", "math"]),
        ("cuda", "bf16", ("adaptive_precision.error_bound=0.01", MASKS), FP32),
        ("cuda", "bf16", ("adaptive_precision.error_bound=0.01", *CAPPED), MATH),
        ("cuda", "bf16", ("model.head_dim=12",), MATH),
        ("cuda", "fp32", ("model.head_dim=12",), FP32),
        ("cuda", "fp32", ("model.head_dim=10",), MATH),
        ("cpu", "fp32", CAPPED, MATH),
        ("cuda", "bf16", (*CAPPED, WINDOW), ["math", "flash-attn"]),
        ("cuda", "fp32", CAPPED, MATH),
    ],
)
def test_what_is_offered(device: str, precision: str, options: tuple[str, ...], offered: list[str]) -> None:
    """Over parts of a row, under context parallelism, as over whole rows."""
    rows = "data.sequence_length=4096"
    job = load_job("quickstart", ["chaos=[]", rows, f"precision={precision}", *options])
    assert attention_backends(job, device) == offered
