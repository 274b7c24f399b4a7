"""The decoder against its own table, an independent reference, and what parallelism needs of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.models.build import DecoderDefinition
from picotron_ray.models.families.registry import family_of, parameter_table
from picotron_ray.models.layers.attention import sdpa
from picotron_ray.models.layers.block import PreNormBlock
from picotron_ray.models.layers.init import initial_value
from picotron_ray.models.layers.rope import Rope, rotate
from picotron_ray.models.transformer import Transformer
from picotron_ray.planner.model_sizes import parameter_count, stage_bounds, stage_flops_per_token

TINY = ModelConfig(vocab_size=48, hidden_size=24, intermediate_size=40, layers=3, heads=6, kv_heads=2)
OLMO2 = TINY.model_copy(update={"family": "olmo2"})
MIXED = {"sliding_window": 3, "full_attention_every": 2, "query_pre_attn_scalar": 6}
GEMMA2 = TINY.model_copy(update={"family": "gemma2", **MIXED, "attention_softcap": 5.0})
GEMMA3 = TINY.model_copy(update={"family": "gemma3", **MIXED, "rope_local_theta": 100.0})
DEEPSEEK = ModelConfig(
    **TINY.model_dump()
    | {
        "family": "deepseek",
        "kv_heads": 6,
        "mla": {"kv_lora_rank": 8, "q_lora_rank": 10},
        "moe": {"experts": 4, "shared_intermediate_size": 8, "balance": "bias", "first_dense_layers": 1},
    }
)
GPT2 = TINY.model_copy(update={"family": "gpt2", "kv_heads": 6, "max_positions": 16})


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def build(config: ModelConfig = TINY, seed: int = 0, dtype: torch.dtype = torch.float64) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(dtype).to_empty(device="cpu")
    model.tie()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for spec in parameter_table(config):
            # Ten times the usual scale, so that attention is far from uniform and mistakes show.
            value = initial_value(spec.name, spec.shape, seed, init_std=spec.init_std)
            parameters[spec.name].copy_(value * (10 if spec.init_std else 1))
    return model


def reference(model: Transformer, tokens: Tensor) -> Tensor:
    """The same function written from the papers: explicit loops over heads and positions, no SDPA."""
    c, p = model.config, dict(model.named_parameters())
    head = c.hidden_size // c.heads

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + c.norm_eps) * w

    def turn(x: Tensor) -> Tensor:  # [seq, head], complex multiplication
        z = torch.complex(x[:, : head // 2], x[:, head // 2 :])
        angle = torch.arange(len(x))[:, None] * c.rope_theta ** (
            -torch.arange(0, head, 2, dtype=x.dtype) / head
        )
        z = z * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)

    rows = []
    for row in tokens:
        x = p["embed.weight"][row]
        for i in range(c.layers):
            at = f"layers.{i}"
            h = norm(x, p[f"{at}.attention_norm.weight"])
            q, k, v = (h @ p[f"{at}.attention.w{name}.weight"].T for name in "qkv")
            outs = []
            for n in range(c.heads):
                g = n // (c.heads // c.kv_heads)
                qh, kh = turn(q[:, n * head : (n + 1) * head]), turn(k[:, g * head : (g + 1) * head])
                scores = qh @ kh.T / math.sqrt(head)
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
                outs.append(scores.softmax(-1) @ v[:, g * head : (g + 1) * head])
            x = x + torch.cat(outs, -1) @ p[f"{at}.attention.wo.weight"].T
            h = norm(x, p[f"{at}.mlp_norm.weight"])
            gate = h @ p[f"{at}.mlp.gate.weight"].T
            x = x + (gate * gate.sigmoid() * (h @ p[f"{at}.mlp.up.weight"].T)) @ p[f"{at}.mlp.down.weight"].T
        matrix = "embed.weight" if c.tie_embeddings else "head.weight"
        rows.append(norm(x, p["norm.weight"]) @ p[matrix].T)
    return torch.stack(rows)


@pytest.mark.parametrize("config", [TINY, GPT2, OLMO2, GEMMA2, GEMMA3, DEEPSEEK])
@pytest.mark.parametrize("tie", [False, True])
def test_table_is_the_module(tie: bool, config: ModelConfig) -> None:
    config = config.model_copy(update={"tie_embeddings": tie})
    with torch.device("meta"):
        model = Transformer(config)
    seen = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert seen == [(s.name, s.shape) for s in parameter_table(config)]
    assert list(model.buffers()) == []


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_forward_and_gradients_match_the_reference(tie: bool, kv_heads: int) -> None:
    config = TINY.model_copy(update={"tie_embeddings": tie, "kv_heads": kv_heads})
    model = build(config)
    tokens = torch.randint(0, 48, (2, 13), generator=torch.Generator().manual_seed(1))
    mine, theirs = model(tokens), reference(model, tokens)
    assert (mine - theirs).abs().max() <= 1e-11 * theirs.abs().max()
    parameters = list(model.parameters())
    ours = torch.autograd.grad(mine.logsumexp(-1).sum(), parameters)
    wanted = torch.autograd.grad(theirs.logsumexp(-1).sum(), parameters)
    for a, b in zip(ours, wanted, strict=True):
        assert (a - b).norm() <= 1e-11 * b.norm()


@pytest.mark.parametrize("tie", [False, True])
def test_planner_counts_what_the_module_does(tie: bool) -> None:
    """Parameters exactly; FLOPs as torch counts the matrix products of one forward and backward pass."""
    config = TINY.model_copy(update={"tie_embeddings": tie})

    def products(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:  # SDPA is not counted on CPU
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    model = Transformer(config, attention=products)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config)
    assert sum(s.numel for s in parameter_table(config)) == parameter_count(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
    norms = 6 * config.layers * 2 * config.hidden_size  # counted by the formula, but no matrix products
    assert counter.get_total_flops() == 2 * 16 * (stage_flops_per_token(config, 16, 1, 0) - norms)


def test_future_tokens_do_not_reach_the_past() -> None:
    model = build()
    tokens = torch.randint(0, 48, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 48
    a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :10], b[:, :10])
    assert not torch.equal(a[:, 10], b[:, 10])


def test_stages_compose_to_the_whole() -> None:
    model, tokens = build(), torch.randint(0, 48, (2, 9))
    values = dict(model.named_parameters())
    names: list[str] = []
    x = tokens
    for stage in range(2):
        first, last = stage_bounds(TINY, 2)[stage]
        part = Transformer(
            TINY, first_layer=first, last_layer=last, embed=stage == 0, head=stage == 1
        ).double()
        with torch.no_grad():
            for name, p in part.named_parameters():
                names.append(name)
                p.copy_(values[name])
            x = part(x)
    assert torch.equal(x, model(tokens))
    assert sorted(names) == sorted(values)


def test_a_stage_with_one_end_has_a_copy_of_a_tied_embedding() -> None:
    tied = TINY.model_copy(update={"tie_embeddings": True})
    first = dict(Transformer(tied, last_layer=1, head=False).named_parameters())
    last = dict(Transformer(tied, first_layer=1, embed=False).named_parameters())
    assert "head.weight" not in first
    assert "embed.weight" not in last
    copies = DecoderDefinition(tied).copies
    assert copies.keys() == last.keys() - {spec.name for spec in parameter_table(tied)}
    assert copies["head.weight"].name == "embed.weight"
    assert first["embed.weight"].shape == last["head.weight"].shape
    assert DecoderDefinition(TINY).copies == {}


def test_injected_kernel_is_the_one_used() -> None:
    calls: list[tuple[torch.Size, torch.Size]] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, *seen: Any) -> Tensor:
        calls.append((q.shape, k.shape))
        return sdpa(q, k, v, *seen)

    Transformer(TINY, attention=kernel)(torch.zeros(2, 5, dtype=torch.int64))
    assert calls == [(torch.Size([2, 6, 5, 4]), torch.Size([2, 2, 5, 4]))] * TINY.layers


def test_bf16_and_autocast_stay_near_fp64() -> None:
    tokens = torch.randint(0, 48, (2, 32), generator=torch.Generator().manual_seed(2))
    exact = build()(tokens)
    model = build(dtype=torch.float32)
    assert (model(tokens) - exact).norm() <= 1e-5 * exact.norm()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(tokens)
    assert out.dtype == torch.bfloat16
    assert (out - exact).norm() <= 0.05 * exact.norm()
    assert (build(dtype=torch.bfloat16)(tokens) - exact).norm() <= 0.1 * exact.norm()


def test_rotary_table_survives_inference_mode() -> None:
    x = torch.randn(1, 1, 77, 6, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        rotate(x.detach(), Rope(123.0))
    rotate(x, Rope(123.0)).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("config", [TINY, GPT2, OLMO2, GEMMA2, GEMMA3, DEEPSEEK])
def test_plan_names_every_module_that_has_parameters(config: ModelConfig) -> None:
    model = Transformer(config)
    globs = {glob.replace("*", "0") for glob, _ in family_of(config).tensor_plan(config)}
    modules = dict(model.named_modules())
    assert globs <= set(modules)
    owners = {
        n.rpartition(".")[0]
        for n, _ in model.named_parameters()
        if not n.startswith(("layers.1", "layers.2"))
    }
    assert owners <= globs


def test_tensor_parallel_cuts_by_whole_heads() -> None:
    """Half of every cut weight gives half of the heads: the sum over both halves is the whole."""
    model = build()
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    block = model.layers["0"]
    assert isinstance(block, PreNormBlock)
    whole = block.attention(x)
    parts = []
    for half in range(2):
        layer = Transformer(TINY).double().layers["0"]
        assert isinstance(layer, PreNormBlock)
        part = layer.attention
        for name in ("wq", "wk", "wv", "wo"):
            weight = getattr(block.attention, name).weight
            getattr(part, name).weight = torch.nn.Parameter(weight.chunk(2, 1 if name == "wo" else 0)[half])
        parts.append(part(x))
    assert (parts[0] + parts[1] - whole).norm() <= 1e-12 * whole.norm()
