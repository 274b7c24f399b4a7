"""The planner's analytic counts against the built module (on the meta device: no memory is used)."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import LatentConfig, ModelConfig, MoeConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.registry import parameter_table
from picotron_ray.models.transformer import Transformer
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.model_sizes import (
    flops_per_token,
    parameter_count,
    stage_bounds,
    stage_flops_per_token,
    stage_parameters,
)

MODELS = [
    ModelConfig(),
    ModelConfig(tie_embeddings=True),
    ModelConfig(hidden_size=64, heads=8, kv_heads=8, layers=6, intermediate_size=100, vocab_size=300),
    ModelConfig(hidden_size=96, heads=6, kv_heads=1, layers=2, intermediate_size=31, vocab_size=257),
    ModelConfig(family="gpt2", kv_heads=4, max_positions=64),
    ModelConfig(family="gpt2", kv_heads=4, max_positions=64, tie_embeddings=True),
    ModelConfig(family="olmo2"),
    ModelConfig(family="gemma2", tie_embeddings=True, sliding_window=8, full_attention_every=2),
    ModelConfig(family="gemma3", sliding_window=8, full_attention_every=2, rope_local_theta=100.0),
    ModelConfig(family="deepseek", kv_heads=4, mla=LatentConfig(kv_lora_rank=24, v_head_dim=48)),
    ModelConfig(
        family="deepseek",
        kv_heads=4,
        mla=LatentConfig(q_lora_rank=20, kv_lora_rank=24, v_head_dim=48),
        moe=MoeConfig(experts=4, intermediate_size=24, shared_intermediate_size=40, first_dense_layers=1),
    ),
    ModelConfig(moe=MoeConfig(experts=4, intermediate_size=24)),
    ModelConfig(moe=MoeConfig(experts=8, top_k=3, intermediate_size=24, shared_intermediate_size=40)),
]


@pytest.mark.parametrize("config", MODELS)
def test_parameters_of_the_module(config: ModelConfig) -> None:
    with torch.device("meta"):
        module = Transformer(config)
    assert sum(p.numel() for p in module.parameters()) == parameter_count(config)


@pytest.mark.parametrize("config", MODELS)
@pytest.mark.parametrize(
    ("name", "of_matrices", "of_others"), [("adamw", 2, 2), ("sgd", 0, 0), ("muon", 1, 2)]
)
def test_moments_of_the_optimizer(config: ModelConfig, name: str, of_matrices: int, of_others: int) -> None:
    job = JobConfig.model_validate({"model": config, "optimizer": {"name": name}})
    table = parameter_table(config)
    expected = sum(spec.numel * (2 + (of_matrices if spec.matrix else of_others)) for spec in table)
    assert memory_estimate(job, Layout()).state_bytes == 4 * expected


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("config", MODELS[:2] + MODELS[4:6] + MODELS[7:9])
def test_parameters_of_a_stage(pp: int, config: ModelConfig) -> None:
    for stage in range(pp):
        first, last = stage_bounds(config, pp)[stage]
        with torch.device("meta"):
            part = Transformer(
                config, first_layer=first, last_layer=last, embed=stage == 0, head=stage == pp - 1
            )
        assert sum(p.numel() for p in part.parameters()) == stage_parameters(config, pp, stage)


def _plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    """Attention as two visible matrix products over the full square, in sdpa's shapes."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v


@pytest.mark.parametrize("config", MODELS)
def test_flops_of_the_module(config: ModelConfig) -> None:
    """Torch's own counter of forward and backward, attention counted as a full square.

    Exact against the matrix products; the 6N formula also counts norms, biases and the tables that are only
    looked up, which multiply no matrix, so it lies above by exactly those.
    """
    sequence, batch = 48, 2
    # where tokens go depends on values, so a mixture needs real ones
    with torch.device("cpu" if config.moe.experts else "meta"):
        module = Transformer(config, attention=_plain_attention)
        tokens = torch.arange(batch * sequence).view(batch, sequence)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    with FlopCounterMode(display=False) as counter:
        module(tokens).sum().backward()
    counted = counter.get_total_flops() / (batch * sequence)
    parameters = dict(module.named_parameters())
    vectors = {name: p.numel() for name, p in parameters.items() if p.dim() == 1}  # norms and biases
    tables = (config.max_positions or 0) * config.hidden_size
    tables += 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    assert counted == flops_per_token(config, sequence) - 6 * (sum(vectors.values()) + tables)
    inside = sum(count for name, count in vectors.items() if name.startswith("layers."))
    assert counted == stage_flops_per_token(config, sequence, 1, 0) - 6 * inside
