"""Proposals and trials of plans on modules of a few numbers, and what is said of a plan that fails."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from picotron_ray.comm.all_reduce import ThreadGroup
from picotron_ray.config.schema.custom_model import PlanConfig
from picotron_ray.errors import ConfigError
from picotron_ray.train.custom_model import plan_search
from picotron_ray.train.custom_model.plan_search import (
    TensorCuts,
    Trial,
    cuts_of,
    divides,
    find_blocks,
    find_pipeline,
    find_tensor,
    propose,
    resolve,
    try_tensor,
)

TOKENS = torch.tensor([[0, 1, 2, 3], [4, 0, 2, 1]])


class Conv1D(nn.Module):
    """As transformers' GPT-2 has it: ``[in, out]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs)),
            nn.Parameter(torch.randn(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def mlp(inner: int = 12, hidden: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(hidden, inner), nn.Tanh(), nn.Linear(inner, hidden))


def small(*blocks: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), *blocks, nn.Linear(4, 5))


def refusal(function: Any, *inputs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*inputs)
    (line,) = caught.value.problems
    return line


# --- a trial ---------------------------------------------------------------------------------------------


def test_equal_but_for_rounding() -> None:
    ten = torch.tensor([6.0, 8.0], dtype=torch.float64)
    near, far = torch.tensor([0.9e-8, 0.0]), torch.tensor([1.1e-8, 0.0])
    assert Trial.close(ten + near, ten)
    assert not Trial.close(ten + far, ten)
    zero = torch.zeros(2, dtype=torch.float64)
    assert Trial.close(zero, zero)
    assert Trial.close(zero + near, zero, floor=10.0)
    assert not Trial.close(zero + far, zero, floor=10.0)


def test_gradients_of_a_trial_are_those_of_the_module_alone() -> None:
    class Idle(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x

    module = small(Idle(1, 1))
    trial = Trial(module, TOKENS)
    logits, gradients = trial.expected
    assert trial.expected[1] is gradients, "computed once"
    assert all(parameter.grad is None for parameter in module.parameters())
    torch.testing.assert_close(logits, module.double()(TOKENS).detach())
    assert gradients["1.weight"].tolist() == [[0.0]]
    weights = torch.linspace(-1, 1, 40, dtype=torch.float64).cos().view(2, 4, 5)
    (module(TOKENS).log_softmax(-1) * weights).sum().backward()
    torch.testing.assert_close(gradients["2.weight"], module[2].weight.grad)


# --- blocks and stages -----------------------------------------------------------------------------------


def test_globs_name_modules_or_are_refused() -> None:
    module = small(mlp(), mlp())
    assert resolve(module, "*", "key") == ["0", "1", "2", "3"]
    assert resolve(module, "*.0", "key") == ["1.0", "2.0"]
    assert refusal(resolve, module, "4", "key") == (
        "key: saw '4', which names no module; the model's own parts are 0, 1, 2, 3"
    )
    assert "saw ''" in refusal(resolve, module, "", "key"), "the model itself is no part of it"


def test_blocks_are_the_largest_run_of_alike_children() -> None:
    def blocks(module: nn.Module, given: str | None = None) -> tuple[str, ...]:
        return find_blocks(module, PlanConfig(blocks=given))

    assert blocks(small(mlp(), mlp())) == ("1", "2")
    assert blocks(small(mlp(), mlp()), "*.0") == ("1.0", "2.0")
    assert blocks(small(mlp(6), mlp(7))) == (), "of other shapes"
    assert blocks(small(mlp())) == ()
    assert blocks(nn.Linear(2, 2)) == ()
    assert blocks(nn.Sequential(nn.Tanh(), nn.Tanh())) == (), "without parameters"
    large, little = [nn.Linear(9, 9) for _ in range(2)], [nn.Linear(2, 2) for _ in range(3)]
    assert blocks(nn.ModuleDict({"a": nn.ModuleList(large), "b": nn.ModuleList(little)})) == ("a.0", "a.1")
    assert blocks(nn.ModuleDict({"a": nn.ModuleList(little), "b": nn.ModuleList(large)})) == ("b.0", "b.1")
    assert blocks(nn.Sequential(*large, *little)) == ("0", "1")
    assert blocks(nn.Sequential(*little, *large, nn.Tanh(), *little)) == ("3", "4")
    # a run counts all of its elements: 3 x 20 are more than 2 x 25 and 1 x 56
    runs = [nn.Linear(7, 7), *(nn.Linear(4, 4) for _ in range(3)), *(nn.Linear(4, 5) for _ in range(2))]
    assert blocks(nn.Sequential(*runs)) == ("1", "2", "3")


def chain(module: nn.Module, names: list[str] | None, blocks: str | None = None) -> Any:
    plan = PlanConfig(blocks=blocks, pipeline=None if names is None else tuple(names))
    trial = Trial(module, TOKENS)
    return find_pipeline(trial, plan, find_blocks(module, plan))


KEY = "model.plan.pipeline: "


def test_a_sequence_of_its_blocks_is_a_chain() -> None:
    whole = ("0", "1", "2", "3"), ""
    module = small(mlp(), mlp())
    assert chain(module, None) == whole
    assert chain(module, ["*"]) == whole
    assert chain(module, ["0", "1", "2", "3"]) == whole
    no_chain = "its blocks, so its forward cannot be cut into stages; use pp=1, or name the chain of modules"
    other = nn.ModuleList(module)
    other.forward = module.forward  # type: ignore[method-assign]
    for holder, kind in (
        (small(nn.Sequential(mlp(), mlp())), "Sequential"),  # blocks lie deeper
        (small(mlp()), "Sequential"),  # no blocks
        (other, "ModuleList"),
    ):
        names, why = chain(holder, None)
        assert names == ()
        assert why == f"{kind} is no nn.Sequential of {no_chain} that it is in model.plan.pipeline"


def test_what_is_no_chain() -> None:
    module = small(mlp(), nn.Tanh(), mlp(), nn.Tanh())

    def said(names: str, module: nn.Module, blocks: str | None = None) -> str:
        line = refusal(chain, module, list(names), blocks)
        assert line.startswith(KEY)
        return line.removeprefix(KEY)

    none = "saw no repeated blocks to cut between; name them in model.plan.blocks"
    assert said("012", small(mlp())) == none
    plain = small(mlp(), mlp())
    assert said("013", plain) == "block 2 is not in the chain"
    assert said("012", plain) == "parameter 3.weight is in no module of the chain"
    assert said("0213", plain, "1") == "the modules applied in turn give other logits than the model"
    assert said("013", small(mlp(), mlp()), "[13]") == "parameter 2.0.weight is in no module of the chain"
    assert said("012345", module, "[13]") == "2 stands between the blocks"
    assert said("01235", module, "1") == "the modules applied in turn give other logits than the model"
    assert said("1023", plain, "[12]").startswith("0 stands between the blocks")
    assert said("3012", plain).startswith("the chain of modules raises RuntimeError: ")
    shorter = nn.Sequential(nn.Embedding(5, 4), mlp(), mlp(), nn.Flatten(0, 1))
    assert said("012", shorter) == "the modules applied in turn give other logits than the model"


def test_a_chain_that_fails_without_being_asked_for_is_no_plan() -> None:
    module = small(mlp(), mlp())
    module[3].weight = module[0].weight
    tied = "0.weight and 3.weight are one parameter, which would lie on two stages"
    assert chain(module, None) == ((), f"{tied}; use pp=1")
    assert refusal(chain, module, ["*"]) == KEY + tied


def test_parameters_that_share_a_stage_may_be_tied() -> None:
    ends = nn.Linear(4, 4), nn.Linear(4, 4)
    ends[1].weight = ends[0].weight
    whole = (tuple("012345"), "")
    for tied in (
        small(mlp(), mlp(), *ends),
        nn.Sequential(nn.Embedding(5, 4), *ends, mlp(), mlp(), nn.Linear(4, 5)),
        small(mlp(), mlp(), ends[0], nn.Tanh()),
    ):
        assert chain(tied, None) == whole
    last = small(mlp(), nn.Sequential(*ends), nn.Linear(4, 4))
    names = tuple("01234")
    assert plan_search._chain_problem(Trial(last, TOKENS), names, ("1", "2")) == ""
    last[3].weight = ends[0].weight
    assert plan_search._chain_problem(Trial(last, TOKENS), names, ("1", "2")) == (
        "2.0.weight and 2.1.weight are one parameter, which would lie on two stages"
    )


# --- proposals -------------------------------------------------------------------------------------------


def linears(*shapes: tuple[int, int]) -> nn.ModuleDict:
    names = "abcdef"
    return nn.ModuleDict({names[i]: nn.Linear(*shape) for i, shape in enumerate(shapes)})


@pytest.mark.parametrize(
    ("shapes", "proposed"),
    [
        ([(4, 6), (6, 4)], True),
        ([(4, 4), (4, 4)], False),  # one square after the other: any two
        ([(4, 4), (4, 4), (4, 4)], True),
        ([(4, 6), (4, 6), (6, 4)], True),
        ([(4, 6), (4, 2), (6, 4)], True),  # fewer heads of keys
        ([(4, 6), (5, 6), (6, 4)], False),
        ([(4, 6), (6, 5)], False),
        ([(4, 6), (5, 4)], False),
        ([(4, 6)], False),
        ([(4, 4), (4, 6), (6, 4)], False),
    ],
)
def test_linears_that_lead_back_are_proposed(shapes: list[tuple[int, int]], proposed: bool) -> None:
    *ups, down = "abcdef"[: len(shapes)]
    expected = [{**dict.fromkeys(ups, "colwise"), down: "rowwise"}] if proposed else []
    assert propose(linears(*shapes)) == expected
    inside = [{f"x.{name}": style for name, style in group.items()} for group in expected]
    assert propose(nn.ModuleDict({"x": linears(*shapes)})) == inside


def test_the_same_place_in_every_block_is_one_group() -> None:
    blocks = nn.ModuleList(nn.ModuleDict({"x": linears((4, 6), (6, 4)), "y": mlp()}) for _ in range(2))
    assert propose(nn.ModuleDict({"h": blocks})) == [
        {f"h.{i}.x.{name}": style for i in (0, 1) for name, style in (("a", "colwise"), ("b", "rowwise"))},
        {f"h.{i}.y.{name}": style for i in (0, 1) for name, style in (("0", "colwise"), ("2", "rowwise"))},
    ]
    conv = nn.ModuleDict({"up": Conv1D(4, 6), "act": nn.Tanh(), "down": Conv1D(6, 4)})
    assert propose(conv) == [{"up": "colwise", "down": "rowwise"}]
    assert cuts_of(conv, propose(conv)[0]) == {"up.weight": 1, "up.bias": 0, "down.weight": 0}


def test_what_shares_a_weight_stays_whole() -> None:
    both = nn.ModuleDict({"x": linears((4, 6), (6, 4)), "y": linears((4, 6), (6, 4))})
    both["z"] = nn.Linear(4, 6)
    both["z"].weight = both["x"]["a"].weight
    assert propose(both) == [{"y.a": "colwise", "y.b": "rowwise"}]
    said = "model.plan.tensor: {} shares its weight with another module; leave it whole"
    for name in ("x.a", "z"):
        assert refusal(plan_search._check_linear, both, {"y.a": "colwise", name: "colwise"}) == said.format(
            name
        )
    plan_search._check_linear(both, {"y.a": "colwise", "x.b": "rowwise"})
    assert refusal(plan_search._check_linear, small(nn.Tanh()), {"1": "colwise"}) == (
        "model.plan.tensor: 1 is a Tanh, expected a linear module"
    )


def test_what_a_style_cuts_and_which_degrees_divide_it() -> None:
    module = nn.ModuleDict(
        {"up": nn.Linear(3, 8), "down": nn.Linear(6, 5), "bare": nn.Linear(3, 8, bias=False)}
    )
    styles = {"up": "colwise", "down": "rowwise", "bare": "colwise"}
    assert cuts_of(module, styles) == {"up.weight": 0, "up.bias": 0, "down.weight": 1, "bare.weight": 0}
    assert [divides(module, styles, n) for n in (1, 2, 3, 4, 6, 8)] == [True, True, *[False] * 4]
    assert [divides(module, {"up": "colwise"}, n) for n in (2, 3, 4, 8, 16)] == [
        True,
        False,
        True,
        True,
        False,
    ]


# --- trials of tensor parallelism ------------------------------------------------------------------------


class Told:
    """Stands in for `try_tensor`: what is wrong, by the first module and the degree."""

    def __init__(self, **wrong: str) -> None:
        self.wrong, self.asked = wrong, []  # type: ignore[var-annotated]

    def __call__(self, trial: Trial, styles: dict[str, str], degree: int) -> str:
        self.asked.append((",".join(styles), degree))
        return self.wrong.get(f"{next(iter(styles), '')}_{degree}".replace(".", ""), "")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(**wrong: str) -> Told:
        made = Told(**wrong)
        monkeypatch.setattr(plan_search, "try_tensor", made)
        return made

    return make


def two_kinds() -> Trial:
    parts = {"x": linears((4, 6), (6, 4)), "y": linears((4, 12), (12, 4))}
    return Trial(nn.ModuleDict(parts), TOKENS)


X, Y = {"x.a": "colwise", "x.b": "rowwise"}, {"y.a": "colwise", "y.b": "rowwise"}


def test_kinds_that_pass_alone_are_tried_together(told: Any) -> None:
    asked = told()
    found = find_tensor(two_kinds(), PlanConfig(), [2, 3, 4])
    assert found == TensorCuts(
        X | Y, cuts_of(two_kinds().module, X | Y), (2, 3), "expected one of 1, 2, 3: 4 does not divide x.a"
    )
    every = "x.a,x.b,y.a,y.b"
    assert asked.asked == [("x.a,x.b", 2), ("y.a,y.b", 2), (every, 2), (every, 3)]
    asked = told(xa_2="lies")
    found = find_tensor(two_kinds(), PlanConfig(), [2, 4])
    assert (found.styles, found.degrees) == (Y, (2, 4))
    assert found.why == "expected one of 1, 2, 4: others were not tried on the model"
    asked = told(xa_3="lies")
    found = find_tensor(two_kinds(), PlanConfig(), [4, 3])
    assert asked.asked[:2] == [("x.a,x.b", 3), ("y.a,y.b", 4)], "at the first degree that divides"
    assert (found.styles, found.degrees) == (Y, (4, 3))


def test_kinds_that_fail_together_give_fewer_degrees(told: Any) -> None:
    told(xa_3="lies")
    found = find_tensor(two_kinds(), PlanConfig(), [2, 3])
    assert (found.styles, found.degrees) == (X | Y, (2,))
    assert found.why == "expected one of 1, 2: cut over 3, the model lies"
    found = find_tensor(two_kinds(), PlanConfig(tensor=X), [5])
    assert (found.styles, found.degrees, found.why) == (X, (), "expected one of 1: 5 does not divide x.a")


def test_why_nothing_is_cut(told: Any) -> None:
    told(xa_2="lies", ya_2="errs")
    assert find_tensor(two_kinds(), PlanConfig(), [2]) == TensorCuts(
        why="cutting y.a and its like over 2, the model errs; use tp=1"
    )
    nothing = "no pair of linear layers to cut was found in it; use tp=1"
    assert find_tensor(Trial(small(), TOKENS), PlanConfig(), [2]) == TensorCuts(why=nothing)
    found = find_tensor(two_kinds(), PlanConfig(tensor={}), [2])
    assert found == TensorCuts(why="model.plan.tensor cuts nothing; use tp=1")


def test_a_users_plan_that_fails_is_refused(told: Any) -> None:
    trial, plan = two_kinds(), PlanConfig(tensor={"x.a": "colwise", "*.b": "rowwise"})
    told(xa_2="lies")
    assert refusal(find_tensor, trial, plan, [2]) == "model.plan.tensor: cut over 2, the model lies"
    told(xa_3="errs")
    assert refusal(find_tensor, trial, plan, [2, 3]) == "model.plan.tensor: cut over 3, the model errs"
    told()
    assert find_tensor(trial, plan, [2, 3]).styles == {"x.a": "colwise", "x.b": "rowwise", "y.b": "rowwise"}
    wrong = PlanConfig(tensor={"x": "colwise"})
    assert "x is a ModuleDict, expected a linear module" in refusal(find_tensor, trial, wrong, [2])


STYLES = {"1.0": "colwise", "1.2": "rowwise"}


@pytest.mark.parametrize("degree", [2, 3])
def test_a_good_cut_is_tried_with_the_modules_own_values(degree: int) -> None:
    trial = Trial(small(mlp(), nn.LayerNorm(4)), TOKENS)
    assert try_tensor(trial, STYLES, degree) == ""
    assert try_tensor(trial, STYLES, degree) == "", "gradients are not added up"
    groups = ThreadGroup.make(degree)
    parts = [plan_search._replica(trial.module, STYLES, group) for group in groups]
    whole = torch.cat([part.get_parameter("1.0.weight") for part in parts])
    assert torch.equal(whole, trial.module.get_parameter("1.0.weight"))


def test_what_is_wrong_with_a_bad_cut() -> None:
    softmax = small(nn.Sequential(nn.Linear(4, 12), nn.Softmax(-1), nn.Linear(12, 4)))
    assert try_tensor(Trial(softmax, TOKENS), STYLES, 2) == "gives other logits than uncut"
    head = Trial(small(), TOKENS)
    assert try_tensor(head, {"1": "colwise"}, 5) == "gives other logits than uncut", "of another shape"

    class Detached(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if self.weight.shape == (12, 4) else x.detach())

    detached = small(nn.Sequential(Detached(4, 12), nn.Tanh(), nn.Linear(12, 4)))
    assert try_tensor(Trial(detached, TOKENS), STYLES, 2) == "gives another gradient of 0.weight than uncut"


def test_one_ranks_error_is_the_one_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    leave = ThreadGroup.leave

    def noted(group: ThreadGroup) -> None:
        left.append(group.rank())
        leave(group)

    monkeypatch.setattr(ThreadGroup, "leave", noted)
    trial = Trial(small(mlp()), TOKENS)
    last = trial.module.get_parameter("1.0.weight")[-1].detach().clone()

    class Picky(nn.Tanh):
        def forward(self, x: Tensor) -> Tensor:
            if x.size(-1) == 6 and torch.equal(self.of.weight[-1], last):  # type: ignore[union-attr]
                raise ValueError("not\nme")
            return super().forward(x)

    trial.module[1][1] = Picky()  # type: ignore[index,operator]
    trial.module[1][1].__dict__["of"] = trial.module[1][0]  # type: ignore[index,union-attr]
    assert trial.expected[0].shape == (2, 4, 5)
    copied = plan_search._replica

    def replica(module: nn.Module, styles: dict[str, str], group: ThreadGroup) -> nn.Module:
        made = copied(module, styles, group)
        made[1][1].__dict__["of"] = made[1][0]  # type: ignore[index,union-attr]
        return made

    monkeypatch.setattr(plan_search, "_replica", replica)
    assert try_tensor(trial, STYLES, 2) == "raises ValueError: not me"
    assert set(left) == {0, 1}


def test_gradients_without_digits_are_compared_with_the_others() -> None:
    """The floor is 1e-4 of all gradients' norm."""
    floors: list[float] = []

    class Noted(Trial):
        @staticmethod
        def close(found: Tensor, expected: Tensor, floor: float = 0.0) -> bool:
            floors.append(floor)
            return True

    noted = Noted(small(mlp()), TOKENS)
    assert try_tensor(noted, STYLES, 2) == ""
    gradients = noted.expected[1]
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    each = [0.0, *[pytest.approx(1e-4 * norm)] * len(gradients)]
    assert floors == each * 2
