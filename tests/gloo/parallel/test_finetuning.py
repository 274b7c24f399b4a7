"""Frozen parameters and LoRA at every kind of layout against one process in fp64, and formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call

from picotron_ray.checkpoint.torch_state import StateTensor
from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import whole
from picotron_ray.models.layers.init import initial_value
from picotron_ray.models.transformer import Transformer
from picotron_ray.train.engine import Engine, build_engine
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    CPU,
    MIXTURE,
    MODEL,
    assemble,
    batch,
    make_job,
    run_layout,
    train,
)
from tests.support.gloo.parity import check, compare, primaries, thinned
from tests.support.gloo.pool import Pool

RANK, ALPHA = 3, 5.0


def having(model: ModelConfig, **changes: Any) -> ModelConfig:
    return ModelConfig(**{**model.model_dump(), **changes})


def frozen(*patterns: str, model: ModelConfig = MODEL, **changes: Any) -> ModelConfig:
    return having(model, freeze=patterns, **changes)


def lora(*targets: str, model: ModelConfig = MODEL, **changes: Any) -> ModelConfig:
    return having(model, lora={"rank": RANK, "alpha": ALPHA, "targets": targets}, **changes)


MIXED = frozen("embed.*", "layers.0.*", "*.wk.weight", "layers.2.mlp_norm.weight")
FRONT = frozen("embed.*", "layers.[01].*")  # a first stage without anything to train
BACK = frozen("layers.[23].*", "norm.*", "head.*")
TIED = frozen("embed.*", tie_embeddings=True)
SPARSE = frozen("*.experts.up", "*.router.*", "layers.1.*", model=MIXTURE)
BALANCED = having(
    MIXTURE,
    moe={**MIXTURE.moe.model_dump(), "balance": "bias", "loss_coefficient": 0.01},
    freeze=("layers.[02].mlp.router.bias", "*.experts.gate"),
)
GPT2 = frozen("*.bias", "positions.*", "*.wo.*", model=MODEL, family="gpt2", max_positions=10, kv_heads=4)
FREEZES = [
    (Layout(dp=2, micro_batch=3), 10, MIXED),
    (Layout(dp=2, zero=3, micro_batch=2), 7, MIXED),
    (Layout(tp=2, micro_batch=6), 12, MIXED),
    (Layout(tp=2, pp=2, micro_batch=3), 12, FRONT),
    (Layout(dp=2, cp=2, zero=2, micro_batch=2), 7, FRONT),
    (Layout(dp=2, pp=2, zero=1, micro_batch=2), 12, BACK),
    (Layout(dp=2, ep=2, zero=3, micro_batch=2), 7, SPARSE),
    (Layout(dp=2, tp=2, ep=2, zero=3, micro_batch=2), 7, BALANCED),
    (Layout(dp=2, zero=1, micro_batch=2), 7, MIXED),
    (Layout(dp=2, zero=2, micro_batch=2), 7, FRONT),
    (Layout(dp=3, zero=3, micro_batch=2), 10, BACK),
    (Layout(dp=4, zero=3, replicate=2, micro_batch=1), 10, MIXED),
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), 7, TIED),
    (Layout(pp=2, micro_batch=3), 12, TIED),
    (Layout(pp=2, micro_batch=3, schedule="interleaved-zero-bubble", virtual_stages=2), 12, FRONT),
    (Layout(pp=2, micro_batch=3, schedule="zbv", virtual_stages=2), 12, BACK),
    (Layout(dp=2, ep=2, micro_batch=2), 7, BALANCED),
    (Layout(cp=2, ep=2, zero=3, micro_batch=6), 12, SPARSE),
    (Layout(dp=2, micro_batch=3, recompute="full"), 12, FRONT),
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), 7, GPT2),
]
ALL_LINEAR = lora("*.attention.w?", "*.mlp.*")
QUERIES = lora("*.wq", "*.wv", "*.down")
SHARED = lora("*.shared.*", "*.attention.wo", model=MIXTURE)
HALF = having(ALL_LINEAR, freeze=["*.lora_a"])  # Zhang et al. 2023, LoRA-FA
BIASED = lora("*.w[qkvo]", "*.up", "*.down", model=GPT2, freeze=[])
LATENT = lora(
    "*.attention.w*",
    "*.mlp.*",
    family="deepseek",
    kv_heads=4,
    mla={"kv_lora_rank": 6, "q_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3},
)
WINDOWED = lora(
    "*.attention.w?",
    "*.down",
    family="gemma2",
    head_dim=8,
    sliding_window=3,
    full_attention_every=2,
    attention_softcap=1.5,
)
ADAPTERS = [
    (Layout(dp=2, micro_batch=3), 10, ALL_LINEAR),
    (Layout(dp=2, zero=3, micro_batch=2), 7, ALL_LINEAR),
    (Layout(tp=2, micro_batch=6), 12, ALL_LINEAR),
    (Layout(tp=2, pp=2, micro_batch=3), 12, QUERIES),
    (Layout(dp=2, tp=2, ep=2, zero=3, micro_batch=2), 7, SHARED),
    (Layout(dp=2, cp=2, zero=2, micro_batch=2), 7, ALL_LINEAR),
    (Layout(dp=2, tp=2, zero=1, micro_batch=2), 7, BIASED),
    (Layout(dp=2, pp=2, zero=3, micro_batch=2), 12, QUERIES),
    (Layout(dp=7, zero=3, micro_batch=1), 10, ALL_LINEAR),  # rank 3 over 7: most hold nothing of A
    (Layout(pp=2, micro_batch=3, schedule="interleaved-zero-bubble", virtual_stages=2), 12, ALL_LINEAR),
    (Layout(dp=2, tp=2, micro_batch=3, recompute="selective"), 10, QUERIES),
    (Layout(dp=2, tp=2, zero=2, micro_batch=2), 7, HALF),
    (Layout(tp=2, cp=2, micro_batch=6), 12, ALL_LINEAR),
    (Layout(tp=2, pp=2, micro_batch=3), 12, LATENT),
    (Layout(dp=2, tp=2, zero=3, micro_batch=2), 7, WINDOWED),
]


NAMES = {
    MIXED: "mixed",
    FRONT: "front",
    BACK: "back",
    TIED: "tied",
    SPARSE: "sparse",
    BALANCED: "balanced",
    GPT2: "gpt2",
    ALL_LINEAR: "all-linear",
    QUERIES: "queries",
    SHARED: "shared-expert",
    HALF: "half",
    LATENT: "latent",
    WINDOWED: "windowed",
    BIASED: "biased",
}


def case(layout: Layout, global_batch: int, model: ModelConfig) -> str:
    return f"{layout}-{NAMES[model]}"


@pytest.mark.parametrize(("layout", "global_batch", "model"), thinned(FREEZES, (0, 1, 2, 3, 7), case))
def test_frozen_at_every_layout(pool: Pool, layout: Layout, global_batch: int, model: ModelConfig) -> None:
    ranks = check(pool, layout, global_batch, model)
    primaries(layout, ranks, model)


@pytest.mark.parametrize(("layout", "global_batch", "model"), thinned(ADAPTERS, (1, 2, 3, 4), case))
def test_adapters_at_every_layout(pool: Pool, layout: Layout, global_batch: int, model: ModelConfig) -> None:
    ranks = check(pool, layout, global_batch, model)
    primaries(layout, ranks, model)


@pytest.mark.parametrize(
    "kernels",
    thinned(
        [
            ({"projections": "fused"},),
            ({"tp_overlap": "ring"},),
            ({"tp_overlap": "ring", "projections": "fused"},),
        ],
        (2,),
        lambda kernels: "-".join(kernels.values()),
    ),
)
@pytest.mark.parametrize("model", [ALL_LINEAR, BIASED, MIXED], ids=["all", "biased", "frozen"])
def test_kernels_with_adapters(pool: Pool, kernels: dict[str, Any], model: ModelConfig) -> None:
    layout, job = Layout(tp=2, micro_batch=6), make_job("adamw", 12, model, kernels=KernelsConfig(**kernels))
    ranks = [results[0] for results in pool.run(2, run_layout, [job], layout)]
    assert compare(job, layout, ranks) == []


def test_muon_and_clipping_see_what_is_trained(pool: Pool) -> None:
    job, layout = make_job("muon", 7, MIXED), Layout(dp=2, tp=2, zero=3, micro_batch=2)
    ranks = [results[0] for results in pool.run(4, run_layout, [job], layout)]
    assert compare(job, layout, ranks) == []


def test_freezing_leaves_the_gradients_of_the_others() -> None:
    """The same gradients as where all is trained; the frozen stay as they began, and have no moments."""
    job, layout = make_job("adamw", 6, MIXED), Layout(micro_batch=3)
    found, plain = (train(one, layout, 0, None) for one in (job, make_job("adamw", 6, MODEL)))
    gradients, all_of_them = (assemble([one.gradients]) for one in (found, plain))
    still = all_of_them.keys() - gradients.keys()
    assert {name.partition(".")[0] for name in still} == {"embed", "layers"}
    assert {"embed.weight", "layers.0.mlp.up.weight", "layers.3.attention.wk.weight"} <= still
    assert {"layers.2.mlp.up.weight", "head.weight"} <= gradients.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, all_of_them[name], rtol=0, atol=1e-15)
    state = assemble([found.state])
    assert {name.partition("/")[2] for name in state if "/" in name} == gradients.keys()
    for name in still:
        spread = 0.3 / 8**0.5 if name.endswith(("wo.weight", "down.weight")) else 0.3
        values = None if name.endswith("norm.weight") else spread
        began = initial_value(name, state[name].shape, job.seed, init_std=values)
        np.testing.assert_array_equal(state[name], began.double().numpy())


def engine_of(model: ModelConfig) -> tuple[Engine, dict[str, StateTensor]]:
    engine = build_engine(make_job("sgd", 6, model), Layout(micro_batch=6), 0, None, CPU)
    engine.initialise(seed=3)
    return engine, {one.shard.name: one for one in engine.weights()}


def test_what_is_frozen_is_still_for_snapshots() -> None:
    """It is copied once into each slot of a generation; weights that train, and moments, every time."""
    engine, _ = engine_of(ALL_LINEAR)
    still = {one.shard.name for one in engine.state() if one.still}
    moving = {one.shard.name for one in engine.state() if not one.still}
    assert "layers.0.attention.wq.weight" in still
    assert len(still) == 3 + 4 * 9
    assert {name.rpartition(".")[2] for name in moving} == {"lora_a", "lora_b"}
    plain, _ = engine_of(MODEL)
    assert not any(one.still for one in plain.state())


def test_an_adapter_is_the_formula() -> None:
    """Loss and gradients of A and B are those of W + alpha / rank B A by the chain rule."""
    engine, held = engine_of(ALL_LINEAR)
    generator = torch.Generator().manual_seed(5)
    for name, one in held.items():
        if name.endswith("lora_b"):
            assert not one.tensor.any()
            one.tensor.copy_(torch.randn(one.tensor.shape, generator=generator, dtype=torch.float64))
    feed, scale = batch(engine.job, engine.layout, 0, 1), ALPHA / RANK
    loss = engine.forward_backward(feed)
    engine.reduce()
    found = {one.shard.name: one.tensor for one in engine.gradients()}
    values = {name: one.tensor for name, one in held.items()}
    a = {name[:-7]: values[name] for name in values if name.endswith(".lora_a")}
    b = {name[:-7]: values[name] for name in values if name.endswith(".lora_b")}
    assert len(a) == 4 * 7
    assert found.keys() == {f"{at}.{half}" for at in a for half in ("lora_a", "lora_b")}
    plain = Transformer(MODEL).double()
    merged = {name: values[name].clone().requires_grad_() for name, _ in plain.named_parameters()}
    with torch.no_grad():
        for at in a:
            merged[f"{at}.weight"] += scale * b[at] @ a[at]
    tokens = torch.from_numpy(feed.tokens).flatten(0, 1)
    logits = functional_call(plain, merged, (tokens[:, :-1],))
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    (total / feed.global_tokens).backward()
    assert loss == pytest.approx(float(total.detach()), rel=1e-12)
    for at in a:
        gradient = merged[f"{at}.weight"].grad
        assert gradient is not None
        torch.testing.assert_close(found[f"{at}.lora_a"], scale * b[at].T @ gradient, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found[f"{at}.lora_b"], scale * gradient @ a[at].T, rtol=1e-9, atol=1e-12)


def test_adapters_begin_as_peft_has_them() -> None:
    """A uniform within the bound of torch's own linear layers, by seed and name; the model is unchanged."""
    engine, held = engine_of(lora("*.wq", model=having(MODEL, hidden_size=64)))
    plain, _ = engine_of(having(MODEL, hidden_size=64))
    first = held["layers.0.attention.wq.lora_a"].tensor
    assert first.shape == (RANK, 64)
    assert 0.9 / 8 < first.abs().max() <= 1 / 8
    assert first.std() == pytest.approx(1 / 8 / 3**0.5, rel=0.15)
    assert not torch.equal(first, held["layers.1.attention.wq.lora_a"].tensor)
    part = initial_value(
        "layers.0.attention.wq.lora_a", (RANK, 64), 3, init_std=0.0, init_bound=1 / 8, box=whole((RANK, 64))
    )
    assert torch.equal(first, part.double())
    feed = batch(engine.job, engine.layout, 0, 1)
    assert engine.forward_backward(feed) == plain.forward_backward(feed)
