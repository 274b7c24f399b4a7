"""What selective recomputation promises: no matrix product and no attention is computed twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.precision import fp8
from picotron_ray.train import engine as engine_module
from picotron_ray.train.engine import build_engine
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, batch, make_job

BASE = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "layers": 3, "heads": 2, "kv_heads": 2}
DENSE = ModelConfig(**BASE)
GPT2 = ModelConfig(**BASE, family="gpt2", max_positions=16)
MOE = {"experts": 4, "top_k": 2, "intermediate_size": 32, "shared_intermediate_size": 16}
MIXTURE = ModelConfig(**BASE, moe=MOE)


def job(model: ModelConfig, precision: str = "fp32", **kernels: Any) -> JobConfig:
    return make_job("sgd", 4, model, precision=precision, kernels=KernelsConfig(**kernels))


JOBS = {
    "dense": job(DENSE),
    "math attention": job(DENSE, attention="math"),
    "fused projections": job(DENSE, projections="fused"),
    "gpt2": job(GPT2),
    "loop": job(MIXTURE, experts="loop"),
    "grouped": job(MIXTURE, experts="grouped"),
    "grouped bf16": job(MIXTURE, "bf16", experts="grouped"),
    "fused grouped": job(MIXTURE, experts="grouped", projections="fused"),
    "fp8": job(DENSE, "fp8"),
}


class Products(TorchDispatchMode):
    """Counts the matrix products and forward attentions that are really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if "mm" in name or ("attention" in name and "backward" not in name):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def products(kind: str, policy: str) -> Counter[str]:
    """Of one step's passes."""
    layout = Layout(micro_batch=4, recompute=policy)
    engine = build_engine(JOBS[kind], layout, 0, None, CPU)
    engine.initialise(0)
    with Products() as found:
        engine.forward_backward(batch(JOBS[kind], layout, 0, 1))
    engine.close()
    return found.counts


@pytest.mark.parametrize("kind", JOBS)
def test_selective_computes_no_product_twice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "fp8":
        pytest.importorskip("torchao")
        monkeypatch.setattr(fp8, "EMULATE", True)
        monkeypatch.setattr(engine_module, "check_precision", lambda job, device: None)
    torch.set_num_threads(1)
    none, selective, full = (products(kind, policy) for policy in ("none", "selective", "full"))
    assert any("grouped" in name for name in none) is ("grouped" in kind)
    assert selective == none
    again = {name: full[name] - none[name] for name in none}
    assert set(full) == set(none)
    assert min(again.values()) >= 0
    # three blocks of q, k and v, attention and more; but the last product of a block needs not run again
    assert sum(again.values()) >= 3 * 4
