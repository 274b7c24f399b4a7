"""What recomputation promises: less memory held between the passes, and the same gradients (test_matrix)."""

from __future__ import annotations

import pytest
import torch

from picotron_ray.config.compute import LayoutConfig
from picotron_ray.config.data import DataConfig
from picotron_ray.config.job import JobConfig
from picotron_ray.config.layout import Layout
from picotron_ray.config.model import ModelConfig
from picotron_ray.config.recompute import recomputed
from picotron_ray.models.llama import Transformer
from picotron_ray.parallel.recompute import apply_recompute
from picotron_ray.planner.choose import choose_layout
from picotron_ray.planner.memory import memory_estimate

ROWS, LENGTH = 4, 128
MODEL = ModelConfig(vocab_size=64, hidden_size=64, intermediate_size=256, layers=8, heads=4)


def held_bytes(policy: str) -> int:
    """Bytes that the forward pass leaves for the backward pass, parameters and logits left out."""
    model = Transformer(MODEL)
    blocks = list(model.layers.values())
    apply_recompute(blocks, recomputed(policy, len(blocks)), [[] for _ in blocks])
    own = {parameter.data_ptr() for parameter in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    kept = []  # so that no freed storage's address comes again
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = model.embed(torch.zeros(ROWS, LENGTH, dtype=torch.long))
        for block in blocks:
            x = block(x)
            kept.append(x)
    for tensor in kept[:-1]:
        seen.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
    return sum(seen.values())


def test_policies_hold_less_and_less() -> None:
    found = [held_bytes(policy) for policy in ("none", "middle-50", "full")]
    assert found == sorted(found, reverse=True)
    assert found[2] < 0.15 * found[0]
    assert found[1] == pytest.approx((found[0] + found[2]) / 2, rel=0.1)


def test_a_memory_budget_is_kept() -> None:
    """The planner's choice under a limit, measured: state and what is held between the passes."""

    def job(budget_gib: float | None) -> JobConfig:
        return JobConfig(
            precision="fp32",
            model=MODEL,
            data=DataConfig(sequence_length=LENGTH, global_batch=ROWS),
            layout=LayoutConfig(micro_batch=ROWS, memory_budget_gib=budget_gib),
        )

    plain = memory_estimate(job(None), Layout(micro_batch=ROWS))
    limit = plain.total_bytes - 0.45 * plain.activation_bytes
    chosen = choose_layout(job(limit / 2**30), 1).layout.recompute
    assert chosen.startswith("blocks-")
    assert plain.state_bytes + held_bytes("none") > limit, "the limit would be kept anyhow"
    assert plain.state_bytes + held_bytes(chosen) < limit
