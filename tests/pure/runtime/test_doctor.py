"""The doctor's judgement, its deadlines, and what it tries on storage."""

from __future__ import annotations

import json
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.snapshot import slot_pool
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import ConfigError, StorageError
from picotron_ray.runtime.doctor import drill, examine, machine_report, storage_rights
from picotron_ray.runtime.doctor.finding import Finding, lines, timed
from picotron_ray.runtime.doctor.gpu_health import GpuHealth
from picotron_ray.runtime.doctor.judgement import judge, judge_store_clock, judge_together
from picotron_ray.runtime.doctor.machine_report import MachineReport, Question, look
from picotron_ray.runtime.doctor.state_folder import judge_state_folder
from picotron_ray.runtime.driver import preflight
from picotron_ray.runtime.ray_cluster import connect
from picotron_ray.runtime.worker.nccl_settings import (
    ASYNC_ERRORS,
    BLOCKING,
    NONBLOCKING,
    RECORDED,
    prepare_nccl,
    prepare_recorder,
)
from tests.support.faults.full_folder import run_on_small_disk

Usage = namedtuple("Usage", "total used free")
LIMITS = {"nofile": 65536, "nproc": -1, "memlock": -1, "fsize": -1}
GPU = GpuHealth("GPU-1", "H100", 0, False, False, 40, 90, False, 0, 80 << 30)
WELL = MachineReport("a", LIMITS, -1, 8 << 30, 16 << 30, "token", {ASYNC_ERRORS: "0"}, ["lo", "eth0"])


def test_a_lost_peer_ends_no_survivors_process_and_no_wait_is_for_ever() -> None:
    fresh: dict[str, str] = {}
    prepare_nccl(fresh)
    prepare_recorder(fresh, 1000)
    assert fresh == {ASYNC_ERRORS: "0", NONBLOCKING: "1", RECORDED: "1000"}
    prepare_nccl(fresh)
    asked = {RECORDED: "7"}
    prepare_recorder(asked, 1000)
    assert asked == {RECORDED: "7"}


@pytest.mark.parametrize("name", [ASYNC_ERRORS, NONBLOCKING, *BLOCKING])
def test_an_environment_in_which_no_run_recovers_is_refused(name: str) -> None:
    value = {NONBLOCKING: "0"}.get(name, "3")
    environment = {name: value}
    with pytest.raises(ConfigError, match=rf"^{name}: saw {value}, with which .*; take it out") as told:
        prepare_nccl(environment)
    assert len(told.value.problems) == 1
    assert environment == {name: value}


def seen(report: MachineReport, local: bool = False, planned: bool = False) -> dict[str, Finding]:
    """The findings that are neither ok nor skipped, by check."""
    found = list(judge(report, planned, local))
    assert all(finding.where == report.host for finding in found)
    return {f.check: f for f in found if f.status in ("warning", "failed")}


def test_a_healthy_machine_passes_every_check() -> None:
    with_gpu = replace(WELL, gpus=[GPU], driver="570")
    for report in (WELL, with_gpu):
        assert seen(report) == {}
    assert [f.check for f in judge(with_gpu, False, False)] == [
        "ports", "auth", "snapshot folder", "ulimits", "nccl", "gpus"
    ]  # fmt: skip
    assert [f.seen for f in judge(with_gpu, False, False)][-1] == "1 x H100, driver 570"


