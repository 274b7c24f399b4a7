"""Compiled code over the layers of a model and the generations of a process, and what cannot be compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.support.fast_path import settled
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel import compiled_code
from picotron_ray.parallel.compiled_code import CODE, KEPT, CompiledCode, compile_blocks
from picotron_ray.train.engine import build_engine

LAYERS = 12
pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler
MIXED = {"sliding_window": 3, "full_attention_every": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"family": "gpt2", "max_positions": 8},
    "olmo2": {"family": "olmo2", "qk_norm": True},
    "deepseek": {
        "family": "deepseek",
        "kv_heads": 2,
        "mla": {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3},
    },
    "qwen3": {"qk_norm": True, "heads": 4, "kv_heads": 2},
    "lora": {"lora": {"rank": 2}},
    "gemma2": {"family": "gemma2", **MIXED, "attention_softcap": 5.0},
    "gemma3": {"family": "gemma3", **MIXED, "rope_local_theta": 100.0},
}


class Counting:
    """A backend that runs graphs as they are, and counts them and their calls."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*given: Any) -> Any:
            self.calls += 1
            return graph.forward(*given)

        return run


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    found = Counting()
    monkeypatch.setattr(compiled_code, "BACKEND", found)
    monkeypatch.setattr(CODE, "_known", [])
    torch._dynamo.reset()
    counters.clear()
    yield found
    torch._dynamo.reset()


def job_of(model: dict[str, Any], **sections: Any) -> JobConfig:
    base = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "layers": LAYERS, "heads": 2}
    kernels = {"compile": True, **sections.pop("kernels", {})}
    data = {"sequence_length": 8, **sections.pop("data", {})}
    words = {"model": ModelConfig(**{**base, **model}), "precision": "fp32"} | sections
    return JobConfig.model_validate({**words, "kernels": kernels, "data": data})


def passes(job: JobConfig, layout: Layout, *, evaluates: bool = True) -> tuple[str, ...]:
    """Forward and backward as a generation of its own; what was applied."""
    engine = build_engine(job, layout, 0, None, torch.device("cpu"))
    engine.initialise(seed=0)
    (model,) = engine._models.values()
    tokens = torch.zeros(layout.micro_batch, 8, dtype=torch.long)
    named = {}
    if job.data.document_masks:
        named["documents"] = torch.arange(8).div(3, rounding_mode="floor").expand(layout.micro_batch, 8)
    if job.kernels.loss == "linear":
        named["targets"] = tokens
    model(tokens, **named).sum().backward()
    if evaluates:
        with torch.no_grad():
            model(tokens, **named)
    applied = engine.applied
    engine.close()
    return applied


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.deep) for name in list(FAMILIES)[1:])]
)
def test_all_layers_run_one_graph_over_generations(counting: Counting, family: str) -> None:
    """Each attention had a Rope of its own: code for eight blocks, then none, and that for good."""
    job = job_of(FAMILIES[family])
    layouts = [Layout(micro_batch=rows) for rows in (1, 2, 1, 2, 3, 1)]
    for number, layout in enumerate(layouts, 1):
        assert f"{LAYERS} blocks compiled, each as one graph" in passes(job, layout)
        assert counting.calls == number * 2 * LAYERS, "forward of training and of evaluation, compiled"
    kinds = 2 if "full_attention_every" in FAMILIES[family] else 1
    first = family == "lora"  # below it nothing trains, so that its input needs no gradient
    assert counting.graphs == 3 * (2 * kinds + first), "for each size and kind, with gradients and without"


