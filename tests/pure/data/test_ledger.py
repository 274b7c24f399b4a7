"""The ledger's checker: silent on a right ledger, and it finds and names what was planted."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest

from picotron_ray.data import ledger_diagnosis
from picotron_ray.data.batch import make_batch, token_digest
from picotron_ray.data.ledger import LedgerReport, check
from picotron_ray.data.ledger_diagnosis import _deviations, diagnose
from picotron_ray.data.ledger_line import line_rows
from picotron_ray.data.plan.sample_plan import Feed, UniformPlan
from picotron_ray.data.samples import Dataset
from picotron_ray.data.shuffle import samples_between
from picotron_ray.layout.layout import Layout

SEQ, BATCH, SEED, STEPS = 6, 10, 3, 12
DATA = Dataset(np.random.default_rng(1).integers(0, 256, 37 * SEQ + 1).astype("<u2"), SEQ)


def line(step: int, dp: int = 3, term: int = 1, n: int = 1) -> dict[str, Any]:
    """The line that a right run of ``dp`` replicas writes, its digests from the batches themselves."""
    parts = [make_batch(Feed.uniform(DATA, SEED, BATCH), Layout(dp=dp), i, step) for i in range(dp)]
    return {
        "step": step,
        "term": term,
        "n": n,
        "samples": [(step - 1) * BATCH, step * BATCH],
        "rows": [[*part.rows, part.digest.hex()] for part in parts],
        "tokens": BATCH * SEQ,
        "loss": 2.5,
    }


def fed(numbers: list[int]) -> str:
    """The digest of a replica that fed these global samples."""
    samples = [int(samples_between(SEED, number, number + 1, DATA.samples)[0]) for number in numbers]
    return token_digest(DATA.rows(np.array(samples, np.int64))).hex()


def run(lines: list[Any], **more: Any) -> LedgerReport:
    return check(lines, UniformPlan(SEED, BATCH, DATA.samples), DATA, **more)


@pytest.fixture
def ledger() -> list[dict[str, Any]]:
    return [line(step) for step in range(1, STEPS + 1)]


def test_right_ledger_over_several_epochs(ledger: list[dict[str, Any]]) -> None:
    report = run(ledger, last_step=STEPS)
    assert report == LedgerReport(STEPS, STEPS * BATCH, 0, 0, 0, ())
    assert report.ok
    assert run([json.dumps(entry) for entry in reversed(ledger)]) == report
    assert 3 * DATA.samples < STEPS * BATCH


def test_layouts_may_change_from_step_to_step() -> None:
    lines = [line(step, dp=1 + step % 5, n=step) for step in range(1, STEPS + 1)]
    assert run(lines, resumes=[(1, step, step - 1) for step in range(1, STEPS + 1)]).ok


def test_idle_replicas_have_no_rows(ledger: list[dict[str, Any]]) -> None:
    ledger[4] = line(5, dp=12)
    assert [row[2] for row in ledger[4]["rows"][-2:]] != ["", ""]
    assert run(ledger).ok


# rows of step 5 on replica 1 are samples 44, 45, 46 of 40..50
@pytest.mark.parametrize(
    ("numbers", "words", "lost", "repeated"),
    [
        ([44, 46, 47], "skipped sample 45", 1, 1),  # every later row moves up by one
        ([44, 46], "skipped sample 45", 1, 0),  # one row fewer
        ([44, 44, 45], "fed sample 44 twice", 1, 1),
        ([44, 45, 46, 46], "fed sample 46 twice", 0, 1),
        ([45, 44, 46], "fed samples 44 and 45 in each other's place", 0, 0),
        ([46, 45, 44], "fed samples 44 and 46 in each other's place", 0, 0),
        ([44, 41, 46], "fed sample 41 in the place of 45", 1, 1),
        ([44, 38, 46], "fed sample 38 in the place of 45", 1, 1),
        ([44, 56, 46], "fed sample 56 in the place of 45", 1, 1),
        ([1, 2, 3], "fed other tokens than rows 44..47 hold", 3, 0),
        ([], "fed other tokens than rows 44..47 hold", 3, 0),
    ],
)
def test_planted_slips_of_one_rank_are_named(
    ledger: list[dict[str, Any]], numbers: list[int], words: str, lost: int, repeated: int
) -> None:
    assert ledger[4]["rows"][1] == [44, 47, fed([44, 45, 46])]
    ledger[4]["rows"][1][2] = fed(numbers)
    report = run(ledger)
    assert report.wrong == (f"step 5 of generation 1.1, replica 1 {words}",)
    assert (report.lost, report.repeated, report.samples) == (lost, repeated, STEPS * BATCH - lost)
    assert not report.ok


# --- many replicas share a row -------------------------------------------------------------------------


MANY = Layout(dp=40)


def wide(
    step: int, fed_by: dict[int, list[int]] | None = None, layout: Layout = MANY, batch: int = 90
) -> dict[str, Any]:
    """A line of many replicas; ``fed_by``: what one of them fed instead of its rows."""
    parts = [make_batch(Feed.uniform(DATA, SEED, batch), layout, i, step) for i in range(layout.dp)]
    rows = [(*part.rows, part.digest.hex()) for part in parts]
    for replica, numbers in (fed_by or {}).items():
        rows[replica] = (*rows[replica][:2], fed(numbers))
    samples = [(step - 1) * batch, step * batch]
    return {**line(step), "samples": samples, "rows": line_rows(rows), "tokens": batch * SEQ}


def check_wide(lines: list[dict[str, Any]]) -> LedgerReport:
    return check(lines, UniformPlan(SEED, 90, DATA.samples), DATA)


def test_a_line_has_the_same_length_at_any_size() -> None:
    sizes = {}
    for dp in (16, 17, 1024):
        rows = line_rows([(at, at + 1, f"{at:032x}") for at in range(dp)])
        assert (rows[0][0], rows[-1][1]) == (0, dp)
        sizes[dp] = len(json.dumps(rows))
    assert sizes[1024] < 1.2 * sizes[16] + 16 * 8
    assert line_rows([(0, 2, "a" * 32)]) == [[0, 2, "a" * 32]], "as it always was"


def test_replicas_that_share_a_row_are_proven_together() -> None:
    report = check_wide([wide(step) for step in range(1, 4)])
    assert report == LedgerReport(3, 270, 0, 0, 0, ())


@pytest.mark.parametrize(
    ("numbers", "words", "lost", "repeated"),
    [
        ([93, 95], "skipped sample 94", 1, 0),
        ([93, 93, 94], "fed sample 93 twice", 1, 1),
        ([94, 93, 95], "fed samples 93 and 94 in each other's place", 0, 0),
        ([93, 94, 10], "fed sample 10 in the place of 95", 1, 1),
        ([1, 2, 3], "fed other tokens than rows 90..99 hold", 9, 0),
    ],
)
def test_a_slip_of_one_of_many_replicas_is_named(
    numbers: list[int], words: str, lost: int, repeated: int
) -> None:
    assert wide(2)["rows"][0][:2] + wide(2)["rows"][0][3:] == [90, 99, 3]
    report = check_wide([wide(1), wide(2, {1: numbers})])
    assert report.wrong == (f"step 2 of generation 1.1, replicas 0 to 2 {words}",)
    assert (report.lost, report.repeated) == (lost, repeated)


UNEVEN = Layout(dp=40, replica_rows=(*[3] * 10, 0, *[1] * 18, *[2] * 10, 22))


def test_uneven_replicas_that_share_a_row_are_proven_together() -> None:
    assert wide(1, layout=UNEVEN)["rows"][3][3:] == [3, [[3, 1], [0, 1], [1, 1]]]
    lines = [wide(1), wide(2, layout=UNEVEN), wide(3)]
    assert check_wide(lines) == LedgerReport(3, 270, 0, 0, 0, ())
    report = check_wide([wide(1), wide(2, {1: [93, 93, 94]}, UNEVEN)])
    assert report.wrong == ("step 2 of generation 1.1, replicas 0 to 2 fed sample 93 twice",)
    moved = wide(1, layout=UNEVEN)
    moved["rows"][3][4] = [[2, 1], [1, 1], [1, 1]]  # as many, elsewhere
    assert "fed other tokens than rows 27..31 hold" in check_wide([moved]).wrong[0]


@pytest.mark.parametrize("runs", [[[3, 2]], [[3, 4]], [[3, 0], [3, 3]], [[-1, 3]], [3], [["3", 3]], 7])
def test_rows_of_replicas_that_are_not_theirs_are_refused(runs: Any) -> None:
    bad = wide(1, layout=UNEVEN)
    bad["rows"][0][4] = runs
    assert "is not a ledger line" in check_wide([bad]).wrong[0]


def test_shared_rows_that_do_not_fit_their_replicas_are_refused() -> None:
    bad = wide(1)
    bad["rows"][0][1] -= 1
    assert check_wide([bad]).wrong == (
        "step 1 of generation 1.1, replicas 0 to 2 says rows 0..8, expected 0..9",
    )
    for count in (0, "3", True):
        bad["rows"][0][3] = count
        assert "is not a ledger line" in check_wide([bad]).wrong[0]


def test_the_first_sample_of_all_is_looked_for_too(ledger: list[dict[str, Any]]) -> None:
    ledger[0]["rows"][1][2] = fed([4, 0, 6])
    assert run(ledger).wrong == ("step 1 of generation 1.1, replica 1 fed sample 0 in the place of 5",)


def test_every_single_deviation_is_tried() -> None:
    """Of rows 1 and 2, in a window of rows 0 to 3."""
    tried = [(each.kind, each.row, each.other, each.fed.tolist()) for each in _deviations(1, 3, 4)]
    assert tried == [
        ("skipped", 1, 1, [2, 3]),
        ("skipped", 1, 1, [2]),
        ("repeated", 1, 1, [1, 1]),
        ("repeated", 1, 1, [1, 1, 2]),
        ("skipped", 2, 2, [1, 3]),
        ("skipped", 2, 2, [1]),
        ("repeated", 2, 2, [1, 2]),
        ("repeated", 2, 2, [1, 2, 2]),
        ("swapped", 1, 2, [2, 1]),
        *(("replaced", 1, other, [other, 2]) for other in range(4)),
        *(("replaced", 2, other, [1, other]) for other in range(4)),
    ]
    assert diagnose(DATA.rows(np.arange(2)), 0, 2, b"of no rows") is None  # no row comes after the last


def test_a_wrong_digest_costs_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = iter(range(30_000))
    monkeypatch.setattr(ledger_diagnosis, "token_digest", lambda rows: next(tried))
    assert diagnose(np.zeros((200, 1), np.int64), 0, 200, b"of no rows") is None
    assert next(tried) == 20_000


def test_swap_between_two_ranks_loses_nothing_and_is_found(ledger: list[dict[str, Any]]) -> None:
    ledger[4]["rows"][0][2] = fed([40, 45, 42, 43])
    ledger[4]["rows"][1][2] = fed([44, 41, 46])
    report = run(ledger)
    assert [words.split(", ")[1] for words in report.wrong] == [
        "replica 0 fed sample 45 in the place of 41",
        "replica 1 fed sample 41 in the place of 45",
    ]
    assert (report.lost, report.repeated, report.ok) == (0, 0, False)


def test_sample_fed_beyond_the_end_makes_up_for_nothing(ledger: list[dict[str, Any]]) -> None:
    assert ledger[-1]["rows"][2][:2] == [117, 120]
    ledger[-1]["rows"][2][2] = fed([118, 119, 120])
    report = run(ledger)
    assert report.wrong == ("step 12 of generation 1.1, replica 2 skipped sample 117",)
    assert (report.samples, report.lost, report.repeated) == (STEPS * BATCH - 1, 1, 0)


def test_one_changed_token_is_found(ledger: list[dict[str, Any]]) -> None:
    other = Dataset(DATA.tokens.copy(), SEQ)
    other.tokens[20] ^= 1
    report = check(ledger, UniformPlan(SEED, BATCH, other.samples), other)
    assert not report.ok
    # sample 3 lies in each of the epochs; its rows are proven no more
    assert len(report.wrong) >= 3
    assert check(ledger, UniformPlan(SEED + 1, BATCH, DATA.samples), DATA).lost > 0


def test_missing_and_repeated_lines(ledger: list[dict[str, Any]]) -> None:
    report = run([entry for entry in ledger if entry["step"] not in (3, 4, 9)])
    assert report.wrong == ("no line for steps 3 to 4", "no line for step 9")
    assert (report.lost, report.repeated) == (3 * BATCH, 0)
    report = run(ledger[:-2], last_step=STEPS)
    assert report.wrong == ("no line for steps 11 to 12",)
    assert report.lost == 2 * BATCH
    report = run([*ledger, ledger[6]])
    assert report.wrong == ("step 7 was fed 2 times, by generations 1.1, 1.1",)
    assert (report.lost, report.repeated) == (0, BATCH)
    report = run(ledger, last_step=STEPS - 1)
    assert report.wrong == ("step 12 of generation 1.1 lies beyond the last step 11",)
    assert run([]) == LedgerReport(0, 0, 0, 0, 0, ())
    assert run([], last_step=2).lost == 2 * BATCH


def test_wild_numbers_cost_nothing(ledger: list[dict[str, Any]]) -> None:
    assert run([ledger[0]] * 30).repeated == 29 * BATCH
    wild = {**ledger[0], "step": 10**15}
    report = run([*ledger, wild])
    assert "no line for steps 13 to 999999999999999" in report.wrong
    assert report.samples == STEPS * BATCH
    assert run([*ledger, wild], last_step=STEPS).samples == STEPS * BATCH


def test_steps_that_were_gone_back_behind_are_void() -> None:
    """1.1 ran to 8; 1.2 resumed from 6 and ran to 9; 2.3 resumed from 9."""
    lines = [line(step) for step in range(1, 9)]
    lines += [line(step, dp=2, n=2) for step in range(7, 10)]
    lines += [line(step, dp=1, term=2, n=3) for step in range(10, 13)]
    resumes = [(1, 1, 0), (1, 2, 6), (2, 3, 9)]
    report = run(lines, resumes=resumes, last_step=12)
    assert report == LedgerReport(12, 120, 0, 0, 2, ())
    assert run(lines).repeated == 2 * BATCH
    # a generation that resumed and never finished a step still voids what it went back behind
    report = run(lines[:8], resumes=[(1, 1, 0), (1, 2, 6)])
    assert (report.steps, report.void, report.ok) == (6, 2, True)
    # a step that only the void part has is lost
    assert run([*lines[:8], *lines[9:]], resumes=resumes).lost == BATCH


def test_rows_that_do_not_cover_the_step(ledger: list[dict[str, Any]]) -> None:
    gone = copy.deepcopy(ledger)
    del gone[4]["rows"][2]
    report = run(gone)
    assert (report.lost, report.repeated, report.ok) == (3, 0, False)
    twice = copy.deepcopy(ledger)
    twice[4]["rows"].append(twice[4]["rows"][0])
    assert (run(twice).lost, run(twice).repeated) == (0, 4)
    stray = copy.deepcopy(ledger)
    stray[4]["rows"][2] = ledger[5]["rows"][0]
    report = run(stray)
    assert "says rows 50..54, outside of 40..50" in report.wrong[0]
    assert (report.lost, report.repeated) == (3, 0)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("samples", [40, 51], "says samples (40, 51), expected (40, 50)"),
        ("samples", [30, 40], "says samples (30, 40), expected (40, 50)"),
        ("tokens", 61, "says 61 tokens, expected 60"),
        ("step", "5", "is not a ledger line"),
        ("step", 0, "is not a ledger line"),
        ("step", True, "is not a ledger line"),
        ("term", 1.0, "is not a ledger line"),
        ("n", None, "is not a ledger line"),
        ("n", 1 << 80, "is not a ledger line"),
        ("n", 1 << 62, "is not a ledger line"),
        ("samples", [40], "is not a ledger line"),
        ("rows", [[40, 50]], "is not a ledger line"),
        ("rows", [[40, 50, "xyz"]], "is not a ledger line"),
        ("rows", 7, "is not a ledger line"),
    ],
)
def test_garbage_in_a_line(ledger: list[dict[str, Any]], key: str, value: Any, words: str) -> None:
    ledger[4][key] = value
    report = run(ledger)
    assert words in report.wrong[0]
    assert not report.ok


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "\x00", "[" * 100_000, '{"step": 5}'])
def test_garbage_lines(ledger: list[dict[str, Any]], text: str) -> None:
    report = run([*ledger[:4], text, *ledger[5:]])
    assert report.wrong[0].startswith("line 5 is not a ledger line")
    assert report.wrong[1] == "no line for step 5"
    assert report.lost == BATCH


def test_samples_of_a_step_without_an_update_are_counted_and_count_as_fed(
    ledger: list[dict[str, Any]],
) -> None:
    for at in (3, 7):
        ledger[at] |= {"skipped": "non-finite", "loss": None, "grad_norm": None}
    report = run(ledger)
    assert (report.ok, report.samples, report.skipped) == (True, 120, 20)


def passing_over(ledger: list[dict[str, Any]], steps: range) -> list[dict[str, Any]]:
    """The ledger of a run that a rewind took past some steps."""
    nothing = {"rows": [], "tokens": 0, "loss": None, "grad_norm": None, "passed_over": True}
    return [line | nothing if line["step"] in steps else line for line in ledger]


def test_steps_that_a_rewind_passes_over_are_counted_and_not_lost(ledger: list[dict[str, Any]]) -> None:
    steps = range(4, 7)
    report = run(passing_over(ledger, steps), passed=[steps, range(5, 7)])
    assert (report.ok, report.steps, report.samples, report.lost, report.passed_over) == (True, 12, 90, 0, 30)


def test_a_step_is_passed_over_where_the_log_says_so_and_there_alone(ledger: list[dict[str, Any]]) -> None:
    report = run(passing_over(ledger, range(4, 7)), passed=[range(4, 6)])
    assert (report.lost, report.passed_over) == (10, 20)
    assert report.wrong == ("step 6 of generation 1.1 was passed over, and the log knows of no rewind",)
    report = run(ledger, passed=[range(4, 5)])
    assert report.wrong == ("step 4 of generation 1.1 was fed, though a rewind passes over it",)


def test_steps_whose_lines_were_lost_before_their_commit_prove_nothing(ledger: list[dict[str, Any]]) -> None:
    lost = {"rows": [], "tokens": 0, "loss": None, "grad_norm": None, "at_s": None, "unproven": True}
    report = run([line | lost if line["step"] in (4, 5, 12) else line for line in ledger])
    assert (report.ok, report.steps, report.samples, report.lost) == (False, 12, 90, 30)
    why = "the ledger lines were lost before they were committed, nothing proves what was fed"
    assert report.wrong == (f"steps 4 to 5: {why}", f"step 12: {why}")


def test_report_as_json(ledger: list[dict[str, Any]]) -> None:
    assert json.loads(json.dumps(run(ledger[1:]).to_dict())) == {
        "ok": False,
        "steps": 12,
        "samples": 110,
        "lost": 10,
        "repeated": 0,
        "void": 0,
        "skipped": 0,
        "passed_over": 0,
        "wrong": ["no line for step 1"],
    }
