"""Tools of a worker without torch: lines that are watched, and recordings that fail or are forgotten."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from picotron_ray.runtime.worker.tools import window as module
from picotron_ray.runtime.worker.tools.line_watch import LineWatch, function_lines, loaded_files
from picotron_ray.runtime.worker.tools.window import RecordedSteps, WindowedTool

SOURCE = """
    LIMIT = 3

    class Model:
        size = 1

        def forward(self, x):
            y = x + 1
            return y

    def untouched(x):
        return x
"""


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[ModuleType]:
    """A module of a file of its own."""
    file = tmp_path / "watched_model.py"
    file.write_text(textwrap.dedent(SOURCE).lstrip())
    found = ModuleType("watched_model")
    found.__file__ = str(file)
    exec(compile(file.read_text(), str(file), "exec"), vars(found))
    sys.modules["watched_model"] = found
    yield found
    del sys.modules["watched_model"]


def test_lines_of_functions_are_known_and_files_by_their_tails(watched: ModuleType) -> None:
    assert watched.__file__ is not None
    assert function_lines(watched.__file__) == {7, 8, 11}
    assert loaded_files("watched_model.py") == [watched.__file__]
    assert loaded_files("other/watched_model.py") == []
    assert loaded_files("ched_model.py") == []


def test_a_watched_line_is_heard_of_and_no_other(watched: ModuleType) -> None:
    heard: list[tuple[int, Any]] = []

    def on_line(frame: FrameType, line: int) -> None:
        heard.append((line, dict(frame.f_locals).get("y")))

    before = sys.gettrace()
    watch = LineWatch(on_line)
    assert watched.__file__ is not None
    watch.set({watched.__file__: {8}})
    assert watched.Model().forward(1) == 2
    watched.untouched(1)
    watch.set({watched.__file__: {7, 11}})
    watched.Model().forward(5)
    watched.untouched(1)
    watch.set({})
    watched.Model().forward(1)
    assert heard == [(8, 2), (7, None), (11, None)]
    assert sys.gettrace() is before


def test_a_line_of_a_function_that_runs_already_is_heard_of(watched: ModuleType) -> None:
    heard: list[int] = []
    watch = LineWatch(lambda frame, line: heard.append(line))

    def running() -> int:
        watch.set({__file__: {number}})
        total = 1
        watch.set({})
        return total

    number = running.__code__.co_firstlineno + 2
    running()
    assert heard == [number]


class Recorded:
    """A recording that notes its calls, and fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self.fails = fails

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails:
            raise OSError(f"no {call}")

    def prepare(self) -> None:
        self._note("prepare")

    def start(self) -> None:
        self._note("start")

    def begin(self, step: int) -> None:
        self._note(f"begin {step}")

    def end(self, step: int) -> None:
        self._note(f"end {step}")

    def stop(self) -> None:
        self._note("stop")

    def save(self, path: Path, limit_bytes: int) -> Mapping[str, Any]:
        self._note("save")
        path.write_bytes(b"trace")
        return {"events": 1}


def taken(tool: WindowedTool, steps: range) -> None:
    for step in steps:
        tool.begin(step)
        tool.end(step)


def test_a_window_waits_warms_up_and_records(tmp_path: Path) -> None:
    recorded = Recorded()
    tool = WindowedTool("k", RecordedSteps(1, 1, 2), recorded, tmp_path / "trace", 100)
    taken(tool, range(1, 3))
    assert recorded.calls == [], "it was not told to begin"
    tool.go()
    taken(tool, range(3, 6))
    tool.begin(6)
    assert tool.last
    tool.end(6)
    assert recorded.calls == ["prepare", "start", "begin 5", "end 5", "begin 6", "end 6", "stop"]
    assert tool.state == "stopped"
    tool.save()
    while tool.state == "saving":
        pass
    told = tool.plain()
    assert (told["state"], told["steps"], told["bytes"], told["events"]) == ("done", [5, 6], 5, 1)
    tool.drop()
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("fails", ["prepare", "start", "begin 2", "end 2", "stop", "save"])
def test_a_recording_that_fails_says_why_and_hurts_nothing(tmp_path: Path, fails: str) -> None:
    tool = WindowedTool("k", RecordedSteps(0, 0, 2), Recorded(fails), tmp_path / "trace", 100)
    tool.go()
    taken(tool, range(1, 4))
    tool.save()
    while tool.state == "saving":
        pass
    assert (tool.state, tool.plain()["text"]) == ("failed", f"no {fails}")


@pytest.mark.parametrize("fails", ["begin 2", "end 2"])
def test_where_ranks_communicate_a_failure_is_not_swallowed(tmp_path: Path, fails: str) -> None:
    recorded = Recorded(fails)
    recorded.together = True  # type: ignore[attr-defined]
    tool = WindowedTool("k", RecordedSteps(0, 0, 2), recorded, tmp_path / "trace", 100)
    tool.go()
    with pytest.raises(OSError, match=f"no {fails}"):
        taken(tool, range(1, 4))
    assert (tool.state, recorded.calls[-1]) == ("failed", "stop")


def test_what_nobody_begins_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = WindowedTool("k", RecordedSteps(0, 0, 2), Recorded(), tmp_path / "trace", 100)
    assert not tool.stale
    monkeypatch.setattr(module, "ARMED_S", -1.0)
    assert tool.stale
    tool.give_up("the generation ended")
    assert tool.plain()["text"] == "the generation ended"