@pytest.mark.parametrize(
    ("change", "check", "status", "words"),
    [
        ({"taken": {"port": "port 9400: Address already in use"}}, "ports", "failed", "metrics.port"),
        ({"auth_mode": "disabled"}, "auth", "failed", "RAY_AUTH_MODE is disabled"),
        ({"interface_problem": "cluster.interface: saw 'ib7'; name"}, "interface", "failed", "saw 'ib7'"),
        ({"free_bytes": 64 << 20, "overflow_bytes": 1 << 30}, "snapshot folder", "warning", "0.0671 GB of"),
        ({"free_bytes": 64 << 20, "overflow_bytes": 1 << 20}, "snapshot folder", "failed", "0.0671 GB of"),
        ({"auth_mode": ""}, "auth", "warning", "not set"),
        ({"free_bytes": 64 << 20}, "snapshot folder", "failed", "0.0671 GB of 17.2 GB are free"),
        ({"limits": {**LIMITS, "nofile": 256}}, "ulimits", "failed", "open files: 256"),
        ({"limits": {**LIMITS, "nofile": 1024}}, "ulimits", "warning", "open files: 1024"),
        ({"limits": {**LIMITS, "nproc": 100}}, "ulimits", "warning", "processes: 100"),
        ({"pids_max": 512}, "ulimits", "warning", "processes: 512"),
        ({"limits": {**LIMITS, "fsize": 1 << 20}}, "ulimits", "failed", "1048576 bytes"),
        (
            {"gpus": [GPU], "interfaces": ["ib0"], "limits": {**LIMITS, "memlock": 65536}},
            "ulimits",
            "failed",
            "locked",
        ),
        ({"environment": {"NCCL_SOCKET_IFNAME": "ens5"}}, "nccl", "failed", "names ens5, there are lo, eth0"),
        ({"environment": {"NCCL_BLOCKING_WAIT": "1"}}, "nccl", "failed", "NCCL_BLOCKING_WAIT"),
        ({"environment": {ASYNC_ERRORS: "3"}}, "nccl", "failed", "torch ends the survivors"),
        ({"gpus": [replace(GPU, ecc_errors=3)]}, "gpus", "failed", "3 uncorrected"),
        ({"gpus": [replace(GPU, rows_failed=True)]}, "gpus", "failed", "could not be replaced"),
        ({"gpus": [replace(GPU, pending=True)]}, "gpus", "warning", "wait to be replaced"),
        ({"gpus": [replace(GPU, slowed=True)]}, "gpus", "warning", "slows it down"),
        ({"gpus": [replace(GPU, celsius=86)]}, "gpus", "warning", "86 °C"),
        ({"gpus": [replace(GPU, used_bytes=40 << 30)]}, "gpus", "warning", "42.9 of 85.9 GB"),
    ],
)  # fmt: skip
def test_each_ill_is_named_with_its_mend(change: dict[str, Any], check: str, status: str, words: str) -> None:
    found = seen(replace(WELL, **change))
    assert list(found) == [check]
    assert (found[check].status, words in found[check].seen) == (status, True), found[check].seen
    assert found[check].mend


def test_what_is_no_ill() -> None:
    assert seen(replace(WELL, auth_mode=""), local=True) == {}, "launch gives its own Ray a token"
    assert seen(replace(WELL, environment={"NCCL_SOCKET_IFNAME": "^lo,eth"})) == {}, "a prefix of one"
    unknown = GpuHealth("GPU-2", "virtual")
    assert seen(replace(WELL, gpus=[unknown])) == {}, "what a GPU does not tell"
    assert seen(replace(WELL, free_bytes=1 << 20), planned=True) == {}, "the plan says how much is needed"
    (agreed,) = [
        f for f in judge(replace(WELL, auth_mode="disabled"), False, True, True) if f.check == "auth"
    ]
    assert agreed.status == "warning", "the config says that it may be so"


def test_what_launch_would_refuse_the_doctor_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder that takes over, the interface and the agreement to go without a token are the config's."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = [
        f"snapshot.overflow_folder={tmp_path / 'gone'}",
        f"storage.url={tmp_path}",
        "cluster.interface=ib7",
    ]

    def failed(*more: str) -> dict[str, Finding]:
        parts = examine.examine(load_job("tiny", [*words, *more]), True, False)
        return {f.check: f for part in parts for f in part if f.status == "failed"}

    found = failed()
    assert set(found) == {"auth", "overflow folder", "interface"}
    assert found["interface"].seen.startswith("cluster.interface: saw 'ib7'")
    assert "every node has" in found["interface"].mend
    assert "cluster.allow_unauthenticated=true" in found["auth"].mend
    assert "snapshot.overflow_folder" in found["overflow folder"].mend
    mended = ["cluster.allow_unauthenticated=true", "cluster.interface=lo"]
    assert failed(*mended, f"snapshot.overflow_folder={tmp_path}") == {}


