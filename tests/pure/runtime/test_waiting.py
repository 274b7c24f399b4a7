"""Lines on what is waited for: none while it is quick, then one now and then."""

from __future__ import annotations

import io
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from picotron_ray.runtime.driver import console, waiting
from picotron_ray.runtime.driver.console import ProgressView


def test_what_is_quick_is_not_told() -> None:
    said: list[str] = []
    with waiting.told(said.append, "Ray"):
        pass
    assert said == []
    assert not [thread for thread in threading.enumerate() if thread.name == "waiting"]


def test_what_takes_long_is_told_again_and_again_until_it_ends() -> None:
    said: list[str] = []
    twice = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            twice.set()

    with pytest.raises(ValueError, match="refused"), waiting.told(say, "Ray", every_s=0.01):  # noqa: PT012
        assert twice.wait(60)
        raise ValueError("refused")
    known = len(said)
    assert all(re.fullmatch(r"waiting for Ray \(\d+ s\)", text) for text in said)
    assert len(said) == known, "nothing is told after the end"


def status(**changes: Any) -> dict[str, Any]:
    plain = {
        "run": "night", "state": "starting", "term": 0, "generation": None, "step": 0, "steps": 9,
        "loss": None, "resume_step": 0, "done": False, "stopping": False, "events": [], "recalled": 0,
        "tokens_per_s": None, "layout": None, "members": [],
    }  # fmt: skip
    return {**plain, **changes}


BEGUN = {"state": "running", "term": 1, "generation": "1.1"}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, "storage and nodes to answer"),
        ({"term": 2}, "workers to start"),
        (BEGUN, "the first step of generation 1.1"),
        ({**BEGUN, "resume_step": 40, "step": 40}, "the first step of generation 1.1"),
        ({**BEGUN, "step": 1}, ""),
        ({**BEGUN, "step": 4, "loss": 2.0}, ""),
        ({**BEGUN, "step": 4, "loss": 2.0, "stopping": True}, "the run to stop"),
        ({"done": True, "stopping": True}, ""),
    ],
)
def test_a_start_says_what_it_waits_for(changes: dict[str, Any], what: str) -> None:
    assert waiting.awaited(status(**changes)) == what


def test_a_follower_tells_at_most_one_line_each_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    for module in (waiting, console):
        times = SimpleNamespace(monotonic=lambda: clock.now, strftime=lambda *_: "12:00:00", localtime=float)
        monkeypatch.setattr(module, "time", times)
    out = io.StringIO()
    event = {"seq": 1, "t": 0.0, "level": "info", "kind": "node", "text": "node joined"}
    with ProgressView(Console(file=out, width=100)) as view:
        for second in range(60):
            clock.now = float(second)
            if second < 35:
                view.show(status(term=1, events=[event] if second == 12 else []))
            elif second < 38:
                view.show(status(**BEGUN, step=0))
            else:
                view.show(status(**BEGUN, step=second, loss=2.0))
    lines = [line for line in out.getvalue().splitlines() if "[running]" not in line]
    assert lines == [
        "waiting for workers to start (10 s)",
        "12:00:00 node joined",
        "waiting for workers to start (22 s)",
        "waiting for workers to start (32 s)",
    ]
