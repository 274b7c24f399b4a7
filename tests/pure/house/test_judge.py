"""The judge of the tests itself: which tests it asks, and that it leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.support.faults import judge
from tests.support.faults.judge import MARK, Judge, Recorded, draw, end_marked
from tests.support.faults.operators import Fault, faults_in

SOURCE = "def half(count):\n    return count // 2\n"
TEST = "from half import half\n\ndef test_half():\n    assert half({}) == {}\n"


def test_tests_of_the_line_come_before_those_of_the_file_and_cheap_ones_first() -> None:
    touched = {"a.py": {1: {"slow", "quick"}, 2: {"other", "unknown"}, 3: set()}}
    run = Recorded(touched, {"slow": 9.0, "quick": 0.1, "other": 1.0})
    assert run.ordered_tests(Fault("a.py", 1, 0, 1, 1, "")) == (["quick", "slow"], ["other"])
    assert run.ordered_tests(Fault("a.py", 3, 0, 3, 1, "")) == (["quick", "other", "slow"], [])


def test_faults_are_drawn_by_seed_from_the_packages_that_are_asked_for() -> None:
    touched = {path: {line: {"test"} for line in range(400)} for path in (
        "picotron_ray/launch.py", "picotron_ray/config/resume.py", "picotron_ray/comm/p2p.py",
    )}  # fmt: skip
    drawn = draw(touched, 3, 8, ["config", "."])
    assert drawn == draw(touched, 3, 8, ["config", "."]) != draw(touched, 4, 8, ["config", "."])
    assert {fault.path for fault in drawn} == {"picotron_ray/launch.py", "picotron_ray/config/resume.py"}


@pytest.mark.deep
def test_a_fault_is_noticed_by_the_first_test_that_fails_with_it_alone(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(SOURCE)
    tests = {"test_weak": TEST.format(0, 0), "test_broken": TEST.format(1, 1), "test_good": TEST.format(2, 1)}
    for name, text in tests.items():
        (tmp_path / f"{name}.py").write_text(text)
    times = {f"{name}.py::test_half": 0.1 * number for number, name in enumerate(tests)}
    faults = {fault.text: fault for fault in faults_in("half.py", SOURCE)}
    touched = {"half.py": {2: set(times)}}
    verdict = Judge(tmp_path, 60, [Recorded(touched, times)]).judge(faults["(count * 2)"])
    assert "test_good.py::test_half" in verdict.by
    weak = Recorded({"half.py": {2: {"test_weak.py::test_half"}}}, times)
    runs = [weak, Recorded(touched, times)]
    assert Judge(tmp_path, 60, [weak]).judge(faults["3"]).by == ""
    assert Judge(tmp_path, 60, runs).judge(faults["3"]).run == 1
    assert (tmp_path / "half.py").read_text() == SOURCE


def test_tests_that_do_not_end_notice_a_fault_among_many_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCE.replace("    return", "    while count % 2:\n        count += 1\n    return")
    (tmp_path / "half.py").write_text(source)
    (tmp_path / "test_odd.py").write_text(TEST.format(3, 2))
    endless = next(fault for fault in faults_in("half.py", source) if fault.text == "pass")
    (tmp_path / "test_even.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('n', range(99))\ndef test_n(n):\n    pass\n"
    )
    times = {"test_odd.py::test_half": 0.01, **{f"test_even.py::test_n[{n}]": 0.05 for n in range(99)}}
    monkeypatch.setattr(judge, "PATIENCE", (1.0, 5.0))
    found = Judge(tmp_path, 10, [Recorded({"half.py": {3: set(times)}}, times)]).judge(endless)
    assert found.by == judge.ENDLESS


def test_what_a_run_has_started_in_sessions_of_its_own_is_ended() -> None:
    mark = uuid.uuid4().hex
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    ours, other = (
        subprocess.Popen(sleep, start_new_session=True, env={**os.environ, MARK: name})
        for name in (mark, "other")
    )
    try:
        limit = time.monotonic() + 30
        while ours.poll() is None and time.monotonic() < limit:
            end_marked(mark)  # a process that has just begun has no environment to read yet
            time.sleep(0.1)
        assert ours.returncode == -9
        assert other.poll() is None
    finally:
        ours.kill()
        other.kill()
        ours.wait()
        other.wait()
