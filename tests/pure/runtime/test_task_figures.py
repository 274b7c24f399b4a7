"""What a run of tasks says of itself: losses before and after adaptation, and what a step predicts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.coordinator.messages import GenerationSpec
from picotron_ray.runtime import calibration_store
from picotron_ray.runtime.calibration_store import CalibrationStore
from picotron_ray.runtime.coordinator.records import Facts
from picotron_ray.runtime.coordinator.summary import loss_before, tokens_per_step
from picotron_ray.runtime.driver.console import beside_loss, summary_lines

SINUSOIDS, TINY = load_job("sinusoids", []), load_job("tiny", [])


def facts(page: dict[str, Any]) -> Facts:
    return cast(Facts, SimpleNamespace(newest=None, leader=lambda record: page))


def test_the_loss_before_adaptation_is_that_of_an_evaluation() -> None:
    assert loss_before(TINY, facts({"eval_step": 5, "eval_loss_before": 2.0})) == {}
    assert loss_before(SINUSOIDS, facts({"eval_step": 5, "eval_loss_before": 2.0})) == {
        "eval_loss_before": 2.0
    }
    for page in ({}, {"eval_step": -1, "eval_loss_before": 0.0}):
        assert loss_before(SINUSOIDS, facts(page)) == {"eval_loss_before": None}


def test_a_step_predicts_its_query_sets() -> None:
    assert tokens_per_step(TINY) == 8 * 32
    assert tokens_per_step(SINUSOIDS) == 16 * 10
    words = ["meta={strategy: maml, tasks: sequences, query: 3}"]
    assert tokens_per_step(load_job("tiny", words)) == 8 * 3 * 32
    assert tokens_per_step(load_job("tiny", ["meta={strategy: maml, tasks: 'my.own:tasks'}"])) == 0


def test_people_see_what_the_loss_is_to_be_compared_with() -> None:
    assert beside_loss({"baseline_loss": 2.5}) == "bigram 2.5000"
    assert beside_loss({"baseline_loss": 0.0, "eval_loss_before": 3.5}) == "before adaptation 3.5000"
    assert beside_loss({"eval_loss_before": None}) == "before adaptation -"
    summary = {
        "run": "a",
        "status": "finished",
        "steps": 3,
        "wall_s": 1.0,
        "eval_loss": 1.0,
        "eval_loss_before": 2.0,
    }
    assert any(
        line.startswith("eval_loss 1.0000  (before adaptation 2.0000)") for line in summary_lines(summary)
    )


def test_inner_steps_calibrate_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_store, "folder", lambda: tmp_path)
    CalibrationStore(SINUSOIDS, "cpu").add(cast(GenerationSpec, None), 1.0, None, 0)
    assert not list(tmp_path.iterdir())
