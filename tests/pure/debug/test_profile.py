"""Traces of ranks on one clock, the summary of a profile, and suggestions by what was measured."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.bench.profile.bench import interval
from picotron_ray.config.schema.telemetry import STEP_PHASES
from picotron_ray.debug.clock_offsets import Offset, clock_offsets
from picotron_ray.debug.merged_trace import RankTrace, merged
from picotron_ray.debug.profile_report import device_shares, longest, mean_row
from picotron_ray.debug.tensor_figures import whole_tensors
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.driver import recordings
from picotron_ray.runtime.driver.measured_gains import NOT_MEASURED, Gains, advice
from picotron_ray.runtime.driver.profile_run import ProfileOptions, lines, profile, representative
from picotron_ray.runtime.driver.recordings import check_window, make_folder, results_in


def test_offsets_are_within_what_they_claim() -> None:
    """Collectives of three ranks whose clocks are apart, over a network that delays some ranks more."""
    draw, ahead = random.Random(3), {0: 0, 1: 5_000_000, 2: -800_000}
    rounds: dict[int, list[tuple[int, int]]] = {rank: [] for rank in ahead}
    for number in range(16):
        entries = {rank: 1_000_000 * number + draw.randrange(90_000) for rank in ahead}
        for rank, entry in entries.items():
            exit = max(entries.values()) + draw.randrange(10_000, 60_000 * (rank + 1))
            rounds[rank].append((entry + ahead[rank], exit + ahead[rank]))
    found = clock_offsets(rounds)
    assert found[0] == (0.0, 0.0)
    for rank in (1, 2):
        assert abs(found[rank].ahead_ns - ahead[rank]) <= found[rank].within_ns < 90_000
    assert clock_offsets({0: [], 1: []})[1].within_ns == float("inf")


def test_a_merged_trace_has_every_rank_on_one_clock() -> None:
    def trace(base_ns: int) -> dict[str, Any]:
        event = {"ph": "X", "cat": "cpu_op", "name": "add", "pid": 77, "tid": 1, "ts": 5.0, "dur": 2.0}
        memory = {"Total Allocated": 64, "Total Reserved": 0, "Device Type": 0}
        counted = {"ph": "i", "name": "[memory]", "pid": 77, "tid": 1, "ts": 6.0, "args": memory}
        flow = {"ph": "s", "id": 4, "pid": 77, "tid": 1, "ts": 5.5, "name": "flow", "cat": "fwdbwd"}
        named = {"ph": "M", "pid": 77, "tid": 0, "name": "process_name", "args": {"name": "python"}}
        return {"baseTimeNanoseconds": base_ns, "traceEvents": [event, counted, flow, named]}

    ranks = [
        RankTrace(0, "rank 0", trace(1_000_000)),
        RankTrace(3, "rank 3", trace(9_000_000), Offset(7_999_000.0, 10.0)),
    ]
    found = merged(ranks, {"run": "night"})
    assert json.loads(json.dumps(found))["otherData"] == {"run": "night"}
    added = [event for event in found["traceEvents"] if event["name"] == "add"]
    assert [(event["pid"], event["ts"]) for event in added] == [(0, 0.0), (300, 1.0)]
    curves = [event for event in found["traceEvents"] if event["ph"] == "C"]
    assert [event["args"]["allocated"] for event in curves] == [64, 64]
    flows = {event["id"] for event in found["traceEvents"] if event["ph"] == "s"}
    assert len(flows) == 2
    names = {event["args"]["name"] for event in found["traceEvents"] if event["name"] == "process_name"}
    assert names == {"rank 0: 77", "rank 3: 77"}


def test_a_summary_adds_up_to_the_step() -> None:
    seconds = dict.fromkeys(STEP_PHASES, 0.1) | {"forward": 0.5}
    memory = {"peak_bytes": 5, "device_bytes": 10, "allocated_bytes": 4, "reserved_bytes": 4}
    row = {"step_s": sum(seconds.values()), "phase_s": list(seconds.values()), "waits_seen": True, **memory}
    found = mean_row([row, row])
    assert sum(found["share"].values()) == pytest.approx(1.0)
    assert found["share"]["compute"] == pytest.approx(0.7 / row["step_s"])
    assert mean_row([]) == {}


def test_kernels_tell_exposed_communication_from_hidden() -> None:
    def kernel(name: str, begin: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": dur}

    events = [kernel("gemm", 0, 50), kernel("ncclDevKernel_AllReduce", 40, 30), kernel("gemm", 90, 10)]
    found = device_shares(events)
    assert found == {
        "compute": pytest.approx(0.6),
        "exposed_communication": pytest.approx(0.2),
        "idle": pytest.approx(0.2),
    }
    assert device_shares([]) == {}
    assert [(one["name"], one["count"]) for one in longest(events, 1)] == [("gemm", 2)]


def test_suggestions_are_ranked_by_what_was_measured(tmp_path: Path) -> None:
    def measured(ratio: float) -> dict[str, Any]:
        return {"ratio": {"median": ratio}, "memory_ratio": 0.9}

    file = tmp_path / "mfu.json"
    switches = {
        "comm.gradients=int8": measured(1.1),
        "comm.gradients=bucketed": measured(1.3),
        "layout.micro_batch=8": measured(0.8),
    }
    file.write_text(json.dumps({"ablation": switches}))
    found = advice([{"bottleneck": "communication", "text": ""}], Gains.read(file))
    assert [one["change"] for one in found[:2]] == ["comm.gradients=bucketed", "comm.gradients=int8"]
    assert "layout.micro_batch=8" not in [one["change"] for one in found], "it was slower"
    unmeasured = advice([{"bottleneck": "communication", "text": ""}], Gains.read(None))
    assert {one["gain"] for one in unmeasured} == {NOT_MEASURED}
    file.write_text("[]")
    with pytest.raises(ConfigError, match="is no result of"):
        Gains.read(file)


def test_boxes_that_several_ranks_hold_count_once() -> None:
    half = {"numel": 1, "norm": 3.0, "min": 3.0, "max": 3.0, "nonfinite": 0, "histogram": [0, 1]}
    box = {"name": "w", "offset": [0], "size": [1], **half}
    other = {**box, "offset": [1], "norm": 4.0, "max": 4.0}
    found = whole_tensors([[box], [box, other]])
    assert (found["w"]["numel"], found["w"]["norm"], found["w"]["max"]) == (2, 5.0, 4.0)


@pytest.mark.parametrize("window", [(0, 0, 0), (-1, 0, 1), (0, -1, 1), (0, 0, 10_000)])
def test_a_window_that_records_nothing_is_refused(window: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"^--(wait|warmup|active): saw .*, expected from"):
        check_window(*window)


def test_a_folder_that_takes_no_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^--to: .* cannot be written: "):
        make_folder("--to", tmp_path / "file" / "below")


def _fail_in(folder: Path, write: Callable[[Path], object]) -> None:
    with results_in("--to", folder):
        write(folder)
        raise ConfigError("rank 7: no such rank")


def test_a_folder_is_made_when_something_is_written_and_goes_where_nothing_was(tmp_path: Path) -> None:
    folder, there = tmp_path / "a" / "b", []
    with pytest.raises(ConfigError, match="rank 7"):
        _fail_in(folder, lambda _: there.append((tmp_path / "a").exists()))
    assert (there, (tmp_path / "a").exists()) == ([False], False)
    with pytest.raises(ConfigError, match="rank 7"):
        _fail_in(folder, lambda here: make_folder("--to", here / "tensorboard"))
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match="rank 7"):
        _fail_in(folder, lambda here: (make_folder("--to", here) / "trace").touch())
    assert [path.name for path in folder.iterdir()] == ["trace"]
    with results_in("--to", folder) as given:
        assert given == folder


def test_an_empty_folder_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "mine" / "inner").mkdir(parents=True)
    with pytest.raises(ConfigError, match="rank 7"):
        _fail_in(tmp_path / "mine", lambda _: None)
    assert (tmp_path / "mine" / "inner").is_dir()


def test_a_folder_that_takes_no_files_is_refused_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = ProfileOptions(1, 1, 1, "", tmp_path / "file" / "below", shapes=False, stacks=False)
    with pytest.raises(ConfigError, match=r"^--to: .* cannot be written: "):
        profile("nobody", options, print)


def test_a_profile_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "trace.json.gz").write_bytes(b"the first")
    options = ProfileOptions(1, 1, 1, "", tmp_path, shapes=False, stacks=False)
    with pytest.raises(
        ConfigError, match=r"^--to: .*trace\.json\.gz is there already, of an earlier profile; name"
    ):
        profile("nobody", options, print)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"the first"]


def test_a_summary_says_each_thing_once() -> None:
    """Four suggestions had the same hundred characters, and one rank a clock that agrees with itself."""
    rank = {"device": {}, "memory_by_class": {}}
    others = [{"change": name, "gain": NOT_MEASURED, "ratio": None} for name in ("micro-batch", "layout")]
    best = {"change": "kernels.x", "gain": "1.1 times", "ratio": 1.1}
    found: dict[str, Any] = {
        "steps": [561], "ranks": {"0": rank}, "trace": "t", "tensorboard": "b", "clocks_within_s": 0.0,
        "bottlenecks_from": "telemetry", "bottlenecks": [], "suggestions": [best, *others],
    }  # fmt: skip
    text = lines(found)
    assert text[0].startswith("trace of rank 0, step 561: t ")
    assert not [line for line in text if "clock" in line]
    assert text[-2:] == ["  try kernels.x: 1.1 times", f"  try micro-batch, layout ({NOT_MEASURED})"]
    two = {**found, "ranks": {"0": rank, "1": rank}, "steps": [561, 562]}
    assert lines(two)[0].startswith("trace of ranks 0-1, steps 561 to 562: t ")
    assert lines(two)[1] == "clocks of the ranks agree within 0 microseconds"
    assert len(lines({**found, "suggestions": []})) == len(text) - 2


def test_what_ranks_wait_for_is_said_once_and_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter([("armed", 0), ("running", 0), ("running", 1), ("stopped", 1), ("done", 1)])

    def answer(ranks: object, order: object) -> dict[int, dict[str, Any]]:
        state, steps = next(states)
        return {0: {"state": state, "steps": [0] * steps}}

    monkeypatch.setattr(recordings, "POLL_S", 0.0)
    told: list[str] = []
    tools: Any = SimpleNamespace(run="night", to_all=answer)
    recordings._finished(tools, (0,), "key", told.append)
    assert told == [f"rank 0 {recordings.WORDS[state]}" for state in ("armed", "running", "stopped", "done")]


def test_few_ranks_stand_for_all_of_a_large_run() -> None:
    assert representative(Layout(dp=500, tp=2)) == (0,)
    assert representative(Layout(dp=2, pp=4, tp=2)) == (0, 4, 8, 12)
    many = representative(Layout(dp=2, pp=64))
    assert (len(many), many[0], many[-1]) == (8, 0, 126)


def test_the_interval_of_equal_pairs_contains_one() -> None:
    draw = random.Random(1)
    same = interval([1 + draw.gauss(0, 0.01) for _ in range(30)])
    assert same["unchanged"]
    slower = interval([1.05 + draw.gauss(0, 0.01) for _ in range(30)])
    assert not slower["unchanged"]
    assert slower["low"] > 1.04
    wild = interval([1 + draw.gauss(0, 0.2) for _ in range(30)])
    assert not wild["unchanged"]
