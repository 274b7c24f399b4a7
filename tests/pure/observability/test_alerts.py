"""Rules over windows: each fires on what it is for, in the stated number of windows, and is over again."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from picotron_ray.config.schema.alerts import ALERT_RULES, FIGURES, AlertsConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.check import check
from picotron_ray.observability.alerts.baseline import LEAST, MOST, Baseline
from picotron_ray.observability.alerts.book import MOST_KEPT, MOST_TOLD, AlertBook, Silence
from picotron_ray.observability.alerts.conditions import WARM_UP, Condition
from picotron_ray.observability.alerts.detectors import FIT, open_detectors
from picotron_ray.observability.alerts.finding import AlertFinding
from picotron_ray.observability.alerts.rules import BY_NAME, TABLE, derived
from picotron_ray.observability.rank_table import SlowRank
from picotron_ray.observability.windows import TelemetryWindow

USUAL = {
    "loss": 3.0,
    "grad_norm": 1.0,
    "tokens_per_s": 1000.0,
    "step_s": 0.1,
    "data_s": 0.002,
    "straggler_ratio": 1.05,
    "host_cpu_ratio": 0.5,
    "host_memory_ratio": 0.4,
    "peak_bytes": 5e9,
    "device_bytes": 10e9,
    "allocated_bytes": 4e9,
    "planned_peak_bytes": 9e9,
    "disk_used_ratio": 0.5,
    "fragmentation_ratio": 0.1,
    "bandwidth_bytes_per_s.dp": 1e9,
    "latency_s.dp": 1e-4,
    "pending_operations": 2.0,
    "utilization_ratio": 0.9,
    "throttled_gpus": 0.0,
    "ecc_errors_total": 7.0,
    "xid_errors_total": 0.0,
    "durability_lag_steps": 12.0,
    "failures_total": 0.0,
    "bad_steps_total": 0.0,
}
NOISY = (
    "loss",
    "grad_norm",
    "tokens_per_s",
    "step_s",
    "bandwidth_bytes_per_s.dp",
    "latency_s.dp",
    "data_s",
    "straggler_ratio",
)


class Run:
    """A run whose windows a test makes, 10 s apart."""

    def __init__(self, gpu: bool = True, silences: tuple[Silence, ...] = (), **config: Any) -> None:
        self.config = AlertsConfig.model_validate(config)
        detectors, rules = open_detectors(self.config, gpu=gpu)
        acts = {each.rule: each.do for each in self.config.act}
        self.book = AlertBook(detectors, rules, acts=acts, checkpoint_steps=10, silences=silences)
        self.at_s, self.generation, self.step, self.chance = 0.0, 1, 0, random.Random(3)

    def window(self, slow: tuple[SlowRank, ...] = (), **changes: float) -> list[AlertFinding]:
        self.at_s += 10.0
        self.step += 100
        figures = {name: value * self._noise(name) for name, value in USUAL.items()}
        figures |= {name.replace("__", "."): value for name, value in changes.items()} | {"step": self.step}
        made = TelemetryWindow(self.at_s, f"1.{self.generation}", figures, slow)
        return self.book.observe(made, lambda rank: f"node-{rank}")

    def _noise(self, name: str) -> float:
        return self.chance.gauss(1.0, 0.02) if name in NOISY else 1.0

    def until(self, rule: str, most: int = 40, **changes: float) -> tuple[int, AlertFinding]:
        """Windows until a rule fires."""
        for number in range(1, most + 1):
            found = [each for each in self.window(**changes) if each.rule == rule and not each.resolved]
            if found:
                return number, found[0]
        raise AssertionError(f"{rule} did not fire within {most} windows")


PLANTED: dict[str, Mapping[str, float]] = {
    "loss-spike": {"loss": 6.0},
    "gradient-exploding": {"grad_norm": 50.0},
    "gradient-vanishing": {"grad_norm": 1e-6},
    "throughput": {"step_s": 0.15, "data_s": 0.002},
    "straggler": {"straggler_ratio": 1.8},
    "data-stall": {"data_s": 0.05},
    "host-cpu": {"host_cpu_ratio": 0.97, "data_s": 0.02},
    "host-memory": {"host_memory_ratio": 0.97},
    "device-memory": {"peak_bytes": 9.5e9},
    "disk": {"disk_used_ratio": 0.95},
    "fragmentation": {"fragmentation_ratio": 0.8},
    "bandwidth": {"bandwidth_bytes_per_s__dp": 5e8},
    "latency": {"latency_s__dp": 5e-4},
    "utilization": {"utilization_ratio": 0.3},
    "throttling": {"throttled_gpus": 2.0},
    "ecc": {"ecc_errors_total": 8.0},
    "xid": {"xid_errors_total": 1.0},
    "durability-lag": {"durability_lag_steps": 45.0},
    "nan": {"bad_steps_total": 1.0, "bad_step": 2950.0},
    "recovery-loop": {"failures_total": 3.0},
}


@pytest.mark.parametrize("rule", PLANTED)
def test_a_rule_fires_in_as_many_windows_as_the_table_says_and_ends(rule: str) -> None:
    run = Run()
    quiet = [each for _ in range(30) for each in run.window()]
    assert quiet == []
    windows, found = run.until(rule, **PLANTED[rule])
    assert windows == BY_NAME[rule].windows
    assert (found.severity, found.generation) == (BY_NAME[rule].severity, "1.1")
    assert found.evidence
    assert found.advice == BY_NAME[rule].advice
    assert found.since_s == run.at_s - 10.0 * (windows - 1)
    assert run.window(**PLANTED[rule]) in ([], [_over(found, run.at_s)]), "told once"
    kept = {name: PLANTED[rule][name] for name in PLANTED[rule] if name.endswith("_total")}
    over = [each for _ in range(70) for each in run.window(**kept) if each.resolved and each.rule == rule]
    assert len(over) == 1 or BY_NAME[rule].kind == "counter"
    assert run.book.firing == []


def _over(found: AlertFinding, at_s: float) -> AlertFinding:
    from dataclasses import replace

    return replace(found, resolved=True, at_s=at_s)


@pytest.mark.parametrize(("still", "leaks"), [(1, True), (2, False)])
def test_one_window_may_bring_the_reading_of_the_one_before_again(still: int, leaks: bool) -> None:
    """A worker reads its memory once a second, and a window may come before it has."""
    condition = Condition(BY_NAME["leak"])
    shown = []
    for number in range(60):
        size = 1e9 + 1e8 * (number // (4 + still) * 4 + min(number % (4 + still), 4))
        shown.append(bool(list(condition.shown({"allocated_bytes": size}, float(number)))))
    first = shown.index(True) if leaks else None
    assert any(shown) is leaks
    assert first is None or all(shown[first:]), "it is not over while the reading stands still"


def test_what_rises_and_rises_is_a_leak_and_what_comes_and_goes_is_none() -> None:
    run = Run()
    for _ in range(20):
        run.window()
    size, windows = 4e9, 0
    while not any(each.rule == "leak" for each in run.window(allocated_bytes=size)):
        size, windows = size * 1.01, windows + 1
        assert windows < 30
    assert windows == 10
    other = Run()
    for number in range(200):
        assert other.window(allocated_bytes=4e9 * (1 + 0.01 * (number % 9))) == []
    pending = Run()
    for _ in range(10):
        pending.window()
    found = [each for n in range(8) for each in pending.window(pending_operations=2.0 + n)]
    assert [each.rule for each in found] == ["pending-operations"]


def test_every_rule_of_the_config_has_a_row_and_a_planted_case() -> None:
    assert tuple(rule.name for rule in TABLE) == ALERT_RULES or set(BY_NAME) == set(ALERT_RULES)
    assert {*PLANTED, "leak", "pending-operations"} == set(ALERT_RULES)
    named = {name for rule in TABLE for name in (rule.figure, rule.beside) if name}
    shares = set(derived({**USUAL, "step": 1.0}, 10)) - set(USUAL)
    assert {name.removesuffix("*") for name in named - shares} <= {
        *FIGURES, "bandwidth_bytes_per_s.", "latency_s."
    }  # fmt: skip


def test_full_memory_that_was_planned_is_no_alarm() -> None:
    run = Run()
    assert [run.window(peak_bytes=9.2e9) for _ in range(5)] == [[]] * 5
    _, found = run.until("device-memory", peak_bytes=9.3e9)
    assert found.severity == "critical"
    unplanned = Run()
    assert unplanned.until("device-memory", peak_bytes=9.2e9, planned_peak_bytes=0.0)[0] == 1


def test_busy_cpus_alone_are_no_alarm() -> None:
    run = Run()
    assert [run.window(host_cpu_ratio=0.99) for _ in range(20)] == [[]] * 20


def test_a_straggler_is_named_with_rank_node_and_phase() -> None:
    run = Run()
    slow = (SlowRank(3, 0.2, 1.9, "forward", 0.08),)
    found = [each for _ in range(6) for each in run.window(slow, straggler_ratio=1.9)]
    (one,) = found
    assert (one.rank, one.node, one.where) == (3, "node-3", "rank 3 on node node-3")
    assert "most of it in forward" in one.said


def test_a_re_mesh_ends_findings_of_the_layout_and_its_baselines() -> None:
    run = Run()
    for _ in range(30):
        run.window()
    run.until("throughput", step_s=0.17)
    run.generation = 2
    over = run.window(step_s=0.17)
    assert [(each.rule, each.resolved) for each in over] == [("throughput", True)]
    told = [each for _ in range(60) for each in run.window(step_s=0.17)]
    assert told == [], "that is the pace of this generation"


def test_a_loss_is_compared_across_a_re_mesh() -> None:
    run = Run()
    for _ in range(30):
        run.window()
    run.generation = 2
    assert run.until("loss-spike", loss=9.0)[0] == 2


def test_what_is_silenced_is_noted_and_asks_for_nothing() -> None:
    acts = [{"rule": "disk", "do": "snapshot"}]
    run = Run(act=acts)
    assert run.until("disk", disk_used_ratio=0.99)[1].act == "snapshot"
    quiet = Run(silences=(Silence("disk", 1000.0),), act=acts)
    found = quiet.until("disk", disk_used_ratio=0.99)[1]
    assert (found.silenced, found.act) == (True, "")
    quiet.at_s = 2000.0
    quiet.window()
    assert not quiet.until("disk", disk_used_ratio=0.99)[1].silenced
    every = Run(silences=(Silence("*"),))
    assert every.until("disk", disk_used_ratio=0.99)[1].silenced


def test_what_still_fires_when_its_silence_ends_is_told_and_asks() -> None:
    run = Run(silences=(Silence("disk", 1000.0),), act=[{"rule": "disk", "do": "snapshot"}])
    found = [each for _ in range(200) for each in run.window(disk_used_ratio=0.99)]
    assert [(each.at_s, each.silenced, each.act) for each in found] == [
        (10.0, True, ""), (1000.0, False, "snapshot")
    ]  # fmt: skip
    assert [each.rule for _ in range(2) for each in run.window() if each.resolved] == ["disk"]


def test_what_is_not_obeyed_is_asked_again_ever_more_seldom_and_in_each_generation() -> None:
    run = Run(act=[{"rule": "disk", "do": "snapshot"}])

    def asked(windows: int) -> list[tuple[float, str, int]]:
        found = []
        for _ in range(windows):
            assert run.window(disk_used_ratio=0.99) == [], "it is not told again"
            found += [(each.at_s, each.generation, each.step) for each in run.book.again]
        return found

    run.window(disk_used_ratio=0.99)
    assert asked(100) == [(130.0, "1.1", 100), (370.0, "1.1", 100), (850.0, "1.1", 100)]
    run.generation = 2
    assert asked(30) == [(1020.0, "1.2", 10200), (1140.0, "1.2", 10200)]
    run.book.silence(Silence("disk", 1500.0), run.at_s)
    assert [at for at, *_ in asked(40)] == [1500.0]
    run.book.obeyed("leak")
    assert len(asked(1000)) in (3, 4), "within an hour each"
    run.book.obeyed("disk")
    assert asked(1000) == []
    run.window()
    run.window()
    assert run.until("disk", disk_used_ratio=0.99)[0] == 1
    assert len(asked(20)) == 1, "another finding"


def test_a_rule_that_comes_and_goes_is_told_a_few_times_an_hour() -> None:
    run = Run()
    told = 0
    for number in range(120):
        told += sum(not each.resolved for each in run.window(disk_used_ratio=0.99 if number % 2 else 0.5))
    assert told == MOST_TOLD
    assert run.book.untold > 0


def test_a_config_changes_rules_and_adds_its_own() -> None:
    changed = [
        {"rule": "disk", "threshold": 0.4, "severity": "critical"},
        {"rule": "data-stall", "enabled": False},
        {"rule": "slow-steps", "figure": "step_s", "above": 0.5, "windows": 2},
    ]
    run = Run(rules=changed)
    assert run.window()[0].severity == "critical"
    assert run.until("slow-steps", step_s=0.7, data_s=0.6)[0] == 2
    assert {each.rule for each in run.book.firing} == {"disk", "slow-steps"}


def test_cpu_runs_have_no_rules_of_gpus() -> None:
    run = Run(gpu=False)
    assert [run.window(utilization_ratio=0.1) for _ in range(20)] == [[]] * 20


@pytest.mark.parametrize("detector", ["robust", "learned"])
def test_detectors_without_causes_find_what_is_unusual(detector: str) -> None:
    run = Run(detectors=[detector])
    quiet = [each for _ in range(FIT + 40) for each in run.window()]
    assert quiet == []
    windows, found = run.until("unusual", step_s=0.4, data_s=0.3, grad_norm=30.0, straggler_ratio=1.9)
    assert (windows, found.severity) == (3, "info")
    assert found.evidence


def test_state_stays_small_over_a_long_run() -> None:
    """What is remembered depends neither on ranks nor on how long a run is."""
    run = Run(detectors=["thresholds", "robust"])
    slow = tuple(SlowRank(rank, 0.1, 1.05, "forward", 0.0) for rank in range(8))
    for number in range(1500):
        run.window(slow, disk_used_ratio=0.99 if number % 2 else 0.5)
    sizes = [_deep_bytes(detector) for detector in run.book._detectors]
    assert all(size < 400_000 for size in sizes), sizes
    assert len(run.book.past) <= MOST_KEPT


def _deep_bytes(thing: Any) -> int:
    return sum(sys.getsizeof(each) for each in _held(thing, set()))


def _held(thing: Any, seen: set[int]) -> Iterator[Any]:
    if id(thing) in seen or isinstance(thing, type):
        return
    seen.add(id(thing))
    yield thing
    parts: list[Any] = []
    if isinstance(thing, Mapping):
        parts = [*thing.keys(), *thing.values()]
    elif not isinstance(thing, str | bytes) and hasattr(thing, "__iter__"):
        parts = list(thing)
    parts += list(getattr(thing, "__dict__", {}).values())
    for part in parts:
        yield from _held(part, seen)


def test_a_baseline_is_the_median_of_the_newest_values() -> None:
    usual = Baseline()
    for value in range(LEAST - 1):
        usual.add(float(value))
    assert not usual.ready
    for value in range(1000):
        usual.add(float(value % 7))
    assert (usual.count, usual.median) == (MOST, 3.0)
    usual.clear()
    assert (usual.count, WARM_UP > 0) == (0, True)


@pytest.mark.parametrize(
    ("alerts", "key", "words"),
    [
        ({"rules": [{"rule": "throughputt"}]}, "alerts.rules.0.rule", "did you mean throughput?"),
        (
            {"rules": [{"rule": "own", "figure": "host_cpu", "above": 1}]},
            "alerts.rules.0.figure",
            "did you mean host_cpu_ratio?",
        ),
        ({"rules": [{"rule": "own", "figure": "loss"}]}, "alerts.rules.0", "needs either above or below"),
        ({"rules": [{"rule": "disk", "figure": "loss", "above": 1}]}, "alerts.rules.0.rule", "known rule"),
        ({"rules": [{"rule": "disk", "above": 1}]}, "alerts.rules.0", "without a figure"),
        ({"rules": [{"rule": "disk"}, {"rule": "disk"}]}, "alerts.rules.1.rule", "twice"),
        ({"act": [{"rule": "dsk", "do": "snapshot"}]}, "alerts.act.0.rule", "did you mean disk?"),
        ({"act": [{"rule": "disk", "do": "rewind"}]}, "alerts.act.0.do", "older weights do not mend"),
        ({"act": [{"rule": "nan", "do": "quarantine"}]}, "alerts.act.0.do", "names no node"),
        (
            {"rules": [{"rule": "nan", "enabled": False}], "act": [{"rule": "nan", "do": "rewind"}]},
            "alerts.act.0.rule",
            "turns off",
        ),
        ({"silences": [{"rule": "stragler"}]}, "alerts.silences.0.rule", "did you mean straggler?"),
        (
            {"silences": [{"rule": "disk", "until": "2026-13-01T08:00Z"}]},
            "alerts.silences.0.until",
            "expected one in UTC such as",
        ),
        ({"sinks": [{"kind": "slack"}]}, "alerts.sinks.0", "saw none of url"),
        ({"sinks": [{"kind": "slack", "url": "https://h/SECRET"}]}, "alerts.sinks.0.url", "secret"),
        ({"sinks": [{"kind": "webhook", "url": "ftp://h/SECRET"}]}, "alerts.sinks.0.url", "begins with"),
        ({"sinks": [{"kind": "webhook", "url": "http://u:SECRET@h"}]}, "alerts.sinks.0.url", "credentials"),
    ],
)
def test_mistakes_are_refused_by_their_key(alerts: dict[str, Any], key: str, words: str) -> None:
    (problem,) = check(JobConfig.model_validate({"alerts": alerts}))
    assert problem.key == key
    assert words in problem.text
    assert "SECRET" not in problem.text


def test_alerts_that_act_need_telemetry() -> None:
    alerts = {"act": [{"rule": "nan", "do": "rewind"}]}
    (problem,) = check(JobConfig.model_validate({"alerts": alerts, "telemetry": {"interval_s": None}}))
    assert problem.key == "alerts.act"
