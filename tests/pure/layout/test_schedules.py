"""The table of pipeline schedules: entries agree with what they run, and all of the package reads them."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

import picotron_ray
from picotron_ray.config.json_schema import job_schema
from picotron_ray.config.load import parse_job
from picotron_ray.config.resume import changes
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.coordinator.codec import decode_spec, plain
from picotron_ray.coordinator.messages import Command, Event, GenerationId, GenerationSpec, Source
from picotron_ray.coordinator.plan_book import no_default
from picotron_ray.coordinator.replay import event_line, header_line, replay
from picotron_ray.errors import ConfigError, LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedule_actions import ActionList, action_list
from picotron_ray.layout.schedule_rows import PipelineShape
from picotron_ray.layout.schedules import SCHEDULES, PipelineSchedule, canonical_name, schedule_names
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.device_profile import CPU
from picotron_ray.planner.memory import memory_estimate
from tests.support.house.doc_examples import defined
from tests.support.runs.coordinator_world import World, choose_dp

EAGER: PipelineSchedule = defined("add-a-schedule.md")["EAGER_1F1B"]
WITH_ROWS = [*(entry for entry in SCHEDULES.values() if entry.rows), EAGER]
OF_ONE_STAGE = [entry for entry in WITH_ROWS if entry.stages_per_rank[0] == 1]
OF_SEVERAL = [entry for entry in WITH_ROWS if entry.stages_per_rank[0] > 1]
SHAPES = [PipelineShape(ranks, 1, count) for ranks in (2, 3, 4) for count in (1, 2, 3, 5, 8, 13)]
LOOPED = [
    PipelineShape(ranks, stages, rounds * ranks)
    for ranks in (2, 3, 4)
    for stages in (2, 3)
    for rounds in (2, 3)
]


def listed_rows(entry: PipelineSchedule, shape: PipelineShape) -> ActionList:
    assert entry.rows is not None
    return action_list(tuple(" ".join(map(str, row)) for row in entry.rows(shape)))


@pytest.mark.parametrize("entry", OF_ONE_STAGE, ids=lambda entry: entry.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_an_entry_says_is_what_its_rows_come_to(entry: PipelineSchedule, shape: PipelineShape) -> None:
    if entry.problem(shape):
        return
    listed = listed_rows(entry, shape)
    assert listed.micro_batches == shape.micro_batches
    assert listed.splits == entry.splits_backward
    assert [entry.rank_stages(shape.ranks, 1, rank) for rank in range(shape.ranks)] == list(listed.placement)
    assert [entry.in_flight(shape, rank) for rank in range(shape.ranks)] == list(listed.in_flight)
    assert entry.waiting(shape) == pytest.approx(listed.waits)


@pytest.mark.parametrize("entry", OF_SEVERAL, ids=lambda entry: entry.name)
def test_waits_and_kept_activations_are_those_of_the_rows(entry: PipelineSchedule) -> None:
    least, most = entry.stages_per_rank
    shapes = [s for s in LOOPED if least <= s.stages_per_rank <= most and not entry.problem(s)]
    assert len(shapes) >= 5
    for shape in shapes:
        listed = listed_rows(entry, shape)
        held = [entry.rank_stages(shape.ranks, shape.stages_per_rank, rank) for rank in range(shape.ranks)]
        assert (listed.micro_batches, listed.splits) == (shape.micro_batches, entry.splits_backward)
        assert held == list(listed.placement)
        assert entry.waiting(shape) == pytest.approx(listed.waits), shape
        estimated = [entry.in_flight(shape, rank) for rank in range(shape.ranks)]
        early = entry.splits_backward and most > 2  # its early backward passes are not counted
        assert max(listed.in_flight) <= max(estimated) <= max(listed.in_flight) + 1.5 * early, shape
        assert all(kept <= said for kept, said in zip(listed.in_flight, estimated, strict=True)), shape


SPLITTING = ("interleaved-zero-bubble", "zbv", "dualpipev")
# name → (stages per rank that it takes, of 1 to 4; by PipelineShape(4, 2, 8): waiting, in flight; stages of
# the ranks; rank of the last stage). Sources: the module's docstring.
LOOP, V = [(0, 4), (1, 5), (2, 6), (3, 7)], [(0, 7), (1, 6), (2, 5), (3, 4)]
OF_TORCH = {
    "looped-bfs": ([2, 3, 4], 3 / 2, 8, LOOP, 3),
    "interleaved-1f1b": ([2, 3, 4], 3 / 2, 4 + 3 / 2, LOOP, 3),
    "interleaved-zero-bubble": ([2, 3, 4], 1 / 2, 4 + 3 / 2, LOOP, 3),
    "zbv": ([2], 1 / 2, 4, V, 0),
    "dualpipev": ([2], 1 / 2, 4.5, V, 0),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_an_entry_of_torchs_says_what_its_paper_says(name: str) -> None:
    taken, waiting, in_flight, stages, last = OF_TORCH[name]
    entry, shape = SCHEDULES[name], PipelineShape(ranks=4, stages_per_rank=2, micro_batches=8)
    assert shape.stages == 8
    assert entry.waiting(shape) == pytest.approx(waiting)
    assert [entry.in_flight(shape, rank) for rank in range(4)] == [in_flight] * 4
    assert [entry.in_flight(shape._replace(micro_batches=2), rank) for rank in range(4)] == [2] * 4
    assert [entry.rank_stages(4, 2, rank) for rank in range(4)] == stages
    assert entry.last_stage_rank(4, 2) == last
    assert [entry.rank_stages(3, 1, rank) for rank in range(3)] == [(0,), (1,), (2,)]
    assert entry.last_stage_rank(3, 1) == 2
    least, most = entry.stages_per_rank
    assert [number for number in range(1, 5) if least <= number <= most] == taken


def test_backward_passes_are_split_by_the_zero_bubble_alone() -> None:
    assert tuple(name for name, entry in SCHEDULES.items() if entry.splits_backward) == SPLITTING


@pytest.mark.parametrize("name", ["1f1b", "dualpipev"])
def test_some_need_one_micro_batch_per_stage(name: str) -> None:
    problem = SCHEDULES[name].problem
    assert [problem(PipelineShape(3, 2, count)) for count in (5, 6, 7)] == [
        "needs one micro-batch per stage, 6 or more", "", "",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zero-bubble"])
def test_interleaving_needs_whole_rounds(name: str) -> None:
    """As many rounds as fit: 1 of 3 to 7 micro-batches over 4 ranks, 2 of 8 to 11, 3 of 12 to 15."""
    problem = SCHEDULES[name].problem
    found = {count: problem(PipelineShape(4, 2, count)) for count in (1, 3, 7, 8, 9, 10, 11, 12, 13, 14, 15)}
    text = "needs a multiple of {} micro-batches (4 or a little more per round)"
    refused = {9: 2, 11: 2, 13: 3, 14: 3}
    assert {count: said for count, said in found.items() if said} == {
        count: text.format(rounds) for count, rounds in refused.items()
    }


def test_an_entry_runs_in_one_way() -> None:
    with pytest.raises(LayoutError, match="schedule none: saw neither of rows and with_actions"):
        PipelineSchedule("none")
    with pytest.raises(LayoutError, match="schedule two: saw both of"):
        PipelineSchedule("two", rows=EAGER.rows, with_actions=lambda actions: EAGER)


def test_names_and_aliases_name_one_entry_each() -> None:
    assert len(set(schedule_names())) == len(schedule_names())
    assert [canonical_name(name) for name in SCHEDULES] == list(SCHEDULES)


def test_nothing_else_in_the_package_names_a_schedule() -> None:
    """But for the default of the two fields that hold one, which must be some name."""
    root = Path(picotron_ray.__file__).parent
    named = [
        f"{path.relative_to(root)}: {node.value}"
        for path in root.rglob("*.py")
        if path != root / "layout" / "schedules.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in set(schedule_names()) - {"custom"}
    ]
    assert sorted(named) == ["config/schema/compute.py: 1f1b", "layout/layout.py: 1f1b"]
    compared = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and ast.unparse(node.left).endswith("schedule")
        and any(isinstance(getattr(other, "value", None), str) for other in node.comparators)
    ]
    assert compared == []


def test_an_added_entry_is_known_to_config_planner_and_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {"chaos": [], "layout": {"schedule": EAGER.name, "pp": 4, "dp": 1}, "cluster": {"max_workers": 4}}
    with pytest.raises(ConfigError, match=r"layout\.schedule: saw 'eager-1f1b', expected one of gpipe, 1f1b"):
        parse_job(raw)
    monkeypatch.setitem(SCHEDULES, EAGER.name, EAGER)
    job = parse_job(raw)
    eager, plain_one = (Layout(pp=4, schedule=name) for name in (EAGER.name, "1f1b"))
    assert layout_problems(job, eager) == []
    assert step_cost(job, eager, CPU) == step_cost(job, plain_one, CPU)
    assert memory_estimate(job, eager).total_bytes > memory_estimate(job, plain_one).total_bytes
    assert EAGER.name in json.dumps(job_schema())


# --- a schedule's former name ------------------------------------------------------------------------


def test_a_config_may_say_the_former_name() -> None:
    raw = {"layout": {"schedule": "afab"}}
    assert parse_job(raw) == parse_job({"layout": {"schedule": "gpipe"}})
    assert JobConfig.model_validate(raw).layout.schedule == "gpipe"
    assert "afab" in json.dumps(job_schema())
    with pytest.raises(ConfigError, match=r"saw 'afap', expected one of .*, did you mean afab\?"):
        parse_job({"layout": {"schedule": "afap"}})


def test_a_run_of_the_former_name_resumes_unchanged() -> None:
    job = parse_job({"layout": {"schedule": "gpipe"}})
    saved = json.loads(json.dumps(job.model_dump(mode="json")))
    saved["layout"]["schedule"] = "afab"
    assert changes(saved, job) == []
    assert changes(saved, parse_job({})) == [("layout.schedule", "gpipe", "1f1b")]


def test_manifests_and_logs_of_the_former_name_give_equal_layouts() -> None:
    layout = Layout(pp=2, schedule="gpipe")
    former = {**layout.to_dict(), "schedule": "afab"}
    assert Layout.from_dict(former) == layout == Layout(pp=2, schedule="afab")
    assert layout.to_dict()["schedule"] == "gpipe"
    spec = GenerationSpec(GenerationId(1, 1), (), layout, Source("init"), "start")
    assert decode_spec({**plain(spec), "layout": former}) == spec
    with pytest.raises(LayoutError, match=r"layout\.schedule: saw 'none', expected one of"):
        Layout.from_dict({**former, "schedule": "none"})


def test_an_event_log_of_the_former_name_replays() -> None:
    job = parse_job({"chaos": [], "layout": {"schedule": "gpipe"}})
    choice = replace(choose_dp(4), layout=Layout(dp=2, pp=2, schedule="gpipe"))
    lines = [header_line(job, {})]

    class Recorder(World):
        def send(self, *events: Event) -> list[Command]:
            out: list[Command] = []
            for event in events:
                commands = super().send(event)
                lines.append(event_line(self.now, event, commands))
                out += commands
            return out

    Recorder(config=job, choose=lambda *question: choice).up(("a", 4))
    former = [line.replace("gpipe", "afab") for line in lines]
    assert any("-afab-mb1" in line for line in former)
    assert replay(former, lambda job, facts: (lambda *question: choice, no_default)).difference is None