def test_a_small_folder_is_no_trouble_by_itself(tmp_path: Path) -> None:
    """A real one of half a MiB: the plan says whether that is enough."""
    code = "import picotron_ray.runtime.doctor.machine_report as m\nr = m.look(m.Question(str(folder)))\n"
    said = run_on_small_disk(tmp_path, code + "print(r.free_bytes, r.troubles)", "512k")
    assert said == f"{1 << 19} {{}}\n"


def test_the_doctor_plans_for_this_machine_as_launch_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Memory and the room for slots are the config's need, judged by launch's own functions."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    small, disk = tmp_path / "small", tmp_path / "disk"
    small.mkdir()
    disk.mkdir()
    free = {str(small): 64 << 20, str(disk): 1 << 40}
    monkeypatch.setattr(slot_pool, "free_bytes", lambda folder: free[str(folder)])
    monkeypatch.setattr(machine_report.shutil, "disk_usage", lambda folder: Usage(1, 1, free[str(folder)]))
    monkeypatch.setattr(preflight, "host_bytes", lambda: 16 << 30)

    def planned(recipe: str, *words: str) -> list[tuple[str, str, str]]:
        words = ("cluster.device=cpu", f"storage.url={tmp_path}", f"snapshot.folder={small}", *words)
        findings = next(iter(examine.examine(load_job(recipe, list(words)), True, False)))
        assert [f for f in findings if f.status == "failed" and f.check not in ("plan", "data")] == []
        return [(f.check, f.status, f.seen) for f in findings if f.check == "plan"]

    assert [status for _, status, _ in planned("tiny")] == ["ok"], "64 MB are enough for it"
    free[str(small)] = 1 << 20
    [(_, status, line)] = planned("tiny")
    assert (status, "snapshot.folder: " in line, "set snapshot.overflow_folder" in line) == (
        "failed",
        True,
        True,
    )
    (_, warned, line), (_, status, _) = planned("tiny", f"snapshot.overflow_folder={disk}")
    assert (warned, line.endswith(f"using {disk} instead (slower)"), status) == ("warning", True, "ok")
    [(_, status, line)] = planned("llama-2-7b", "data.path=/d")
    assert (status, line.startswith("layout: saw room for")) == ("failed", True)


def test_machines_are_compared_with_each_other() -> None:
    others = [WELL, replace(WELL, host="b"), replace(WELL, host="c", environment={"NCCL_IB_HCA": "mlx5"})]
    found = list(judge_together(others, {"a": 0.0, "b": 0.1, "c": 3.0}))
    assert [(f.check, f.status) for f in found] == [
        ("nccl", "failed"),
        ("nccl", "failed"),
        ("clocks", "warning"),
    ]
    assert "NCCL_IB_HCA differs: not set (a, b), mlx5 (c)" in found[0].seen
    assert "c is 2.9 s off" in found[2].seen
    (clocks,) = judge_together(others[:2], {"a": 0.0, "b": -31.0})
    assert clocks.status == "failed"
    assert judge_store_clock(299.0).status == "ok"
    assert judge_store_clock(-301.0).status == "failed"


def test_equal_lines_of_many_machines_are_one() -> None:
    same = [Finding("ulimits", "ok", "enough", where=f"n{i}") for i in range(1000)]
    found = lines([*same, Finding("gpus", "failed", "errors", "exchange it", "n7")])
    assert len(found) == 2
    assert "1000 machines: enough" in found[0]
    assert found[1].startswith("FAIL")
    assert found[1].endswith("n7: errors; exchange it")


