"""Attention over whole rows with documents and windows: where documents start, what every kernel is told."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.llama.modules import block as llama_block
from picotron_ray.models.layers.attention import sdpa, softcapped
from picotron_ray.models.layers.document_mask import document_numbers, document_starts, seen_in_row
from picotron_ray.models.layers.softcap import capped_attention
from picotron_ray.models.transformer import Transformer
from picotron_ray.parallel.attention import backends
from picotron_ray.parallel.attention.backends import DocumentCache, attention_kernel, flash
from picotron_ray.train.engine import build_engine
from tests.support.gloo.emulated_attention import emulated
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, MODEL, batch, make_job

ROW, HEADS, KV_HEADS, HEAD = 24, 4, 2, 8
WINDOW = ModelConfig(**{**MODEL.model_dump(), "sliding_window": 3})
SEEN = pytest.mark.parametrize(
    ("documents", "window"),
    [(True, None), (False, 1), (False, 5), (False, ROW - 1), (True, 4), (True, 1)],
    ids=["documents", "self", "window", "nearly all", "both", "self of documents"],
)


def heads(count: int, seed: int, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, count, ROW, HEAD, generator=generator, dtype=torch.float64)


def some_documents() -> Tensor:
    """Three rows: of many documents, of one, and of one that starts where the row ends."""
    tokens = torch.randint(1, 9, (3, ROW), generator=torch.Generator().manual_seed(0))
    tokens[0, [0, 1, 6, 14]] = 0
    tokens[2, ROW - 2] = 0
    return document_numbers(tokens, 0)


def slow(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
    """A softmax per query over the keys that it sees, found one by one."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    rows = []
    for row in range(q.size(0)):
        found = []
        for i in range(ROW):
            keys = [
                j
                for j in range(i + 1)
                if (documents is None or documents[row, j] == documents[row, i])
                and (window is None or i - j < window)
            ]
            scores = (q[row, :, i, None] * k[row, :, keys]).sum(-1) / HEAD**0.5
            found.append((scores.softmax(-1)[..., None] * v[row, :, keys]).sum(-2))
        rows.append(torch.stack(found, dim=1))
    return torch.stack(rows)


