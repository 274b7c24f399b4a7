"""Plans on several cards: which layouts an expert would take, figures with their sources, the doors."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from picotron_ray.cli import app
from picotron_ray.commands.plan import shape_of
from picotron_ray.errors import ConfigError
from picotron_ray.planner.card_plans import BY_GB, CardPlan, card_lines, card_plan, cards_of, rates

NODE = 8


def planned(model: str, words: str) -> CardPlan:
    (cards,) = cards_of(words)
    return card_plan(model, shape_of(model, [], cards.number, "cuda"), cards)


@pytest.mark.parametrize(
    ("model", "words", "tp"),
    [("llama-3-8b", "8x80", 1), ("llama-3-8b", "64x80", 1), ("llama-3-70b", "64x80", 1)],
)
def test_layouts_are_an_experts(model: str, words: str, tp: int) -> None:
    """No card idle, tensor parallelism within a node and no wider than memory asks for, the state cut."""
    found = planned(model, words)
    assert found.idle == 0
    assert found.values["tp"] == tp <= NODE
    assert found.values["zero"] >= 2
    assert found.values["pp"] == 1
    assert 0.8 * found.budget_bytes < found.predicted_peak_bytes <= found.budget_bytes
    assert 0.35 < found.mfu < 0.65
    assert found.mfu_range[0] < found.mfu < found.mfu_range[1]


def test_a_model_that_does_not_fit_says_what_would() -> None:
    found = planned("llama-3-70b", "8x80")
    assert found.layout == ""
    assert "24 h100-80g would do" in found.refused
    assert any("none: layout: saw room for" in line for line in card_lines([found]))


def test_a_dry_run_is_held_beside_what_was_predicted() -> None:
    proof = {
        "micro_batches": 2,
        "of_micro_batches": 16,
        "ranks": [{"rank": 0, "predicted_peak": 6e10, "traced_peak": 5e10, "error": 0.2}],
    }
    (cards,) = cards_of("8x80")
    found = card_plan("llama-3-8b", shape_of("llama-3-8b", [], 8, "cuda"), cards, lambda plan: proof)
    lines = list(card_lines([found]))
    assert "dry run of 2 of 16 micro-batches:" in "\n".join(lines)
    assert lines[4].endswith("pp rank 0: 60 GB predicted / 50 GB traced = 1.200")


def test_each_rate_has_its_source() -> None:
    for one in rates(list(BY_GB.values())):
        assert "data sheet" in one["peak_source"]
        assert "published runs" in one["share_source"]
        assert all(rate["peak"] > 0 and 0 < rate["share"] <= 1 for rate in one["rates"].values())


@pytest.mark.parametrize("words", ["8", "x80", "8x81", "0x80", "8x80,", "-8x80", "8xh100"])
def test_cards_that_are_none_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=r"--cards: saw .*, expected a number, x, and GB"):
        cards_of(words)


def test_the_door_prints_rows_and_json() -> None:
    done = CliRunner().invoke(app, ["plan", "tiny", "--cards", "1x40,8x80"])
    assert done.exit_code == 0
    assert done.stdout.startswith("tiny: estimates, no card was measured\n")
    assert "8 x h100-80g" in done.stdout
    done = CliRunner().invoke(app, ["plan", "llama-3-8b", "--cards", "8x80", "--json", "-"])
    value = json.loads(done.stdout)
    assert value["estimate"] is True
    (row,) = value["plans"]
    assert row["values"]["dp"] == 8
    assert value["rates"][0]["hardware"] == "h100-80g"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--recipes", "tiny"], "plan --recipes: saw tiny with it"),
        (["--cards", "8x80"], "plan --recipes: saw no config"),
        (["tiny", "--cards", "8x80", "--gpus", "2"], "plan --cards: saw --gpus, which is of one plan"),
        (["tiny", "--cards", "8x80", "--for", "cluster"], "plan --cards: saw --for"),
        (["--validate", "--recipes"], "plan --validate: saw --recipes"),
    ],
)
def test_options_of_one_plan_are_refused(words: list[str], line: str) -> None:
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {line}")