def test_work_that_hangs_is_left_behind() -> None:
    never = threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        timed(0.05, never.wait)
    assert time.monotonic() - began < 5
    never.set()
    with pytest.raises(ZeroDivisionError):
        timed(1.0, lambda: 1 // 0)


def test_a_look_that_hangs_or_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    never = threading.Event()
    monkeypatch.setattr(machine_report, "LOOK_S", 0.05)
    monkeypatch.setattr(machine_report, "_gpus", lambda report, question: never.wait())
    found = seen(look(Question(str(tmp_path / "missing"))), local=True)
    never.set()
    assert found["gpus"].seen == "gave no answer for 0.05 s"
    assert "No such file" in found["snapshot folder"].seen
    assert list(tmp_path.iterdir()) == []


def rights(url: Path) -> list[tuple[str, str]]:
    found = storage_rights.judge_storage(StorageConfig(url=str(url)))
    return [(one.check.removeprefix("storage "), one.status) for one in found]


def test_every_right_on_storage_is_tried_and_nothing_stays(tmp_path: Path) -> None:
    well = [("write", "ok"), ("read", "ok"), ("clock", "ok"), ("conditional put", "ok"), ("delete", "ok")]
    assert rights(tmp_path / "new") == well
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    assert rights(tmp_path / "there") == well
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert list((tmp_path / "there").iterdir()) == []


class Denied:
    """A storage in memory that refuses some calls."""

    where = "memory"

    def __init__(self, *refused: str) -> None:
        self.refused, self.objects = refused, dict[str, bytes]()

    def __getattr__(self, name: str) -> Any:
        real = {
            "put_if_absent": lambda key, data: self.objects.__setitem__(key, data),  # the last one wins
            "get": lambda key: self.objects[key],
            "size": lambda key: len(self.objects[key]) if key in self.objects else None,
            "delete": lambda key: self.objects.pop(key, None),
        }
        return real[name]

    def list(self, prefix: str) -> Iterator[Any]:
        if "list" in self.refused:
            raise StorageError("403: s3:ListBucket")
        return iter([storage_rights.Path(key) for key in self.objects])

    def put(self, key: str) -> None:
        raise AssertionError


def test_a_storage_that_denies_is_told_by_the_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def judged(storage: Any) -> dict[str, Finding]:
        monkeypatch.setattr(storage_rights, "open_storage", lambda config, run: storage)
        found = storage_rights.judge_storage(StorageConfig(url=str(tmp_path)))
        return {f.check: f for f in found if f.status != "ok"}

    file = tmp_path / "file"
    file.write_text("no folder")
    (missing, *_) = storage_rights.judge_storage(StorageConfig(url=str(file)))
    assert (missing.check, missing.status) == ("storage write", "failed")
    assert "a folder that this user may write to" in missing.mend
    assert "s3" not in missing.mend
    found = judged(Denied("list"))
    assert "ListBucket" in found["storage read"].seen
    assert found["storage conditional put"].seen == "a second conditional put of one key was taken"
    undeleted = Denied("list")
    undeleted.__dict__["delete"] = lambda key: None
    assert "left behind: probe-" in judged(undeleted)["storage delete"].seen
    hanging, never = Denied(), threading.Event()
    hanging.__dict__["put_if_absent"] = lambda key, data: never.wait()
    monkeypatch.setattr(storage_rights, "RIGHT_S", 0.05)
    found = judged(hanging)
    never.set()
    assert found["storage write"].status == "failed"
    assert {f.status for check, f in found.items() if check != "storage write"} == {"skipped"}


SUMMARY: dict[str, Any] = {
    "status": "finished",
    "steps": 40,
    "generations": [{"members": ["a", "b"]}, {"members": ["a"]}],
    "failures": [{"recovered_s": 0.3, "lost_steps": 0}],
}


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({}, "ok", "0.3 s after"),
        ({"status": "failed", "detail": "boom"}, "failed", "ended as failed: boom"),
        ({"failures": []}, "failed", "not noticed"),
        ({"generations": [{"members": ["a"]}]}, "warning", "only one worker"),
    ],
)
def test_a_drill_is_judged_by_its_summary(change: dict[str, Any], status: str, words: str) -> None:
    found = drill.judge_summary({**SUMMARY, **change})
    assert (found.status, words in found.seen) == (status, True), found.seen


