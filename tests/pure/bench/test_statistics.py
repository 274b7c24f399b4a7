"""The arithmetic of the benchmarks, on events written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.bench.common.event_log import EventLog, Events
from picotron_ray.bench.common.report import recovery_lines, throughput_lines
from picotron_ray.bench.common.statistics import (
    KillFigures,
    kill_from_events,
    lost_samples,
    quartiles,
    recovery_ratios,
    rows_of_steps,
    step_time,
    summary,
)

BATCH = 4


def steps(t: float, era: str, numbers: range, ranks: int, step_s: float = 0.1) -> list[dict[str, Any]]:
    """Steps of one membership, each rank feeding its half (ranks 0 and 1) of the batch."""
    events: list[dict[str, Any]] = []
    for number in numbers:
        base = (number - 1) * BATCH
        for rank in range(ranks):
            rows = [base + 2 * rank, base + 2 * rank + 2]
            events.append({"t": t, "what": "fed", "era": era, "step": number, "rank": rank, "rows": rows})
        t += step_s
        events += [{"t": t, "what": "step", "era": era, "step": number, "rank": r} for r in range(ranks)]
    return events


def formed(era: str, built: float, restored: float) -> list[dict[str, Any]]:
    times = {"built": built, "restored": restored}
    return [{"t": t, "what": what, "era": era} for what, t in times.items()]


def test_kill_with_replay() -> None:
    """Killed at 103.05 after step 30; goes on from step 20 at 105: the eleventh step is the new one."""
    events = [
        *formed("a", 99.0, 99.5),
        *steps(100.0, "a", range(1, 31), 2),
        {"t": 103.25, "what": "detected"},
        *formed("b", 104.0, 104.4),
        *formed("b", 104.5, 104.9),  # the slowest member counts
        *steps(105.0, "b", range(21, 60), 2),
    ]
    kill = kill_from_events(sorted(events, key=lambda event: event["t"]), 103.05, BATCH)
    assert kill.step == 30
    assert kill.lost_steps == 10
    assert kill.lost_samples == 0
    assert kill.detect_s == pytest.approx(0.2)
    assert kill.rebuild_s == pytest.approx(1.25)
    assert kill.restore_s == pytest.approx(0.4)
    assert kill.total_without_replay_s == pytest.approx(2.05)
    assert kill.total_s == pytest.approx(3.05)


def test_kill_with_dropped_share() -> None:
    """A survivor goes on alone at the next step: nothing is replayed, half of 20 batches is lost."""
    events = [
        *formed("a", 99.0, 99.0),
        *steps(100.0, "a", range(1, 31), 2),
        {"t": 103.06, "what": "fed", "era": "a", "step": 31, "rank": 1, "rows": [122, 124]},
        {"t": 103.1, "what": "detected"},
        *formed("b", 103.2, 103.2),
        *steps(103.2, "b", range(31, 60), 1),
    ]
    kill = kill_from_events(events, 103.05, BATCH)
    assert kill.lost_steps == 0
    assert kill.lost_samples == 20 * 2  # what the dead fed for step 31 came into no update
    assert kill.total_s == kill.total_without_replay_s == pytest.approx(0.25)


def test_a_step_that_the_old_membership_still_finishes_is_not_new() -> None:
    events = [
        *formed("a", 99.0, 99.0),
        *steps(100.0, "a", range(1, 31), 2),
        {"t": 103.3, "what": "detected"},
        *formed("b", 104.0, 104.0),
        *steps(104.0, "b", range(30, 60), 2),
    ]
    kill = kill_from_events(events, 102.95, BATCH)  # while step 30 goes on
    assert kill.step == 30
    assert kill.lost_steps == 1
    assert kill.total_s == pytest.approx(1.25)


def test_a_death_between_two_steps_shows_in_the_next_group_alone() -> None:
    events = [
        *formed("a", 99.0, 99.0),
        *steps(100.0, "a", range(1, 31), 2),
        {"t": 103.0, "what": "detected"},  # an older sign
        *formed("b", 103.4, 103.4),
        *steps(103.4, "b", range(31, 60), 1),
    ]
    kill = kill_from_events(events, 103.05, BATCH)
    assert kill.detect_s == pytest.approx(0.35)
    assert kill.rebuild_s == 0.0


def test_what_happens_at_the_very_moments_counts_once() -> None:
    """A step finished as the signal came is of the old membership, and so is a sign; b's members restore
    up to its first step, and one that never trained is no sign.
    """
    events = [
        {"t": 2.0, "what": "step", "era": "a", "step": 5},
        {"t": 2.0, "what": "detected"},
        {"t": 2.1, "what": "built", "era": "x"},
        {"t": 2.25, "what": "built", "era": "b"},
        {"t": 2.375, "what": "restored", "era": "b"},
        {"t": 2.5, "what": "restored", "era": "b"},
        {"t": 2.5, "what": "step", "era": "b", "step": 6},
        {"t": 2.75, "what": "restored", "era": "b"},  # joins later
    ]
    assert kill_from_events(events, 2.0, BATCH) == KillFigures(
        detect_s=0.25,
        rebuild_s=0.0,
        restore_s=0.25,
        total_s=0.5,
        total_without_replay_s=0.5,
        lost_steps=0,
        lost_samples=25 * BATCH,  # steps 1 to 25, of which no rows were noted
        step=5,
    )


@pytest.mark.parametrize(
    ("step", "horizon", "lost"),
    [(20, 40, 0), (21, 40, 4), (60, 40, 4), (61, 40, 0), (1, 5, 4), (25, 5, 4), (26, 5, 0)],
)
def test_samples_are_looked_for_in_twenty_steps_to_both_sides(step: int, horizon: int, lost: int) -> None:
    whole = {step: [((step - 1) * BATCH, step * BATCH)] for step in range(1, 80)}
    assert lost_samples({**whole, step: []}, horizon, BATCH) == lost


def test_rows_are_those_of_the_last_membership_that_finished_a_step() -> None:
    events = [
        *steps(1.0, "a", range(1, 3), 2),
        {"t": 2.0, "what": "fed", "era": "b", "step": 2, "rank": 0, "rows": [4, 8]},
        {"t": 2.1, "what": "step", "era": "b", "step": 2},
        {"t": 2.2, "what": "fed", "era": "b", "step": 3, "rank": 0, "rows": [8, 12]},
    ]
    assert rows_of_steps(events) == {1: [(0, 2), (2, 4)], 2: [(4, 8)]}


def test_lost_samples_counts_what_no_update_contains() -> None:
    whole = {step: [((step - 1) * BATCH, step * BATCH)] for step in range(1, 80)}
    assert lost_samples(whole, 40, BATCH) == 0
    assert lost_samples({**whole, 41: [(160, 163)]}, 40, BATCH) == 1
    assert lost_samples({**whole, 41: [(156, 160)]}, 40, BATCH) == 4  # other samples do not make up for it
    assert lost_samples({**whole, 75: []}, 40, BATCH) == 0  # out of the window


def test_summary_and_ratios() -> None:
    kills = [KillFigures(0.1, 0.1, 0.1, total, total / 2, 0, 0, 7) for total in (1.0, 3.0, 2.0)]
    ours = summary(kills, 0.02)
    keys = {"detect_s", "rebuild_s", "restore_s", "total_s", "total_without_replay_s"}
    assert set(ours) == keys | {"lost_steps", "lost_samples", "total_quartiles_s", "step_s", "runs"}
    assert ours["total_quartiles_s"] == [1.5, 2.5]
    assert (ours["total_s"], ours["total_without_replay_s"], len(ours["runs"])) == (2.0, 1.0, 3)
    theirs = {"total_s": 30.0, "total_without_replay_s": 10.0}
    assert recovery_ratios(ours, theirs) == {"ratio_total": 15.0, "ratio_total_without_replay": 10.0}
    assert recovery_ratios(ours, None) == {"ratio_total": None, "ratio_total_without_replay": None}


def test_quartiles_and_step_time() -> None:
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)
    assert step_time([(10.0, 5), (10.3, 8), (11.0, 15)]) == pytest.approx(0.1)


def test_events_come_in_order_of_time_and_whole(tmp_path: Path) -> None:
    events = Events(tmp_path)
    log = EventLog(tmp_path / "deep" / "down", 0)
    log.close()
    log = EventLog(tmp_path, 3)  # a folder that is there is used
    log.note("built", era="x")
    log.close()
    with (tmp_path / "0-1.jsonl").open("w") as other:
        other.write(json.dumps({"t": 1.0, "what": "fed"}) + '\n{"t": 2.0, "wh')
        other.flush()
        assert [event["what"] for event in events.read()] == ["fed", "built"]
        other.write('at": "step"}\n')
    assert [event["what"] for event in events.read()] == ["fed", "step", "built"]
    assert events.all[-1]["rank"] == 3


MACHINE = {"cores": 2, "processor": "Z80", "memory_gib": 1.0}


def test_report_of_recovery() -> None:
    ours = summary([KillFigures(0.1, 0.2, 0.3, 0.75, 0.5, 2, 1, 7)] * 3, 0.02)
    ray_train = {**ours, "total_s": 7.5, "total_without_replay_s": 10.0}
    found = {"machine": MACHINE, "job": {"workers": 4}, "ours": ours, "ray_train": None, "torchft": None}
    alone = recovery_lines({**found, **recovery_ratios(ours, None)})
    assert [line.split() for line in alone] == [
        ["median", "ours"],
        ["detect_s", "0.100"],
        ["rebuild_s", "0.200"],
        ["restore_s", "0.300"],
        ["total_s", "0.750"],
        ["total_without_replay_s", "0.500"],
        ["lost_steps", "2.000"],
        ["lost_samples", "1.000"],
        ["step_s", "0.020"],
        ["total_s,", "lower", "quartile", "0.750"],
        ["total_s,", "upper", "quartile", "0.750"],
        ["total_s", "of", "every", "kill"],
        ["ours", "0.750", "0.750", "0.750"],
        ["3", "kills", "each,", "4", "workers", "on", "2", "cores", "of", "Z80,", "1.0", "GiB"],
    ]
    beside = recovery_lines({**found, "ray_train": ray_train, **recovery_ratios(ours, ray_train)})
    assert beside[0] == f"{'median':24}{'ours':>12}{'ray_train':>12}"
    assert beside[4] == f"{'total_s':24}{'0.750':>12}{'7.500':>12}"
    assert beside[-2] == "Ray Train takes 10.0 times as long, without replayed steps 20.0 times"
    assert beside[-1] == alone[-1]
    torchft = summary([KillFigures(0.1, 0.2, 0.3, total, 0.5, 2, 1, 7) for total in (1.03, 0.3, 1.05)], 0.02)
    modes = recovery_lines({**found, "torchft": torchft, **recovery_ratios(ours, None)})
    assert modes[-4:-1] == [
        f"{'ours':24}  0.750  0.750  0.750",
        f"{'torchft':24}  0.300  1.030  1.050",
        "torchft takes 1.4 times as long, in its fastest run 0.4 times",
    ]


def test_report_of_throughput() -> None:
    assert throughput_lines(
        {
            "machine": MACHINE,
            "job": {"workers": 2},
            "ratio_x": 0.98,
            "iqr": {"ratio_x": [0.97, 0.99]},
            "pairs": [{}],
        }
    ) == [
        f"{'ratio_x':42} 0.980  (0.970 to 0.990)",
        "1 rounds, 2 workers on 2 cores of Z80, 1.0 GiB",
    ]
