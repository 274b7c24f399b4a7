"""The linear cross-entropy: equal to logits and their loss at every layout, and never all logits at once."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from picotron_ray.config.schema.compute import AdaptivePrecisionConfig, KernelsConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedules import SCHEDULES
from picotron_ray.parallel.loss.linear_cross_entropy import LinearCrossEntropy
from picotron_ray.train.engine import build_engine
from picotron_ray.train.precision.adaptive import AdaptivePrecision
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    CPU,
    MIXTURE,
    MODEL,
    SEQUENCE,
    batch,
    make_job,
    run_layout,
)
from tests.support.gloo.parity import compare, thinned
from tests.support.gloo.pool import Job, Pool

pytestmark = pytest.mark.gloo
CHUNK = 5  # of 8 tokens a row, so that chunks cross rows and the last one is shorter
LINEAR = KernelsConfig(loss="linear", loss_chunk=CHUNK)
TIED = ModelConfig(**{**MODEL.model_dump(), "tie_embeddings": True})
DEEP = ModelConfig(**{**MODEL.model_dump(), "layers": 5})
GPT2 = ModelConfig(**{**MODEL.model_dump(), "kv_heads": 4, "family": "gpt2", "max_positions": 10})
SPLITTING = [name for name, entry in SCHEDULES.items() if entry.splits_backward]

# fmt: off
LAYOUTS = [
    (Layout(tp=2, micro_batch=4), 12, MODEL),
    (Layout(dp=2, zero=3, micro_batch=2), 7, TIED),  # the head's weight is gathered with the embedding's
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), 7, MODEL),
    (Layout(pp=2, micro_batch=3), 12, MODEL),
    *((Layout(pp=2, virtual_stages=2, schedule=name, micro_batch=1), 12, DEEP) for name in SPLITTING),
    (Layout(tp=2, cp=2, micro_batch=4, context="all-gather"), 12, TIED),
    (Layout(dp=2, ep=2, micro_batch=2), 7, MIXTURE),
    (Layout(dp=2, micro_batch=3), 7, MODEL),
    (Layout(cp=2, micro_batch=4), 12, MODEL),
    (Layout(dp=2, zero=1, micro_batch=2), 7, MODEL),
    (Layout(dp=4, zero=2, replicate=2, micro_batch=1), 10, MODEL),
    (Layout(tp=4, micro_batch=3), 12, GPT2),
    (Layout(tp=2, pp=2, schedule="gpipe", micro_batch=3), 12, MODEL),
    (Layout(pp=2, virtual_stages=2, schedule="looped-bfs", micro_batch=3), 12, DEEP),
    (Layout(pp=2, virtual_stages=2, schedule="interleaved-1f1b", micro_batch=3), 12, DEEP),
    (Layout(dp=2, pp=2, virtual_stages=2, schedule="zbv", zero=2, micro_batch=1), 12, DEEP),
    (Layout(dp=2, pp=2, zero=3, micro_batch=3), 12, MODEL),
    (Layout(dp=2, tp=2, micro_batch=3, recompute="selective"), 10, MODEL),
    (Layout(micro_batch=3, recompute="full"), 12, TIED),
]
# fmt: on


@pytest.mark.parametrize(("layout", "rows", "model"), thinned(LAYOUTS, (0, 3, 4, 7), lambda x, *_: str(x)))
def test_every_layout_equals_logits_in_one_process(
    pool: Pool, layout: Layout, rows: int, model: ModelConfig
) -> None:
    jobs = [make_job(optimizer, rows, model, kernels=LINEAR) for optimizer in ("sgd", "adamw")]
    per_rank = pool.run(layout.world_size, run_layout, jobs, layout)
    for job, ranks in zip(jobs, zip(*per_rank, strict=True), strict=True):
        assert compare(job, layout, list(ranks)) == []
    last = [
        rank for number, rank in enumerate(ranks) if layout.coordinates(number).pp == layout.last_stage_rank
    ]
    assert all(f"linear cross-entropy of {CHUNK} tokens at a time" in rank.applied for rank in last)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name().split("::")[1].split(".")[0] in ("mm", "addmm", "addmm_")
        return func(*args, **(kwargs or {}))


def test_a_split_backward_pass_does_each_product_in_one_half() -> None:
    """First the input's gradient, then the weight's, from one graph: equal to both at once."""
    generator = torch.Generator().manual_seed(2)
    leaf, weight = (
        torch.randn(*shape, generator=generator).requires_grad_() for shape in ((2, 5, 16), (40, 16))
    )
    x, targets = leaf * 1.0, torch.randint(0, 40, (2, 5), generator=generator)
    loss = LinearCrossEntropy(CHUNK)(x, weight, targets).sum()
    found, counts = [], []
    for wanted in ((x,), (weight,), (x, weight)):
        with Products() as products:
            found += torch.autograd.grad(loss, wanted, retain_graph=True)
        counts.append(products.count)
    assert counts == [4, 4, 6]  # of two chunks, the logits again in each
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


class Largest(TorchDispatchMode):
    """Records the most elements that a tensor made by any operator has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(found) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *sizes])
        return found


