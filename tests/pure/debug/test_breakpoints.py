"""Places and conditions of breakpoints: what is refused, in one line, and what holds."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.debug.breakpoints import Breakpoint, check_place, line_problem
from picotron_ray.debug.condition import MOST_LETTERS, BreakCondition
from picotron_ray.debug.tensor_figures import EDGES, histogram_text
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import breakpoints as driver

KNOWN = {"loss": 9.5, "grad_norm": 2.0, "step": 7.0, "rank": 0.0}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("loss > 9", True),
        ("loss > 9 and rank == 1", False),
        ("not loss > 9 or step % 2 == 1", True),
        ("1 < grad_norm <= 2", True),
        ("abs(-loss) / grad_norm > 4.5", True),
        ("isnan(eval_loss)", True),
        ("eval_loss > 0", False),
        ("eval_loss != 0", False),
        ("loss / rank > 0", False),
        ("eval_loss", False),
    ],
)
def test_a_condition_holds_for_figures(text: str, holds: bool) -> None:
    assert BreakCondition(text).holds(KNOWN) is holds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("los > 9", "saw 'los' in 'los > 9', which is no figure; nearest: loss"),
        ("__import__('os').system('true')", "expected numbers, figures"),
        ("loss.__class__", "and no attribute"),
        ("loss ** 9 > 1", "and no pow"),
        ("(lambda: loss)()", "expected numbers, figures"),
        ("[loss for loss in (1,)]", "and no listcomp"),
        ("loss == 'x'", "and no constant"),
        ("loss > 1e999", "and no constant"),
        ("9 > 8", "expected a figure in it"),
        ("loss >", "expected an expression such as 'loss > 9'"),
        ("loss + " * 60 + "loss", "expected at most"),
        ("-" * 150 + "loss", "expected at most 100 parts"),
    ],
)
def test_what_is_no_condition_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"^--if: ") as caught:
        BreakCondition(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(text) <= MOST_LETTERS or "letters" in str(caught.value)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("phase:redce", "'redce', which is no phase; nearest: reduce"),
        ("phase:idle", "'idle', which is no part of training"),
        ("train/loop.py", "expected FILE.py:LINE or phase:NAME"),
        ("train/loop.py:0", "expected FILE.py:LINE or phase:NAME"),
    ],
)
def test_a_place_that_is_none_is_refused(place: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_place(place)
    assert said in str(caught.value)


def test_a_breakpoint_is_read_back_and_looks_at_its_ranks() -> None:
    one = Breakpoint(3, "train/loop.py:12", "loss > 9", (0, 3))
    assert Breakpoint.read(one.plain()) == one
    assert str(one) == "3 train/loop.py:12 if loss > 9 on ranks 0,3"
    assert (one.phase, one.line) == ("", ("train/loop.py", 12))
    assert [one.concerns(rank) for rank in (0, 1, 3)] == [True, False, True]
    one.enabled = False
    assert not one.concerns(0)
    for timeout_s in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="--timeout-s"):
            Breakpoint(1, "phase:reduce", timeout_s=timeout_s).check()


def test_a_name_that_no_tensor_has_is_told_how_names_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told ``nearest: norm.weight`` alone."""
    answers = {0: {"tensors": [], "near": ["norm.weight"], "begin": ["embed", "norm", "exp_avg/"]}}
    answers[1] = {"tensors": [], "near": [], "begin": ["layers", "norm"]}
    tools: Any = SimpleNamespace(
        world_size=2, ranks=lambda text, default: tuple(default), all_of=lambda ranks, order: answers
    )
    monkeypatch.setattr(driver, "RunTools", lambda run: tools)
    monkeypatch.setattr(driver, "listed_on", lambda tools: {"hits": []})
    with pytest.raises(ConfigError) as refused:
        driver.inspect("night", "model", "nosuch", "", True)
    assert str(refused.value) == (
        "inspect model: saw 'nosuch'; nearest: norm.weight; names begin with embed, norm, exp_avg/, layers"
        " (a moment's is MOMENT/NAME)"
    )


def test_the_page_describes_the_buckets_that_are_printed() -> None:
    page = (Path(__file__).parents[3] / "docs" / "breakpoints.md").read_text()
    histogram = [0] * (len(EDGES) + 1)
    for value, count in ((-0.5, 1209), (0.0, 2), (5e-8, 3), (0.5, 1224), (-1e9, 1), (1e9, 1)):
        histogram[sum(value > edge for edge in EDGES)] = count
    *said, last = histogram_text(histogram).split(", ")
    assert (said[0], last) == ("1 to -1e+04", "1 from 1e+04")
    for words in (*said[1:], "to -1e+04", "from 1e+04"):
        assert f"`{words}`" in page


def test_a_line_that_nothing_runs_names_the_nearest() -> None:
    assert line_problem("a.py", 5, {4, 9}).endswith("nearest line that is: 4")
    assert line_problem("a.py", 4, {4, 9}) == ""
    assert line_problem("a.py", 4, set()) == "a.py has no function"
