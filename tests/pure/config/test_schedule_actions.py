"""A pipeline schedule given as a list of actions: its mistakes, what follows from it, and who can run it."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import fitting_degrees, layout_problems
from picotron_ray.coordinator.codec import decode_spec, plain
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Source
from picotron_ray.errors import ConfigError, LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedule_actions import action_list
from picotron_ray.layout.schedule_rows import PipelineShape
from picotron_ray.layout.schedules import schedule_of
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.device_profile import CPU
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.search import choose_layout, layouts

ONE_F_ONE_B = ("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")
V_SPLIT = (
    "0F0 0F1 3F0 3I0 3F1 3I1 0I0 0I1 3W0 3W1 0W0 0W1",
    "1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1",
)
NEIGHBOURS = ("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", "2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1")


def raw(actions: Any, **layout: Any) -> dict[str, Any]:
    return {
        "chaos": [],
        "cluster": {"max_workers": 8},
        "data": {"global_batch": 8},
        "layout": {"schedule": "custom", "actions": actions, **layout},
    }


def job(actions: tuple[str, ...], **layout: Any) -> JobConfig:
    return parse_job(raw(list(actions), **layout))


# name → (rows, words that the line must contain)
MISTAKES: dict[str, tuple[list[str], str]] = {
    "no list": ([], "saw 0 rows, expected one for each of two or more pipeline ranks"),
    "one rank": (["0F0 0B0"], "saw 1 row, expected one for each of two"),
    "an empty row": (["0F0 0B0", " "], "row 1: saw no action"),
    "a kind that is none": (["0F0 0X0", "1F0 1B0"], "row 0: saw '0X0', expected stage, kind (F, B, I or W)"),
    "a message": (["0F0 0SEND_F0 0B0", "1F0 1B0"], "row 0: saw '0SEND_F0'"),
    "no micro-batch": (["0F0 0B0", "1F 1B0"], "row 1: saw '1F'"),
    "beyond all numbers": (["0F0 0B0", "1F12345678 1B0"], "row 1: saw '1F12345678'"),
    "a stage on two ranks": (["0F0 0B0", "1F0 1B0 0F1"], "row 1: saw 0F1, but stage 0 is in row 0"),
    "a stage left out": (["0F0 0B0", "2F0 2B0"], "saw stage 2 but no action of stage 1"),
    "unequal ranks": (
        ["0F0 1F0 1B0 0B0", "2F0 2B0"],
        "row 1: saw stage 2, expected as many per row as row 0",
    ),
    "twice forward": (["0F0 0F0 0B0", "1F0 1B0"], "row 0: saw 0F0 twice"),
    "no forward": (["0F0 0F1 0B0 0B1", "1F0 1B0 1B1"], "row 1: saw no 1F1"),
    "a micro-batch left out": (["0F0 0B0 0F2 0B2", "1F0 1B0 1F2 1B2"], "row 0: saw no 0F1"),
    "no backward": (["0F0 0F1 0B0", "1F0 1F1 1B0 1B1"], "row 0: saw 0F1 with no backward pass, expected 0B1"),
    "no weights": (["0F0 0I0", "1F0 1B0"], "row 0: saw 0F0 with 0I0, expected 0B0, or 0I0 and 0W0"),
    "weights alone": (["0F0 0W0", "1F0 1B0"], "row 0: saw 0F0 with 0W0"),
    "whole and split": (["0F0 0B0 0W0", "1F0 1B0"], "row 0: saw 0F0 with 0B0 and 0W0"),
    "backward before forward": (["0F0 0B0", "1B0 1F0"], "row 1: saw 1B0 before 1F0"),
    "weights before inputs": (["0F0 0W0 0I0", "1F0 1B0"], "row 0: saw 0W0 before 0I0"),
    "a deadlock": (
        ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
        "saw rows that wait for each other for ever (row 0 at 0B0 for 1B0, row 1 at 1F1 for 0F1)",
    ),
    "a row that waits for itself": (
        ["0F0 1F0 0B0 1B0", "2F0 3F0 3B0 2B0"],
        "saw rows that wait for each other for ever (row 0 at 0B0 for 1B0), expected another order",
    ),
    "a deadlock over split passes": (
        ["0F0 3F0 3I0 3W0 0I0 0W0", "1F0 2F0 1I0 1W0 2I0 2W0"],
        "(row 0 at 0I0 for 1I0, row 1 at 1I0 for 2I0)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_row_and_action(name: str) -> None:
    rows, words = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        parse_job(raw(rows))
    (line,) = caught.value.problems
    assert line.startswith("layout.actions: ")
    assert words in line


@pytest.mark.parametrize(
    ("layout", "key", "words"),
    [
        (
            {"pp": 4},
            "layout.pp",
            "saw 4, expected 2, the rows of layout.actions; nearest layouts that fit: dp=",
        ),
        ({"pp": 1}, "layout.pp", "saw 1, expected 2"),
        ({"virtual_stages": 1}, "layout.virtual_stages", "saw 1, expected 2 for schedule custom"),
        ({"micro_batch": 8}, "layout.actions", "custom needs 2, as many as layout.actions has"),
        ({"dp": 2, "zero": 3}, "layout.zero", "saw 3 with schedule custom, which splits the backward pass"),
        ({"recompute": "full"}, "layout.recompute", "saw full with schedule custom, which splits"),
        ({"schedule": "1f1b"}, "layout.actions", "saw 2 rows with layout.schedule=1f1b"),
        ({"actions": 3}, "layout.actions", "expected a list"),
    ],
    ids=str,
)
def test_a_list_and_other_keys(layout: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job(raw(V_SPLIT, **layout) if "actions" not in layout else raw(layout["actions"]))
    (line,) = caught.value.problems
    assert line.startswith(f"{key}: ")
    assert words in line


def test_a_list_that_does_not_split_takes_zero_3_recomputation_and_compiled_blocks() -> None:
    data = raw(list(ONE_F_ONE_B), zero=3, dp=2, recompute="full", micro_batch=1)
    assert parse_job({**data, "kernels": {"compile": True}}).layout.actions == ONE_F_ONE_B
    with pytest.raises(ConfigError, match=r"kernels\.compile: saw true with layout\.schedule=custom"):
        parse_job({**raw(list(V_SPLIT)), "kernels": {"compile": True}})


# --- what follows from a list ------------------------------------------------------------------------


FORWARD_FIRST = ("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3")


@pytest.mark.parametrize(("schedule", "rows"), [("1f1b", ONE_F_ONE_B), ("gpipe", FORWARD_FIRST)])
def test_a_list_that_spells_out_a_schedule_costs_as_much(schedule: str, rows: tuple[str, ...]) -> None:
    listed = action_list(rows)
    assert listed.placement == ((0,), (1,))
    shape, spelt = PipelineShape(ranks=2, stages_per_rank=1, micro_batches=4), schedule_of("custom", rows)
    assert spelt.waiting(shape) == schedule_of(schedule).waiting(shape) == 1.0
    assert list(listed.in_flight) == [schedule_of(schedule).in_flight(shape, rank) for rank in range(2)]
    config = job(rows)
    named = Layout(pp=2, schedule=schedule, micro_batch=2)
    own = Layout(pp=2, schedule="custom", micro_batch=2, placement=listed.placement)
    assert step_cost(config, own, CPU) == step_cost(config, named, CPU)
    assert memory_estimate(config, own) == memory_estimate(config, named)


def test_weight_gradients_that_come_late_fill_the_wait_and_keep_memory() -> None:
    unsplit = (" ".join(a for a in row.replace("I", "B").split() if "W" not in a) for row in V_SPLIT)
    late, whole = action_list(V_SPLIT), action_list(tuple(unsplit))
    assert (late.splits, whole.splits) == (True, False)
    assert late.placement == whole.placement == ((0, 3), (1, 2))
    assert late.waits == pytest.approx(1 / 3), "14 units, of 2 micro-batches' 12"
    assert whole.waits == pytest.approx(2 / 3), "16 units"
    assert late.in_flight == (2.0, 2.0)
    assert whole.in_flight == (1.5, 2.0)


def test_what_a_rank_keeps_grows_again_after_a_backward_pass() -> None:
    behind = "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    assert action_list(("0F0 0F1 0B0 0F2 0F3 0B1 0B2 0B3", behind)).in_flight == (3.0, 1.0)


def test_stages_beside_each_other_on_a_rank_send_nothing() -> None:
    config = job(NEIGHBOURS)
    layout = choose_layout(config, 2).layout
    assert layout.placement == ((0, 1), (2, 3))
    assert [layout.rank_stages(rank) for rank in range(2)] == [(0, 1), (2, 3)]
    assert (layout.last_stage_rank, layout.hops) == (1, 1)
    assert Layout(pp=2, virtual_stages=2, schedule="looped-bfs").hops == 2
    back = Layout(pp=2, virtual_stages=2, schedule="custom", placement=((1, 2), (0, 3)))
    assert (back.last_stage_rank, back.hops) == (1, 1)


def test_only_the_placement_travels() -> None:
    layout = choose_layout(job(V_SPLIT), 4).layout
    assert Layout.from_dict(layout.to_dict()) == layout
    spec = GenerationSpec(GenerationId(1, 1), (), layout, Source("init"), "test")
    written = plain(spec)
    assert decode_spec(written).layout == layout
    assert "F0" not in str(written)
    del written["layout"]["placement"]  # of a log that an older version wrote
    assert decode_spec(written).layout.placement == ()
    assert "custom-v2" in str(layout)


# --- who can run it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [ONE_F_ONE_B, V_SPLIT, NEIGHBOURS])
def test_every_layout_has_the_rows_and_the_micro_batches_of_the_list(rows: tuple[str, ...]) -> None:
    config, listed = job(rows), action_list(rows)
    found = layouts(config, 8)
    assert {layout.dp for layout in found} >= {1, 2}
    for layout in found:
        assert (layout.pp, layout.schedule, layout.placement) == (2, "custom", listed.placement)
        assert layout.micro_batches(8) == listed.micro_batches
        assert not layout_problems(config, layout)
    assert {degrees.pp for degrees in fitting_degrees(config, 8)} == {2}


def test_as_workers_go_it_keeps_the_list_or_says_what_is_missing() -> None:
    config = job(ONE_F_ONE_B)
    for workers in range(8, 1, -1):
        layout = choose_layout(config, workers).layout
        assert (layout.pp, layout.micro_batches(8)) == (2, 4)
    with pytest.raises(LayoutError, match="saw 1 workers, expected at least 2 for pp=2"):
        choose_layout(config, 1)


def test_a_micro_batch_that_is_given_fixes_the_replicas() -> None:
    config = job(ONE_F_ONE_B, micro_batch=1)
    assert {layout.dp for layout in layouts(config, 8)} == {2}
    with pytest.raises(ConfigError, match="8 micro-batches per step"):
        job(ONE_F_ONE_B, micro_batch=1, dp=1)


def test_a_batch_that_no_micro_batch_cuts_so_is_refused() -> None:
    data = raw(list(ONE_F_ONE_B))
    data["data"]["global_batch"] = 9  # of 3 rows: 3 micro-batches, of 2: 5
    with pytest.raises(ConfigError, match=r"saw 2 stages but 3 micro-batches .*; custom needs 4"):
        parse_job(data)


@pytest.mark.timeout(20)
def test_a_list_in_the_place_of_an_action_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"layout\.actions"):
        parse_job({"layout": {"actions": [[1]], "schedule": "custom"}})