def test_a_drill_agrees_to_what_its_job_agrees_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    words = [f"storage.url={tmp_path / 'runs'}", "cluster.allow_unauthenticated=true", "cluster.interface=lo"]
    one = drill.prepared(load_job("tiny", words), tmp_path)
    taken = load_job("tiny", list(one.words))
    connect.refuse_unauthenticated(taken)
    assert taken.cluster.interface == "lo"
    told = drill._command(one)
    assert {"cluster.allow_unauthenticated=true", 'cluster.interface="lo"'} <= set(told.strip("`").split())
    plain = drill.prepared(load_job("tiny", words[:1]), tmp_path)
    assert load_job("tiny", list(plain.words)).cluster.interface is None
    assert "cluster" not in drill._command(plain)


def test_a_drill_that_does_not_end_is_taken_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[tuple[str, ...]] = []

    def never_ends(one: drill.DrillRun, limit_s: float, module: str, *words: str) -> Any:
        said.append(words)
        return (None, "", "") if words[0] == "tiny" else (0, "", "")

    monkeypatch.setattr(drill, "_run", never_ends)
    (found,) = drill.judge_drill(load_job("tiny", [f"storage.url={tmp_path / 'runs'}"]), own_storage=False)
    assert (found.status, found.seen) == ("failed", "the run did not end within 120 s")
    assert said[1] == ("stop", json.loads(said[0][1].removeprefix("name=")), "--discard")
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_outlasts_its_time_is_killed_with_its_children(tmp_path: Path) -> None:
    run = drill.DrillRun("x", (), {"PATH": "/usr/bin:/bin"})
    code, _, _ = drill._run(run, 0.5, "http.server", "0", "--bind", "127.0.0.1")
    assert code is None


def test_the_drill_waits_until_the_rest_is_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(examine, "judge_drill", lambda *args, **kwargs: [Finding("drill", "ok", "done")])
    job = load_job("tiny", [f"storage.url={tmp_path}/runs"])
    monkeypatch.setattr(examine, "look", lambda question: replace(WELL, auth_mode=""))
    assert [f.seen for f in list(examine.examine(job, True, True))[2]] == ["done"]
    assert [f.status for f in list(examine.examine(job, True, False))[2]] == ["skipped"]
    monkeypatch.setattr(examine, "look", lambda question: replace(WELL, free_bytes=0))
    assert [f.seen for f in list(examine.examine(job, False, True))[2]] == ["failed before: snapshot folder"]


def test_a_home_that_cannot_take_a_launchs_record_is_told_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import os
os.environ["XDG_STATE_HOME"] = str(folder / "not" / "yet")
from picotron_ray.runtime.doctor.state_folder import judge_state_folder
print(judge_state_folder(True).status, [*folder.iterdir()])
fill(folder)
print("; ".join(judge_state_folder(True).plain().values()))
"""
    free, full = run_on_small_disk(tmp_path, code).splitlines()
    assert free == "ok []"
    assert full.startswith(
        f"state folder; failed; {tmp_path}/not/yet/picotron_ray: {tmp_path} does not take 1"
    )
    assert "(No space left on device); make room there, or set XDG_STATE_HOME" in full
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    assert [judge_state_folder(local).status for local in (True, False)] == ["failed", "warning"]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = [f"storage.url={tmp_path}", "cluster.device=cpu"]
    machine, _, (skipped,) = examine.examine(load_job("tiny", words), True, True)
    assert "state folder" in [each.check for each in machine if each.status == "failed"]
    assert "state folder" in skipped.seen
