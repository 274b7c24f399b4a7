"""What is asked of a module of the user's own, question by question, on modules of a few numbers."""

from __future__ import annotations

import io
import itertools
import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from picotron_ray.config.schema.compute import KernelsConfig, LayoutConfig
from picotron_ray.config.schema.custom_model import BuiltModel
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.schema.service import ClusterConfig
from picotron_ray.errors import ConfigError
from picotron_ray.train.custom_model import inspect as inspection
from picotron_ray.train.custom_model.inspect import degrees, inspect, kinds, read_plan
from picotron_ray.train.custom_model.plan_search import Trial
from tests.support.gloo.parallel_jobs.matrix_jobs import make_job

VOCABULARY = 2


class Words(nn.Module):
    """One embedding into logits, and what ``see`` makes of them."""

    def __init__(self, see: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.embed, self.see = nn.Embedding(VOCABULARY, VOCABULARY), see

    def forward(self, tokens: Tensor) -> Tensor:
        return self.see(self.embed(tokens))


@pytest.fixture
def job_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., JobConfig]:
    """Make a job whose builder is a function of a test."""

    def make(build: Callable[[], Any], length: int = 8, plan: dict[str, Any] | None = None) -> JobConfig:
        mine = ModuleType("mine")
        mine.build, mine.plan = build, lambda: {"blocks": "0", "pipeline": ["0"]}  # type: ignore[attr-defined]
        mine.mapping = {"blocks": "*"}  # type: ignore[attr-defined]
        mine.odd = [1]  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "mine", mine)
        values = {"vocab_size": VOCABULARY, "builder": "mine:build", "plan": plan or {}}
        return make_job("sgd", 4, ModelConfig.model_validate(values), length=length)

    return make


def why_not(job: JobConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        inspect(job)
    (line,) = caught.value.problems
    return line.removeprefix("model.builder: ")


@pytest.mark.parametrize("length", [1, 2, 3, 16, 17])
def test_short_runs_have_two_rows_of_16_tokens_at_most(job_of: Any, length: int) -> None:
    module = Words()
    trial = inspection._check_forward(job_of(Words, length), module)
    assert trial.tokens.shape == (2, min(length, 16))
    assert set(trial.tokens.flatten().tolist()) <= {0, 1}
    assert next(trial.module.parameters()).dtype == torch.float64
    assert next(module.parameters()).dtype == torch.float32


@pytest.mark.parametrize("length", [2, 3, 17])
def test_later_tokens_and_other_rows_are_kept_apart(job_of: Any, length: int) -> None:
    later = "logits depend on later tokens, or on other rows of the batch: the loss would mean nothing; use a"
    for see in (
        lambda x: x + x.mean(dim=1, keepdim=True),
        lambda x: x + x[:, -1:],
        lambda x: x + x.sum(dim=0),
        lambda x: x + x.flip(0),
    ):
        said = why_not(job_of(lambda see=see: Words(see), length))
        assert said.startswith(later)
    inspect(job_of(lambda: Words(lambda x: x.cumsum(dim=1)), length))


def test_builds_must_be_alike(job_of: Any) -> None:
    number = itertools.count()

    def other_values() -> nn.Module:
        module = Words()
        nn.init.constant_(module.embed.weight, next(number))
        return module

    def other_names() -> nn.Module:
        return nn.Sequential(*[nn.Identity()] * next(number), Words())

    for build, name in ((other_values, "embed.weight"), (other_names, "0.embed.weight")):
        number = itertools.count()
        assert why_not(job_of(build)) == (
            f"{name} differs between two builds under one seed; take random numbers from torch, numpy or"
            " random alone, without seeding them"
        )


def test_parameters_that_cannot_be_trained(job_of: Any) -> None:
    def with_(parameter: Any) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            module = Words()
            module.extra = parameter
            return module

        return build

    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    meta = nn.Parameter(torch.empty(2, device="meta"))
    for parameter, said in (
        (frozen, "extra is frozen (requires_grad=False); unfreeze it, and name it in model.freeze"),
        (
            nn.Parameter(torch.ones(2, dtype=torch.complex64)),
            "extra is torch.complex64, expected a floating-point parameter",
        ),
        (meta, "extra is built on meta; build on the CPU, workers move it"),
    ):
        assert why_not(job_of(with_(parameter))) == said
    assert why_not(job_of(nn.Identity)) == "the module has no parameters; nothing would be trained"


def test_dropout_is_refused_wherever_it_hides(job_of: Any) -> None:
    assert "1 (Dropout) drops out" in why_not(job_of(lambda: nn.Sequential(Words(), nn.Dropout(0.1))))
    for part, name in (
        (nn.Dropout(0.5), "Dropout"),
        (nn.AlphaDropout(0.5), "AlphaDropout"),
        (nn.MultiheadAttention(2, 1, dropout=0.5), "MultiheadAttention"),
    ):
        with pytest.raises(ConfigError) as caught:
            inspection._check_randomness(nn.Sequential(nn.Identity(), part))
        (line,) = caught.value.problems
        assert line == (
            f"model.builder: 1 ({name}) drops out with p=0.5, which would differ from layout to layout; build"
            " the model with dropout 0"
        )
    holder = nn.Module()
    holder.dropout = nn.Dropout(0.0)
    inspection._check_randomness(nn.Sequential(holder, nn.PairwiseDistance(2.0), nn.Dropout(0.0)))


class Asking(nn.Module):
    """A block that asks for a number, or (``plain``) does not."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.scale, self.plain = nn.Parameter(torch.ones(VOCABULARY)), plain

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if self.plain or float(self.scale.sum()) > 0 else x


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_blocks_that_are_to_be_compiled_are_one_graph(job_of: Any) -> None:
    def build(plain: bool) -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY), Asking(plain), Asking(plain))

    for plain, compiled in ((False, False), (True, True)):
        job = job_of(lambda plain=plain: build(plain), plan={"blocks": "[12]"})
        inspect(job.model_copy(update={"kernels": KernelsConfig(compile=compiled)}))
    job = job_of(lambda: build(False), plan={"blocks": "[12]"})
    said = why_not(job.model_copy(update={"kernels": KernelsConfig(compile=True)}))
    assert said.startswith("kernels.compile: block 1 is not one graph: ")
    assert "test_inspect.py" in said


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiler_that_fails_is_one_line(job_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises more kinds of errors than it names, such as of shapes that depend on values."""

    def compiled(forward: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        def fails(*inputs: Any) -> Any:
            raise RuntimeError("Could not guard on u0\n\nCaused by: rows.split(counts)")

        return fails

    monkeypatch.setattr(torch, "compile", compiled)
    job = job_of(
        lambda: nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY), Asking(True)), plan={"blocks": "1"}
    )
    said = why_not(job.model_copy(update={"kernels": KernelsConfig(compile=True)}))
    assert said.startswith("kernels.compile: saw true, but torch cannot trace the model's blocks: ")
    assert "Could not guard on u0" in said
    assert "\n" not in said