@pytest.mark.parametrize(
    "sections",
    [
        {"precision": "bf16", "kernels": {"projections": "fused", "loss": "linear", "loss_chunk": 5}},
        {"data": {"document_masks": True}, "recompute": "selective"},
        *(
            pytest.param(given, marks=pytest.mark.deep)
            for given in (
                {"precision": "bf16", "adaptive_precision": {"error_bound": 1e-3}},
                {"kernels": {"attention": "math"}},
                {"kernels": {"projections": "fused"}},
                {"kernels": {"norm": "compiled", "activation": "compiled"}},
                {"recompute": "full"},
                {"recompute": "int8"},
                {"model": FAMILIES["gemma2"], "data": {"document_masks": True}, "precision": "bf16"},
                {"model": FAMILIES["gemma3"], "kernels": {"loss": "linear", "projections": "fused"}},
                {"model": {"rope_scaling": {"type": "yarn", "factor": 2.0}, "partial_rotary_factor": 0.5}},
            )
        ),
    ],
    ids=str,
)
def test_every_way_to_compute_a_block_is_one_graph(counting: Counting, sections: dict[str, Any]) -> None:
    given = dict(sections)
    layout = Layout(micro_batch=2, recompute=given.pop("recompute", "none"))
    applied = passes(job_of({"layers": 3, **given.pop("model", {})}, **given), layout)
    assert "3 blocks compiled, each as one graph" in applied


def test_code_of_known_layouts_stays_until_there_is_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[str] = []
    monkeypatch.setattr("torch._dynamo.reset", lambda: dropped.append("all"))
    code = CompiledCode()
    for number in [*range(KEPT), *range(KEPT)]:
        code.begin(Layout(dp=number + 1))
    assert not dropped
    code.begin(Layout(dp=99))
    assert dropped == ["all"]
    code.begin(Layout(dp=1))
    assert dropped == ["all"]


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("here")
        return x if x.sum().item() > 0 else x + 1


class Growing(nn.Module):
    """Needs code anew at each call: Dynamo guards on what it reads of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return x + len(self.seen)


def test_a_broken_graph_is_an_error_that_names_block_and_line(counting: Counting) -> None:
    block = Breaking()
    compile_blocks({"layers.3": block}, one_graph=True)
    with pytest.raises(LayoutError) as told:
        block(torch.ones(2))
    text = str(told.value)
    assert text.startswith("kernels.compile: block layers.3 is not one graph: ")
    assert "test_compiled_code.py" in text
    assert text.endswith("Use false, or change the model")
    assert "\n" not in text
    several = Breaking()
    compile_blocks({"layers.3": several}, one_graph=False)
    assert several(torch.ones(2)).tolist() == [1.0, 1.0]


def test_one_version_too_many_is_an_error(counting: Counting) -> None:
    CODE.begin(Layout())
    torch._dynamo.config.recompile_limit = 2
    block = Growing()
    compile_blocks({"layers.0": block}, one_graph=False)
    for count in range(2):
        block.seen = tuple(range(count))
        block(torch.ones(2))
    block.seen = (1, 2)
    with pytest.raises(LayoutError, match=r"block layers\.0 would need more than \d+ versions"):
        block(torch.ones(2))


def test_without_a_compiler_auto_compiles_nothing_and_true_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    compiled_code.missing_compiler.cache_clear()
    missing = compiled_code.missing_compiler("cpu")
    assert missing == "no compiler was found: $CXX, c++, g++, clang++"
    monkeypatch.setenv("CXX", sys.executable)
    compiled_code.missing_compiler.cache_clear()
    assert compiled_code.missing_compiler("cpu") == ""
    compiled_code.missing_compiler.cache_clear()
    job = parse_job({"precision": "bf16", "kernels": {"compile": True}})
    with pytest.raises(LayoutError, match=r"saw true, but no compiler was found: \$CXX"):
        settled(job, "cuda", Layout(), missing)
    assert settled(parse_job({"precision": "bf16"}), "cuda", Layout(), missing).kernels.compile is False


def test_what_fails_in_the_compiler_is_one_line() -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise BackendCompilerFailed(fails, ValueError("no tool\nat all"), None)

    with pytest.raises(LayoutError, match="block 1 fails in torch's compiler: ") as error:
        compiled_code.telling("kernels.compile: block 1", "false", fails)(torch.ones(1))
    assert "\n" not in str(error.value)
