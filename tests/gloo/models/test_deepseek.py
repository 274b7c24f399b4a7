"""DeepSeek-V2 and V3 under every parallelism against one process in fp64, their kernels and their routing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig, MoeConfig, RopeScaling
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.deepseek.modules import LATENT_EPS, LatentAttention
from picotron_ray.models.layers.attention import sdpa
from picotron_ray.models.layers.moe import Router
from picotron_ray.models.layers.rope import rope_of
from picotron_ray.models.transformer import Transformer
from picotron_ray.parallel.tensor import tensor_parallel
from picotron_ray.planner.model_sizes import flops_per_token
from tests.support.gloo.faults import replace
from tests.support.gloo.parallel_jobs.matrix_jobs import MODEL, Result, documents_job, make_job, run_layout
from tests.support.gloo.parity import check, compare, primaries, thinned
from tests.support.gloo.pool import Job, Pool

pytestmark = pytest.mark.gloo
MLA = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
SHARED = {"experts": 8, "intermediate_size": 12, "shared_intermediate_size": 8, "first_dense_layers": 1}


def model(mla: dict[str, Any], moe: dict[str, Any]) -> ModelConfig:
    changes = {"family": "deepseek", "kv_heads": 4, "mla": {**MLA, **mla}, "moe": moe}
    return ModelConfig(**{**MODEL.model_dump(), **changes})


V2 = model(
    {},
    {**SHARED, "groups": 4, "top_k_groups": 2, "normalize": False, "scaling": 1.5, "loss_coefficient": 0.5},
)
V3 = model(
    {"q_lora_rank": 5},
    {
        **SHARED,
        "router": "sigmoid",
        "balance": "bias",
        "bias_rate": 0.02,
        "groups": 4,
        "top_k_groups": 2,
        "group_score": "top-2",
        "scaling": 2.5,
    },
)
DENSE = model({"q_lora_rank": 5, "v_head_dim": 6}, {})
KINDS = {V2: "v2", V3: "v3", DENSE: "dense"}

# fmt: off
LAYOUTS = [
    (Layout(dp=2, tp=2, ep=2, zero=3, micro_batch=2), 7, V3),
    (Layout(tp=2, pp=2, micro_batch=3), 12, V2),  # the first stage has one dense block and one mixture
    (Layout(tp=2, cp=2, micro_batch=4), 12, DENSE),
    (Layout(pp=4, micro_batch=3), 12, V3),  # the first stage has no mixture at all
    (Layout(tp=4, micro_batch=4, recompute="full"), 12, V3),
    (Layout(tp=2, cp=2, ep=2, zero=2, micro_batch=4), 12, V3),
    (Layout(cp=2, micro_batch=4, context="all-gather"), 12, V2),
    (Layout(dp=2, micro_batch=3), 12, V3),
    (Layout(dp=2, zero=3, micro_batch=2, recompute="selective"), 7, V2),
    (Layout(dp=2, tp=2, pp=2, ep=2, zero=2, micro_batch=2), 7, V3),
    (Layout(dp=2, tp=2, zero=1, micro_batch=2), 10, DENSE),
    (Layout(tp=2, pp=2, schedule="zbv", virtual_stages=2, micro_batch=2), 12, V3),
    (Layout(tp=2, micro_batch=4, offload_activations=True), 12, V2),
    (Layout(dp=4, ep=4, zero=3, replicate=1, micro_batch=1), 10, V2),
]
# fmt: on


@pytest.mark.parametrize(
    ("layout", "rows", "model"),
    thinned(LAYOUTS, range(4), lambda layout, _, model: f"{layout}-{KINDS[model]}"),
)
def test_every_layout_equals_one_process(pool: Pool, layout: Layout, rows: int, model: ModelConfig) -> None:
    ranks = check(pool, layout, rows, model)
    primaries(layout, ranks, model)


@pytest.mark.parametrize(
    ("kernels", "model"),
    [
        (KernelsConfig(tp_overlap="ring", projections="fused"), V2),
        (KernelsConfig(norm="eager", loss="linear", loss_chunk=5), V3),
        pytest.param(KernelsConfig(tp_overlap="ring"), V3, marks=pytest.mark.parity),
        pytest.param(KernelsConfig(projections="fused"), V3, marks=pytest.mark.parity),
    ],
    ids=["overlapped-v2", "eager-v3", "overlapped-v3", "fused-v3"],
)
def test_kernels_under_tensor_parallelism(pool: Pool, kernels: KernelsConfig, model: ModelConfig) -> None:
    layout, job = Layout(tp=2, micro_batch=4), make_job("adamw", 12, model, kernels=kernels)
    assert compare(job, layout, [results[0] for results in pool.run(2, run_layout, [job], layout)]) == []


@pytest.mark.parity
@pytest.mark.parametrize("layout", [Layout(cp=2, micro_batch=4), Layout(tp=2, micro_batch=4)], ids=str)
def test_documents_that_share_rows(pool: Pool, layout: Layout) -> None:
    job = documents_job("adamw", 10, DENSE)
    assert compare(job, layout, [results[0] for results in pool.run(2, run_layout, [job], layout)]) == []


@pytest.mark.timeout(300)  # a compiler runs
@pytest.mark.slow
def test_compiled_blocks(pool: Pool) -> None:
    shallow, layout = DENSE.model_copy(update={"layers": 1}), Layout(tp=2, micro_batch=6)
    job = make_job("adamw", 12, shallow, kernels=KernelsConfig(compile=True))
    ranks = [results[0] for results in pool.run(2, run_layout, [job], layout)]
    assert "1 blocks compiled" in ranks[0].applied
    assert compare(job, layout, ranks) == []


def whole_gradients(job: Job, *arguments: Any) -> list[Result]:
    """`run_layout` where a gathered input's gradient is that of a rank's own heads alone."""

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        mine, ranks = ctx.group.rank(), ctx.group.size()
        return gradient.chunk(ranks, dim=1)[mine].contiguous(), None

    undo = replace(tensor_parallel._Gather, "backward", staticmethod(backward))
    try:
        return run_layout(job, *arguments)
    finally:
        undo()


def test_gradients_of_a_ranks_own_heads_alone_are_noticed(pool: Pool) -> None:
    job, layout = make_job("adamw", 12, DENSE), Layout(tp=2, micro_batch=6)
    ranks = [results[0] for results in pool.run(2, whole_gradients, [job], layout)]
    assert any("gradient" in line for line in compare(job, layout, ranks))


@pytest.mark.parametrize("mscale", [0.0, 0.7])
def test_latent_attention_is_that_of_the_paper(mscale: float) -> None:
    """Head by head and position by position, by complex numbers; scores sharper where positions stretch."""
    config, stretched = V3, RopeScaling(factor=40.0)
    config = config.model_copy(update={"mla": config.mla.model_copy(update={"mscale_all_dim": mscale})})
    mla, heads, length = config.mla, config.heads, 7
    torch.manual_seed(0)
    rope = rope_of(config.rope_theta, config.rope_scaling)
    module = LatentAttention(config.model_copy(update={"rope_scaling": stretched}), sdpa, rope).double()
    times = (0.1 * mscale * math.log(40.0) + 1.0) ** 2
    x = torch.randn(1, length, config.hidden_size, dtype=torch.float64)

    def normed(y: Tensor, weight: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + LATENT_EPS).sqrt() * weight

    def turn(y: Tensor) -> Tensor:
        half = mla.qk_rope_head_dim // 2
        angle = torch.arange(length)[:, None] * config.rope_theta ** -(torch.arange(half).double() / half)
        z = torch.complex(y[:, :half], y[:, half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)

    p = {name: value.detach() for name, value in module.named_parameters()}
    q = (normed(x[0] @ p["wq_a.weight"].T, p["q_norm.weight"]) @ p["wq.weight"].T).view(length, heads, -1)
    both = x[0] @ p["wkv_a.weight"].T
    latent, one_key = (
        normed(both[:, : mla.kv_lora_rank], p["kv_norm.weight"]),
        turn(both[:, mla.kv_lora_rank :]),
    )
    kv = (latent @ p["wkv_b.weight"].T).view(length, heads, -1)
    nope, out = mla.qk_nope_head_dim, []
    for head in range(heads):
        scores = q[:, head, :nope] @ kv[:, head, :nope].T + turn(q[:, head, nope:]) @ one_key.T
        hidden = torch.ones(length, length).triu(1).bool()
        weights = (scores * times / mla.head_size**0.5).masked_fill(hidden, float("-inf")).softmax(-1)
        out.append(weights @ kv[:, head, nope:])
    torch.testing.assert_close(module(x)[0], torch.cat(out, -1) @ p["wo.weight"].T)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("config", [V2, V3], ids=["v2", "v3"])
def test_kernels_get_one_type_and_one_width(config: ModelConfig, closed: bool) -> None:
    """Norms of latent vectors and turned parts are wider than products under autocast."""
    given: list[Tensor] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
        given.extend((q, k, v))
        return sdpa(q, k, v, documents, window)

    module = LatentAttention(config, kernel, rope_of(config.rope_theta, config.rope_scaling))
    for norm in (module.q_norm, module.kv_norm):
        if norm is not None:
            norm.closed = closed
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(torch.randn(2, 8, config.hidden_size))
    assert {tensor.dtype for tensor in given} == {torch.bfloat16}
    assert {tensor.shape for tensor in given} == {(2, config.heads, 8, config.mla.head_size)}


@pytest.mark.parametrize("score", ["max", "top-2"])
def test_tokens_go_to_the_best_groups_alone(score: str) -> None:
    config = MoeConfig(
        experts=12,
        top_k=3,
        intermediate_size=4,
        groups=4,
        top_k_groups=2,
        group_score=score,
        router="sigmoid",
        balance="bias",
        scaling=2.5,
    )
    torch.manual_seed(0)
    router = Router(config, 8).double()
    assert router.bias is not None
    nn.init.normal_(router.weight)
    nn.init.normal_(router.bias)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    found = router(x, None)
    scores = (x @ router.weight.T).sigmoid()
    kept = 0
    for row in range(3):
        for token in range(5):
            own = scores[row, token]
            chosen = [value.item() for value in own + router.bias]
            groups = [sorted(chosen[3 * group : 3 * group + 3]) for group in range(4)]
            worth = [group[-1] if score == "max" else group[-1] + group[-2] for group in groups]
            best = sorted(range(4), key=lambda group: -worth[group])[:2]
            inside = [expert for expert in range(12) if expert // 3 in best]
            expected = sorted(inside, key=lambda expert: -chosen[expert])[:3]
            assert found.experts[row, token].tolist() == expected
            weights = own[expected] / own[expected].sum() * 2.5
            torch.testing.assert_close(found.gates[row, token], weights)
            kept += expected != sorted(range(12), key=lambda expert: -chosen[expert])[:3]
    assert kept, "some token's best experts are outside its groups"


def test_zeros_behind_narrow_values_are_no_work_of_the_models() -> None:
    """FLOPs of the formula are those that torch counts, less the products with zeros."""
    narrow, sequence = model({}, {}), 8

    def visible(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v

    with torch.device("meta"):
        module, tokens = Transformer(narrow, attention=visible), torch.zeros(1, sequence, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        module(tokens).sum().backward()
    parameters = dict(module.named_parameters())
    unmultiplied = sum(p.numel() for p in parameters.values() if p.dim() == 1)
    unmultiplied += narrow.vocab_size * narrow.hidden_size
    zeros = narrow.heads * (narrow.mla.head_size - narrow.mla.v_head_dim)
    expected = flops_per_token(narrow, sequence) - 6 * unmultiplied + 6 * narrow.layers * sequence * zeros
    assert counter.get_total_flops() / sequence == expected