def test_sharing_across_blocks_is_refused_and_elsewhere_allowed(job_of: Any) -> None:
    def tied(first: int, second: int) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            blocks = [nn.Linear(VOCABULARY, VOCABULARY) for _ in range(4)]
            blocks[second].weight = blocks[first].weight
            return nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY), *blocks)

        return build

    plan = {"blocks": "2"}
    inspect(job_of(tied(0, 2), plan=plan))
    said = (
        "0.weight and 1.weight are one parameter shared across blocks, which is not supported; share outside"
    )
    for blocks, first, second in (("1", 0, 1), ("2", 0, 1), ("*", 1, 3)):
        found = why_not(job_of(tied(first, second), plan={"blocks": blocks}))
        names = f"{first + 1}.weight and {second + 1}.weight"
        assert found == f"{said} the blocks only".replace("0.weight and 1.weight", names)


class Keeps(nn.Module):
    """Saves its output, ``[batch, seq, 3]``, and one number more."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp() + x.sum().exp()


def measured(*parts: nn.Module, blocks: tuple[str, ...]) -> tuple[int, int]:
    module = nn.Sequential(nn.Embedding(VOCABULARY, 3), *parts)
    trial = Trial(module, torch.zeros(2, 5, dtype=torch.int64))
    found = inspection._measure(trial, blocks)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in trial.module.modules())
    return found


def test_what_the_first_block_puts_out_and_saves_per_token() -> None:
    class Pair(Keeps):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), None

    class First(nn.Module):
        def forward(self, pair: Any) -> Tensor:
            return pair[0]

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, 3)

        def forward(self, tokens: Tensor) -> Any:
            return SimpleNamespace(logits=self.embed(tokens).exp())

    # 10 tokens of 3 elements and a sum: 31 / 10, rounded up; nothing of what stands around the block
    assert measured(nn.Softmax(-1), Keeps(), nn.Linear(3, 7), nn.Softmax(-1), blocks=("2",)) == (3, 4)
    assert measured(Pair(), First(), blocks=("1",)) == (3, 4)
    # a linear layer saves its input and not its weight; a view of what is saved already is no more
    assert measured(nn.Linear(3, 7), nn.Flatten(0, 0), nn.Linear(7, 2), blocks=("1",)) == (7, 3)
    trial = Trial(Named(), torch.zeros(2, 5, dtype=torch.int64))
    assert inspection._measure(trial, ()) == (3, 3 + 1), "without blocks all of it, and the tokens"
    words = Words()
    words.see = nn.Identity()
    words.forward = words.embed.forward  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"model\.plan\.blocks: see is not called by forward; name mo"):
        inspection._measure(Trial(words, trial.tokens), ("see",))


def test_degrees_that_a_job_may_use() -> None:
    job = make_job("sgd", 4)

    def given(tp: Any, workers: int) -> list[int]:
        layout = LayoutConfig(tp=tp)
        cluster = ClusterConfig(max_workers=workers, min_workers=1)
        return degrees(job.model_copy(update={"layout": layout, "cluster": cluster}))

    assert [given(tp, 16) for tp in (1, 2, 3)] == [[], [2], [3]]
    assert [given("auto", n) for n in (1, 2, 7)] == [[], [2], [2, 3, 4, 5, 6, 7]]
    assert given("auto", 8) == given("auto", 9) == [2, 3, 4, 5, 6, 7, 8], "8 at most: each is tried"


def test_a_plan_by_path_and_keys_that_go_first(job_of: Any) -> None:
    def plan(**values: Any) -> Any:
        return read_plan(job_of(Words, plan=values).model)

    assert plan(blocks="x") == plan(blocks="x").model_validate({"blocks": "x"})
    found = plan(path="mine:plan", pipeline=["y"])
    assert (found.blocks, found.pipeline, found.tensor) == ("0", ("y",), None)
    assert plan(path="mine:mapping").blocks == "*"
    with pytest.raises(
        ConfigError, match=r"^model\.plan\.path: mine:odd gives no plan: TypeError: .*; expec"
    ):
        plan(path="mine:odd")


def test_embeddings_by_the_first_of_their_names() -> None:
    module = nn.Sequential(nn.Embedding(2, 3), nn.Linear(3, 2, bias=False), nn.Embedding(2, 3))
    module[1].weight = module[0].weight
    assert inspection._embeddings(module) == ("0.weight", "2.weight")


def test_the_users_lines() -> None:
    parameters = (("a.weight", (1000, 2)), ("b.0.up.weight", (40, 25)), ("b.0.down.weight", (25, 40)))
    found = BuiltModel(
        parameters=parameters,
        blocks=("b.0",),
        pipeline=(),
        tensor={"b.0.up": "colwise", "b.0.down": "rowwise"},
        cuts={"b.0.up.weight": 0, "b.0.down.weight": 1},
        tensor_degrees=(2, 4),
        hidden_size=1,
        activations=1,
    )
    model = ModelConfig.model_validate({"vocab_size": 2, "builder": "mine:build"})
    first = "model mine:build: 4,000 parameters in 3 tensors, 1 repeated blocks"
    assert inspection._said(model, found) == [
        first,
        "tensor parallelism (tried at 2, 4) cuts b.*.up colwise, b.*.down rowwise; 50% of the parameters stay"
        " whole on every rank",
    ]
    assert inspection._said(model, found.model_copy(update={"tensor_degrees": ()})) == [first]


def test_the_first_number_of_a_name_is_the_blocks() -> None:
    names = ["0.mlp.2", "1.mlp.2", "h.0.e.1.up", "h.1.e.1.up", "h.1.e.2.up", "x2.y", "h.7"]
    assert kinds(dict.fromkeys(names, "colwise")) == [
        f"{name} colwise" for name in ("*.mlp.2", "h.*.e.1.up", "h.*.e.2.up", "x2.y", "h.*")
    ]


def test_a_process_of_its_own_answers_in_json(
    job_of: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loud() -> nn.Module:
        print("not JSON")
        return Words()

    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for build, keys in ((loud, ["built", "said"]), (nn.Identity, ["problems"])):
        job = job_of(build)
        monkeypatch.setattr(sys, "stdin", io.StringIO(job.model_dump_json()))
        inspection.main()
        said = capsys.readouterr()
        assert list(json.loads(said.out)) == keys
        assert ("not JSON" in said.err) == (build is loud)
    assert threads == [1, 1], "threads stand for ranks, and share the machine"
