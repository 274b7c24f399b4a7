"""Sequence tasks on the core's own decoders: meta-gradients of a plain double backward, in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from picotron_ray.config.load import parse_job
from picotron_ray.data.batch import make_batch
from picotron_ray.data.tasks.open_tasks import open_data
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.models.transformer import Transformer
from picotron_ray.train.dry_run.proof import prove
from picotron_ray.train.engine import build_engine
from picotron_ray.train.meta.inner_rates import SHIFT
from picotron_ray.train.meta.strategies import Examples, Learner, Weights

LENGTH, SUPPORT, QUERY, STEPS, RATE = 6, 3, 2, 2, 0.2
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 1},
    "gpt2": {"kv_heads": 2, "max_positions": LENGTH, "tie_embeddings": True},
    "olmo2": {"kv_heads": 2},
    "gemma2": {"kv_heads": 1},
    "gemma3": {"kv_heads": 1, "head_dim": 4},
    "deepseek": {
        "kv_heads": 2,
        "mla": {"kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 4},
    },
}


CASES = [("llama", "maml"), ("llama", "fomaml"), ("llama", "reptile"), ("llama", "metasgd")]
CASES += [(family, "maml") for family in ("gpt2", "olmo2", "gemma2", "gemma3", "deepseek")]


@pytest.mark.parametrize(("family", "strategy"), CASES)
def test_of_a_plain_double_backward(family: str, strategy: str) -> None:
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 16, "layers": 2, "heads": 2}
    meta = {
        "tasks": "sequences",
        "support": SUPPORT,
        "query": QUERY,
        "inner_steps": STEPS,
        "inner_rate": RATE,
    }
    job = parse_job(
        {
            "precision": "fp64",
            "model": {"family": family, **sizes, **FAMILIES[family]},
            "meta": {"strategy": strategy, **meta},
            "data": {"sequence_length": LENGTH, "global_batch": 3},
            "optimizer": {"clip_norm": None},
        }
    )
    layout = Layout(micro_batch=2)  # one row is a filler
    engine = build_engine(job, layout, 0, None, torch.device("cpu"))
    engine.initialise(0)
    batch = make_batch(open_data(job, Path()).feed, layout, 0, 1)
    loss, _ = engine.gradients_of(batch)
    found = {one.shard.name: one.tensor for one in engine.gradients()}
    model = Transformer(job.model).double()
    weights = {one.shard.name: one.tensor.clone().requires_grad_() for one in engine.weights()}
    expected = {name: torch.zeros_like(w) for name, w in weights.items()}
    of_rates = {name: torch.zeros_like(w) for name, w in weights.items()}
    total = 0.0
    for row in batch.tokens.reshape(4, -1)[:3]:
        parts = torch.from_numpy(row).view(SUPPORT + QUERY, 2, LENGTH)
        rates = {name: torch.full_like(w, RATE).requires_grad_() for name, w in weights.items()}

        def loss_of(now: dict[str, Tensor], rows: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                logits = functional_call(model, now, (rows[:, 0],))
            return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), rows[:, 1].flatten())

        now = dict(weights)
        second = strategy in ("maml", "metasgd")
        for _ in range(STEPS):
            slopes = torch.autograd.grad(
                loss_of(now, parts[:SUPPORT]), list(now.values()), create_graph=second
            )
            pairs = zip(now.items(), slopes, strict=True)
            now = {name: w - (rates[name] if second else RATE) * slope for (name, w), slope in pairs}
        judged = loss_of(now, parts[SUPPORT:])
        total += float(judged.detach()) / 3
        if strategy == "reptile":
            parts_of = [((w - now[name]) / RATE).detach() for name, w in weights.items()]
        else:
            leaves = list(weights.values()) if second else list(now.values())
            parts_of = list(torch.autograd.grad(judged, leaves, retain_graph=True))
        for name, slope in zip(weights, parts_of, strict=True):
            expected[name] += slope / 3
        found_rates = torch.autograd.grad(judged, list(rates.values())) if second else of_rates.values()
        for name, slope in zip(rates, found_rates, strict=True):
            of_rates[name] = of_rates[name] + (slope / 3 if second else 0.0)
    assert float(loss) / batch.loss_tokens == pytest.approx(total, rel=1e-12)
    wanted = expected | ({f"{SHIFT}/{n}": s for n, s in of_rates.items()} if strategy == "metasgd" else {})
    assert set(found) == set(wanted)
    for name, slope in wanted.items():
        torch.testing.assert_close(found[name], slope, rtol=1e-9, atol=1e-9)
    assert max(float(slope.abs().max()) for slope in wanted.values()) > 1e-3


def test_adapters_adapt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with frozen weights only the trained ones move in an inner step."""
    job = parse_job(
        {
            "precision": "fp64",
            "model": {
                "vocab_size": 20, "hidden_size": 8, "intermediate_size": 16, "layers": 1, "heads": 2,
                "kv_heads": 1, "lora": {"rank": 2, "targets": ["*.wq", "*.wv"]},
            },
            "meta": {"strategy": "metasgd", "tasks": "sequences", "inner_steps": 2},
            "data": {"sequence_length": LENGTH, "global_batch": 2},
        }
    )  # fmt: skip
    layout = Layout(micro_batch=2)
    engine = build_engine(job, layout, 0, None, torch.device("cpu"))
    engine.initialise(0)
    before = {one.shard.name: one.tensor.clone() for one in engine.weights()}
    adapters, plain = {name for name in before if ".lora_" in name}, Learner.loss

    def loss(learner: Learner, weights: Weights, examples: Examples) -> Tensor:
        assert set(weights) == adapters
        return plain(learner, weights, examples)

    monkeypatch.setattr(Learner, "loss", loss)
    for step in (1, 2):
        engine.gradients_of(make_batch(open_data(job, Path()).feed, layout, 0, step))
        engine.optimizer_step(0.01)
    moved = {
        one.shard.name for one in engine.weights() if not torch.equal(one.tensor, before[one.shard.name])
    }
    assert moved == adapters


def test_a_dry_run_is_refused() -> None:
    job = parse_job({"meta": {"strategy": "maml", "tasks": "sequences"}})
    with pytest.raises(LayoutError, match=r"^meta.strategy: saw maml, whose rows are tasks"):
        prove(job, Layout())
