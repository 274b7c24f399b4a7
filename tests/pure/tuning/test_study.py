"""Studies without Ray: spaces, contradictions, fronts, and the command that an entry point brings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from picotron_ray.config.load import load_job
from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.search import choose_layout, layouts
from tuning import commands, spaces
from tuning.objectives import Objective, front, parse_objective, score
from tuning.parts import MemberRun, job_of_part
from tuning.points import Explored, fixed_points
from tuning.spaces import Choice, Range
from tuning.study_options import StudyOptions
from tuning.study_report import as_html

JOB = load_job("quickstart", ["chaos=[]", "optimizer.schedule.warmup_steps=0"])
ROOT = Path(__file__).parents[3]


def options(kind: str = "hparams", **values: Any) -> StudyOptions:
    return StudyOptions(name="s", kind=kind, **{"objective": "eval_loss", **values})


def row(name: str, status: str = "finished", **figures: Any) -> dict[str, Any]:
    empty = {"tokens_per_s": None, "eval_loss": None, "free_memory": None, "reason": ""}
    return {**empty, "trial": name, "status": status, "point": {"a": 1}, **figures}


@pytest.mark.parametrize(
    ("values", "words", "said"),
    [
        ({"search": "cma-es"}, ["data.global_batch=16,32"], "categories alone"),
        ({"search": "nsga-ii", "population": 9, "trials": 8}, [], "more than the 8 trials"),
        ({"search": "guess"}, [], "saw 'guess'"),
        ({"objective": "speed"}, [], "that trials report"),
        ({"objective": "loss,tokens_per_s", "search": "cma-es"}, [], "several figures"),
        ({"objective": "loss,tokens_per_s", "search": "pbt"}, [], "several figures, which pbt"),
        ({"search": "pbt", "scheduler": "asha"}, [], "take one of the two"),
        ({"search": "tpe", "scheduler": "pb2"}, [], "take one of the two"),
        ({"search": "pbt", "trials": 1}, [], "at least 2 for a population"),
        ({"search": "pbt", "steps": 1}, [], "no exchange"),
        ({"search": "pbt", "population": 17}, [], "more than the 16 trials"),
        ({"search": "pb2"}, ["data.global_batch=16,32"], "take pbt"),
        ({"search": "pbt"}, ["model.layers=2,4"], "cannot change in weights"),
        ({"scheduler": "asha", "objective": "wall_s"}, [], "too late for asha"),
        ({"interval": 5}, [], "without pbt or pb2"),
        ({}, ["model.nothing=1,2"], "expected a key of the config"),
        ({}, ["data.global_batch=2..1"], "expected key="),
        ({}, ["layout.tp=3,5"], "every point is infeasible"),
        ({}, ["data.global_batch=16,32", "accumulation=16,32", "layout.dp=4"], "every point is infeasible"),
    ],
)
def test_contradictions_are_one_line_each_before_ray(
    values: dict[str, Any], words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuning.study_options.find_spec", lambda name: True)  # the extra may not be there
    monkeypatch.setattr(commands, "connected", lambda *_: pytest.fail("Ray was started"))
    with pytest.raises(PicotronError, match=said) as caught:
        commands.run(JOB, options(**values), words, None, Console())
    assert len(str(caught.value).splitlines()) == 1


def test_a_searcher_that_is_not_installed_is_refused_before_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuning.study_options.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs optuna"):
        commands.run(JOB, options(search="tpe"), [], None, Console())


def test_layouts_come_in_the_planners_order_unless_asked_otherwise() -> None:
    space, known, seeds = commands.space_of(JOB, options("layout"), ["layout.recompute=none,full"])
    first = choose_layout(JOB, 4).layout
    assert seeds[0] == {"layout": str(first), "layout.recompute": "none"}
    assert {str(layout) for layout in layouts(JOB, 4)} <= set(known)
    point = {"layout": str(first), "layout.recompute": "full"}
    job = spaces.with_point(JOB, point, known)
    assert (job.layout.dp, job.layout.recompute) == (first.dp, "full")
    space, _, seeds = commands.space_of(JOB, options("layout", seeded=False), [])
    assert seeds == []
    assert list(space["layout"].values) == sorted(known)  # type: ignore[union-attr]


def test_a_space_holds_no_more_than_the_planners_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tuning.plan.MOST_LAYOUTS", 8)
    _, every, _ = commands.space_of(JOB, options("layout", trials=99), [])
    _, few, seeds = commands.space_of(JOB, options("layout", trials=4), [])
    kinds = {name.partition("-mb")[0] for name in few}
    assert len(kinds) == 8
    assert list(few)[:8] == list(every)[:8]
    assert [seed["layout"] for seed in seeds] == list(few)[:2]


def test_no_layout_of_a_space_needs_more_memory_than_a_device_has() -> None:
    job = load_job("quickstart", ["chaos=[]", "layout.memory_budget_gib=0.03"])
    _, known, _ = commands.space_of(job, options("layout"), [])
    needs = {name: memory_estimate(job, layout).total_bytes for name, layout in known.items()}
    assert max(needs.values()) <= 0.03 * 2**30
    _, roomy, _ = commands.space_of(JOB, options("layout"), [])
    assert len(known) < len(roomy)


def test_accumulation_divides_the_batch_or_is_refused() -> None:
    job = spaces.with_point(JOB, {"accumulation": 4, "data.global_batch": 32}, {})
    layout = choose_layout(job, 4).layout
    assert layout.micro_batches(32) == 4
    with pytest.raises(ConfigError, match="does not divide"):
        spaces.with_point(JOB, {"accumulation": 32, "data.global_batch": 16}, {})


def test_the_jobs_own_point_is_tried_first() -> None:
    _, _, seeds = commands.space_of(JOB, options(), [])
    assert seeds[0]["optimizer.learning_rate"] == JOB.optimizer.learning_rate
    assert not commands.space_of(JOB, options(), ["data.global_batch=64,128"])[2]


def test_a_front_keeps_what_no_other_beats() -> None:
    rows = [
        row("a", tokens_per_s=3.0, free_memory=0.1),
        row("b", tokens_per_s=1.0, free_memory=0.9),
        row("c", tokens_per_s=1.0, free_memory=0.5),
        row("d", status="failed"),
    ]
    goal = parse_objective("tokens_per_s,free_memory")
    assert [each["trial"] for each in front(rows, goal)] == ["a", "b"]
    assert front(rows, Objective(("eval_loss",))) == []
    page = as_html({"study": "s", "objective": list(goal.metrics), "best": rows[0], "front": ["a", "b"],
                    "trials": rows, "failed": 1})  # fmt: skip
    assert page.count("<polyline") == page.count("<circle") == 3
    assert "http" not in page


def test_a_diverged_trial_is_no_best_one() -> None:
    rows = [row("a", eval_loss=float("nan")), row("b", eval_loss=2.0), row("c", eval_loss=None)]
    assert [each["trial"] for each in front(rows, Objective(("eval_loss",)))] == ["b"]


def test_words_stand_for_the_axes_that_a_layout_study_knows() -> None:
    words = ["micro-batch", "recompute", "schedule", "communication", "kernels"]
    space, known, seeds = commands.space_of(JOB, options("layout"), words)
    assert set(space) > {
        "layout.recompute",
        "layout.schedule",
        "comm.gradients",
        "comm.topology",
        "kernels.loss",
    }
    points = fixed_points(space, options("layout"), seeds, lambda point: feasible(point, known))
    assert points is not None
    assert len(points) == 16
    for point in points:
        spaces.with_point(JOB, point, known)  # raises where it is infeasible
    first = {"layout": "dp4-tp1-pp1-mb8", "layout.schedule": "gpipe"}
    with pytest.raises(ConfigError, match="changes nothing"):
        spaces.with_point(JOB, first, known)


def test_own_algorithms_of_sums_are_no_axis_on_cuda_or_with_one_replica() -> None:
    assert "comm.topology" not in spaces.named_axes(JOB, "cuda")["communication"]
    _, known, _ = commands.space_of(JOB, options("layout"), ["communication"])
    one = next(name for name, layout in known.items() if layout.dp * layout.cp == 1)
    with pytest.raises(ConfigError, match="topology: saw ring, which changes nothing"):
        spaces.with_point(JOB, {"layout": one, "comm.topology": "ring"}, known)


def feasible(point: dict[str, Any], known: dict[str, Any]) -> bool:
    return not spaces.why_not(JOB, point, known)


def test_hyperparameters_have_the_ranges_that_are_stated() -> None:
    space, _, _ = commands.space_of(JOB, options(steps=50_000), [])
    assert space["optimizer.learning_rate"] == Range(1e-6, 1e-2, log=True)
    assert space["data.global_batch"] == Choice((16, 32, 64, 128, 256))
    assert space["accumulation"] == Choice((1, 2, 4, 8, 16, 32))
    assert space["optimizer.schedule.warmup_steps"] == Range(0, 10_000, whole=True)
    assert space["optimizer.weight_decay"] == Range(0.0, 0.1)
    assert space["data.sequence_length"] == Choice((128, 64, 256))


def test_explored_values_stay_in_their_axes() -> None:
    explored = Explored({"a": Range(0, 10, whole=True), "b": Range(1e-4, 1e-2, log=True)})
    assert explored({"a": 7.6, "b": 1.0, "c": "x"}) == {"a": 8, "b": 1e-2, "c": "x"}


def test_a_member_that_takes_over_trains_the_steps_that_are_left() -> None:
    part = MemberRun("s.t1", "s.t1-abc", before_steps=12, origin_run="s.t2", origin_step=12)
    job = JOB.model_copy(update={"name": "s.t1", "steps": 40})
    found = job_of_part(job, part, 4)
    assert (found.name, found.steps, found.seed) == ("s.t1-abc", 28, JOB.seed + 12)
    assert (found.init_from.run, found.init_from.step, found.init_from.optimizer_state) == ("s.t2", 12, True)
    assert found.checkpoint.interval_steps == found.evaluate.interval_steps == 4
    assert found.checkpoint.keep_last >= 10, "a commit that another may still take over"


def test_a_score_weighs_speed_memory_and_utilisation() -> None:
    figures = {"tokens_per_s": 100.0, "free_memory": 1.0, "utilisation": 1.0}
    assert score(figures, 100.0) == pytest.approx(0.5 * 0.5 + 0.3 + 0.2)
    assert score({}, 100.0) == 0


def test_an_entry_point_brings_the_command(tmp_path: Path) -> None:
    info = tmp_path / "sweeps-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sweeps\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[picotron_ray.commands]\ntune = tuning.commands:tune\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "picotron_ray.cli", "tune", "layout", "quickstart", "--search", "guess"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "saw 'guess'" in done.stderr