WIDE = ModelConfig(**{**MODEL.model_dump(), "vocab_size": 512, "layers": 1})


def largest(rank: int, layout: Layout, groups: Any, kernels: KernelsConfig) -> int:
    """Elements of the largest tensor of a step and an evaluation; weights have fewer than a chunk."""
    job = make_job("sgd", 8, WIDE, kernels=kernels)
    engine = build_engine(job, layout, rank, groups, CPU)
    engine.initialise(job.seed)
    feed = batch(job, layout, 0, 1)
    with Largest() as seen:
        engine.forward_backward(feed)
        engine.reduce()
        engine.evaluate([feed])
    engine.close()
    return seen.elements


def largest_of_ranks(job: Job, layout: Layout, kernels: KernelsConfig) -> int:
    groups = job.groups()
    groups.connect()
    try:
        return largest(job.rank, layout, groups, kernels)
    finally:
        groups.close()
        gc.collect()


@pytest.mark.parametrize("tp", [1, 2])
def test_the_logits_of_all_tokens_never_exist(pool: Pool, tp: int) -> None:
    layout, tokens, vocabulary = Layout(tp=tp, micro_batch=8), 8 * SEQUENCE, WIDE.vocab_size // tp
    cut = KernelsConfig(loss="linear", loss_chunk=20)
    assert set(pool.run(tp, largest_of_ranks, layout, cut)) == {20 * vocabulary}
    assert set(pool.run(tp, largest_of_ranks, layout, KernelsConfig())) == {tokens * vocabulary}


def by_logits(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(F.linear(x, weight).float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_errs_as_little_as_logits(dtype: torch.dtype) -> None:
    """Under autocast, with a gradient of the loss that fp16 holds by its loss scale alone."""
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(2, 90, 16, generator=generator), torch.randn(400, 16, generator=generator)
    targets = torch.randint(0, 400, (2, 90), generator=generator)
    found = []
    for losses, low, scale in (
        (by_logits, None, 1.0),
        (by_logits, dtype, 2.0**16),
        (LinearCrossEntropy(CHUNK), dtype, 2.0**16),
        (LinearCrossEntropy(CHUNK), dtype, 1.0),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        with torch.autocast("cpu", dtype=low, enabled=low is not None):
            loss = losses(*leaves, targets)
        assert loss.dtype == torch.float32
        (loss.sum() * 2.0**-22 * scale).backward()
        found.append([loss.detach(), *(leaf.grad / scale for leaf in leaves)])
    exact, logits, linear, unscaled = found
    for e, a, b in zip(exact, logits, linear, strict=True):
        assert (b - e).norm() <= 1.1 * (a - e).norm() <= 0.02 * e.norm()
    if dtype == torch.float16:
        assert (unscaled[1] - exact[1]).norm() > 0.02 * exact[1].norm(), "what the loss scale is for"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_in_low_precision_takes_the_steps_that_logits_take(precision: str) -> None:
    layout = Layout(micro_batch=6)
    losses = []
    for kernels in (KernelsConfig(), LINEAR):
        job = make_job("adamw", 12, precision=precision, kernels=kernels)
        engine = build_engine(job, layout, 0, None, CPU)
        engine.initialise(job.seed)
        seen = []
        for step in (1, 2, 3):
            seen.append(engine.gradients_of(batch(job, layout, 0, step)))
            engine.optimizer_step(0.01)
        losses.append(seen)
        engine.close()
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-2)


def test_a_sensitive_head_computes_in_full_precision() -> None:
    """Adaptive precision decides about the head, whose losses are then those of fp32."""
    job = make_job(
        "sgd",
        12,
        precision="bf16",
        kernels=LINEAR,
        adaptive_precision=AdaptivePrecisionConfig(error_bound=0.5),
    )
    engine = build_engine(job, Layout(micro_batch=6), 0, None, CPU)
    engine.initialise(job.seed)
    seen = []

    def record(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
        return kept(x, weight, targets)

    (model,) = engine._models.values()
    kept, model.head.losses = model.head.losses, record
    switches = engine.adaptation
    assert isinstance(switches, AdaptivePrecision)
    for low in (frozenset({"head"}), frozenset()):
        switches.set(low)
        engine.evaluate([batch(job, Layout(micro_batch=6), 0, 1)])
    engine.close()
    assert (seen[0][1], seen[-1]) == (True, (torch.float32, False))