def compared(attend: Any, documents: bool, window: int | None) -> None:
    """Output and gradients of a kernel against `slow`, in fp64."""
    inputs = [heads(n, i).requires_grad_() for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    numbers = some_documents() if documents else None
    expected, found = slow(*inputs, numbers, window), attend(*inputs, numbers, window)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradient = heads(HEADS, 9)
    wanted = torch.autograd.grad(expected, inputs, gradient)
    for a, b in zip(torch.autograd.grad(found, inputs, gradient), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


# --- where documents start -------------------------------------------------------------------------------


def test_rows_start_documents_and_the_last_one_ends() -> None:
    numbers = torch.tensor([[0, 0, 1, 2], [2, 2, 2, 2], [0, 1, 1, 1]], dtype=torch.int32)
    found = document_starts(numbers)
    assert found.tolist() == [0, 2, 3, 4, 8, 9, 12]
    assert found.dtype == torch.int32
    assert document_starts(torch.zeros(1, 1, dtype=torch.int32)).tolist() == [0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_every_token_lies_with_those_of_its_document(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, row = (int(torch.randint(1, n, (), generator=generator)) for n in (5, 40))
    numbers = document_numbers(torch.randint(0, 4, (rows, row), generator=generator), 0)
    starts = document_starts(numbers)
    together = torch.zeros(rows * row, rows * row, dtype=torch.bool)
    for first, end in pairwise(starts.tolist()):
        together[first:end, first:end] = True
    blocks = [seen_in_row(row, numbers[i : i + 1], None, CPU)[0, 0] for i in range(rows)]
    assert torch.equal(together.tril(), torch.block_diag(*blocks).bool())


@SEEN
def test_a_loop_over_documents_equals_the_mask(documents: bool, window: int | None) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor | None, window: int | None) -> Tensor:
        whole = torch.zeros(3, ROW, dtype=torch.int32) if numbers is None else numbers
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        found = []
        for first, end in pairwise(document_starts(whole).tolist()):
            one = [x[first:end].transpose(0, 1)[None] for x in flat]
            seen = seen_in_row(end - first, None, window, CPU)
            found.append(
                F.scaled_dot_product_attention(*one, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)
            )
        return torch.cat(found).unflatten(0, (3, ROW)).transpose(1, 2)

    compared(attend, documents, window)


def test_what_follows_from_documents_is_made_once_for_all_layers() -> None:
    made: list[int] = []
    one, other = some_documents(), some_documents()

    def make(documents: Tensor, window: int) -> Tensor:
        made.append(window)
        return documents + window

    of = DocumentCache(make)
    for _ in range(3):
        assert torch.equal(of(one, 4), one + 4)
    assert made == [4]
    of(other, 4), of(other, 5), of(one, 4)
    assert made == [4, 4, 5, 4], "another tensor of equal numbers is another micro-batch"
    of(one, 5), of(one, 4), of(one, 5)
    assert made == [4, 4, 5, 4, 5], "layers with a window and without take turns"


# --- kernels ---------------------------------------------------------------------------------------------


@SEEN
@pytest.mark.parametrize(
    "attend", [sdpa, attention_kernel("flash"), attention_kernel("math")], ids=["sdpa", "flash", "math"]
)
def test_masked_kernels(attend: Any, documents: bool, window: int | None) -> None:
    compared(attend, documents, window)


@SEEN
def test_cuda_flash_knows_where_documents_start_and_windows_end(documents: bool, window: int | None) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor | None, window: int | None) -> Tensor:
        return flash(q, k, v, None if numbers is None else document_starts(numbers), window)

    with emulated():
        compared(attend, documents, window)
        with pytest.raises(AssertionError):  # and would notice a window of one more
            compared(lambda q, k, v, n, w: attend(q, k, v, n, (w or 0) + 2), documents, window)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """flash-attn's two functions by the emulated operator: it cannot be installed without CUDA."""

    def told(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, causal: bool, window_size: Any) -> Tensor:
        left, right = window_size
        starts, also, longest, _ = lengths or (None, None, q.size(1), q.size(1))
        assert also is starts
        return torch.ops.aten._flash_attention_forward(
            *(q, k, v, starts, also, longest, longest, 0.0, causal, False),
            window_size_left=left,
            window_size_right=right,
        )[0]

    module = ModuleType("flash_attn")
    module.flash_attn_func = module.flash_attn_varlen_func = told  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    with emulated():
        yield


@SEEN
@pytest.mark.usefixtures("package")
def test_the_package_is_told_likewise(documents: bool, window: int | None) -> None:
    compared(attention_kernel("flash-attn"), documents, window)


@pytest.mark.usefixtures("package")
def test_the_package_over_rows_of_one_document() -> None:
    compared(attention_kernel("flash-attn"), False, None)


@SEEN
def test_scores_are_capped_by_the_formulas_and_by_the_package(
    monkeypatch: pytest.MonkeyPatch, documents: bool, window: int | None
) -> None:
    """The package is told the cap; what it computes is emulated over the mask of what is seen."""

    def told(
        q: Tensor, k: Tensor, v: Tensor, *lengths: Any, window_size: Any, softcap: float, **_: Any
    ) -> Any:
        flat = [(x if lengths else x.flatten(0, 1)).transpose(0, 1)[None] for x in (q, k, v)]
        starts = lengths[0] if lengths else torch.arange(0, 3 * ROW + 1, ROW)
        at = torch.arange(3 * ROW)
        document = torch.bucketize(at, starts, right=True)
        seen = (document[:, None] == document) & (at[:, None] >= at)
        if window_size[0] >= 0:
            seen &= at[:, None] - at <= window_size[0]
        out = capped_attention(*flat, seen[None, None], softcap)[0].transpose(0, 1)
        return out if lengths else out.unflatten(0, (3, ROW))

    module = ModuleType("flash_attn")
    module.flash_attn_func = module.flash_attn_varlen_func = told  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    inputs = [heads(n, i).requires_grad_() for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    numbers = some_documents() if documents else None
    found = [attention_kernel(name, softcap=0.7)(*inputs, numbers, window) for name in ("math", "flash-attn")]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0], softcapped(0.7)(*inputs, numbers, window), rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(out.sum(), inputs) for out in found]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    near = attention_kernel("math", softcap=1e7)(*inputs, numbers, window)
    torch.testing.assert_close(near, slow(*inputs, numbers, window), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn"])
def test_other_kernels_cap_no_scores(backend: Any) -> None:
    with pytest.raises(LayoutError, match=f"saw {backend}, which caps no scores"):
        attention_kernel(backend, softcap=50.0)


class Called(TorchDispatchMode):
    """The operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("documents", [False, True])
def test_cuda_flash_on_a_device_that_is_not_there(documents: bool) -> None:
    """What torch says of its operator: arguments, shapes and the device."""
    with FakeTensorMode():
        q, k, v = (
            torch.empty(2, n, ROW, HEAD, device="cuda", dtype=torch.bfloat16)
            for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        starts = torch.empty(8, dtype=torch.int32, device="cuda") if documents else None
        out = flash(q, k, v, starts, 5)
    assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)


def test_autocast_holds_for_flash() -> None:
    """Torch's operator is not on autocast's list, as scaled_dot_product_attention is."""
    q, k, v = (heads(n, i).float() for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    with emulated(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash(q, k.bfloat16(), v, None, 5)
        assert out.dtype == sdpa(q, k, v, None, 5).dtype == torch.bfloat16


def test_windows_on_a_device_go_to_flash_not_to_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(backends, "flash", lambda q, k, v, *seen: told.append(seen) or q)
    monkeypatch.setattr(backends, "document_starts", lambda numbers: numbers)
    attend, x = attention_kernel("flash"), torch.empty(1, 2, ROW, HEAD, device="meta")
    numbers = torch.empty(1, ROW, device="meta")
    attend(x, x, x, None, 3), attend(x, x, x, numbers, None), attend(x, x, x, numbers, 3)
    assert told == [(None, 3), (numbers, None), (numbers, 3)]


@pytest.mark.parametrize("seen", [(some_documents(), None), (None, 3)], ids=["documents", "window"])
def test_cudnn_takes_neither(seen: tuple[Any, Any]) -> None:
    with pytest.raises(LayoutError, match="saw cudnn, which takes neither document masks nor windows"):
        attention_kernel("cudnn")(heads(4, 0), heads(4, 1), heads(4, 2), *seen)


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_blocks_leave_numbers_of_documents_alone(compiled: bool) -> None:
    """Left to the compiler, every other number of them would be compiled for."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    block = llama_block(MODEL, backends._with_document_starts(flash, compiled)).double()
    plain = llama_block(MODEL, sdpa).double()
    plain.load_state_dict(block.state_dict())
    run = torch.compile(block.forward, dynamic=False, backend="eager")
    generator, made = torch.Generator().manual_seed(0), []
    with emulated(), warnings.catch_warnings(action="ignore"):
        for end in range(2, 10):
            x = torch.randn(2, 12, MODEL.hidden_size, dtype=torch.float64, requires_grad=True)
            numbers = document_numbers(torch.randint(0, end, (2, 12), generator=generator), 0)
            found, wanted = run(x, None, numbers), plain(x, None, numbers)
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
            both = [torch.autograd.grad(out.sum(), x)[0] for out in (found, wanted)]
            torch.testing.assert_close(*both, rtol=1e-9, atol=1e-10)
            made.append(counters["frames"]["total"])
    torch._dynamo.reset()
    assert len(set(made)) == 1 if compiled else len(set(made)) > 3, "frames compiled, after each of them"


# --- models ----------------------------------------------------------------------------------------------


def test_a_window_goes_to_the_kernel_of_the_model() -> None:
    told: list[int | None] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
        told.append(window)
        return sdpa(q, k, v, documents, window)

    model = Transformer(WINDOW, attention=kernel)
    for length in (3, 4):
        model(torch.zeros(1, length, dtype=torch.int64))
    assert told == [None] * WINDOW.layers + [3] * WINDOW.layers


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_a_model_with_a_window_obeys_the_config_and_says_so(backend: str) -> None:
    job = make_job("sgd", 4, WINDOW, kernels=KernelsConfig(attention=backend))
    engine = build_engine(job, Layout(micro_batch=4), 0, None, CPU)
    assert f"{backend} attention, window of 3" in engine.applied
    engine.initialise(0)
    with Called() as called:
        engine.gradients_of(batch(job, Layout(micro_batch=4), 0, 1))
    used = any("flash_attention_for_cpu" in name for name in called.names)
    assert used is (backend == "flash")
    engine.close()
