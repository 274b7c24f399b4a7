"""The driver's loop: outages of the coordinator, its restart, signals, and giving up. No Ray involved."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.runtime.coordinator.followers import RECENT_S, Followers
from picotron_ray.runtime.driver import follow_run
from picotron_ray.runtime.driver.console import ProgressView
from picotron_ray.runtime.driver.ended_run import stored_end
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay, exit_file
from tests.support.runs.coordinator_world import job as a_job

Answer = dict[str, Any] | None | Callable[[], None]


def status(
    term: int, *seqs: int, done: bool = False, waiting: int = 0, stopping: bool = True, recalled: int = 0
) -> dict[str, Any]:
    events = [{"seq": n, "t": 0.0, "level": "info", "kind": "", "text": f"event {term}.{n}"} for n in seqs]
    return {
        "run": "night",
        "state": "running",
        "term": term,
        "continues": False,
        "recalled": recalled,
        "generation": None,
        "layout": None,
        "members": [],
        "step": 1,
        "steps": 2,
        "loss": None,
        "tokens_per_s": None,
        "events": events,
        "done": done,
        "stopping": stopping,
        "waiting": waiting,
    }


LIVING: Any = SimpleNamespace(running=True)
"""A local Ray that goes on."""


class Coordinator:
    """Answers a poll with the next status, numbered events as the real one does; None: unreachable."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []
        self.requests: list[str] = []

    def poll(self, since: int) -> dict[str, Any] | None:
        self.asked.append(since)
        answer = self.answers.pop(0)
        if callable(answer):
            answer()
            return None
        if answer is None:
            return None
        return {**answer, "events": [event for event in answer["events"] if event["seq"] > since]}


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[[Coordinator], tuple[Any, str]]:
    """Follow a coordinator; returns the last status and everything that was printed."""
    monkeypatch.setattr(follow_run, "POLL_S", 0.0)
    monkeypatch.setattr(follow_run, "poll", lambda coordinator, since, follower: coordinator.poll(since))
    monkeypatch.setattr(follow_run, "_request", lambda coordinator, what: coordinator.requests.append(what))

    def follow(
        coordinator: Coordinator,
        local: Any = LIVING,
        ended: Any = lambda term: None,
        attached: bool = False,
    ) -> tuple[Any, str]:
        with open(os.devnull, "w") as sink:
            console = Console(file=sink, record=True, width=200)
            with follow_run.signal_handlers() as signals, ProgressView(console) as progress:
                final = follow_run.follow(
                    "night", coordinator, progress, signals, local=local, ended=ended, attached=attached
                )
        return final, console.export_text()

    return follow


def test_every_event_is_shown_once_through_an_outage_and_a_restart(shown: Any) -> None:
    coordinator = Coordinator(
        status(1, 1, 2),
        None,
        status(1, 1, 2, 3),
        None,
        status(2, 1, 2),
        status(2, 1, 2),
        status(2, 1, 2, 3, done=True),
    )
    final, text = shown(coordinator)
    assert final["done"]
    seen = [line.split()[-1] for line in text.splitlines() if "event" in line]
    assert seen == ["1.1", "1.2", "1.3", "2.1", "2.2", "2.3"]
    assert coordinator.asked == [0, 2, 2, 3, 3, 0, 2]


def test_a_stop_is_asked_for_until_the_coordinator_knows_over_its_restarts(shown: Any) -> None:
    coordinator = Coordinator(
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        status(1, stopping=False),
        None,
        status(2, stopping=False),
        status(2),
        status(2, done=True, stopping=False),
    )
    shown(coordinator)
    assert coordinator.requests == ["stop"] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_once_for_a_stop_and_waits_for_the_end(number: signal.Signals, shown: Any) -> None:
    before = signal.getsignal(number)
    coordinator = Coordinator(
        status(1, 1), lambda: os.kill(os.getpid(), number), status(1), status(1), status(1, done=True)
    )
    final, text = shown(coordinator)
    assert final["done"]
    assert coordinator.requests == ["stop"]
    assert text.count("stopping at the next step") == 1
    assert signal.getsignal(number) == before


def test_a_second_interrupt_leaves_the_run_but_a_second_term_does_not(shown: Any) -> None:
    def send(number: signal.Signals) -> Callable[[], None]:
        return lambda: os.kill(os.getpid(), number)

    final, _ = shown(Coordinator(send(signal.SIGINT), send(signal.SIGINT)))
    assert final is None
    coordinator = Coordinator(send(signal.SIGTERM), send(signal.SIGTERM), status(1, done=True))
    final, _ = shown(coordinator)
    assert final is not None
    assert coordinator.requests == ["stop"]


def test_a_silent_coordinator_is_given_up(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_run, "SILENCE_S", -1.0)
    with pytest.raises(follow_run.LostRunError, match="`picotron-ray logs night`") as lost:
        shown(Coordinator(None))
    assert lost.value.exit_code == 1


def test_a_run_that_somebody_else_ended_is_told_at_once(shown: Any) -> None:
    ray = SimpleNamespace(running=True, exit_status="")
    coordinator = Coordinator(status(1, 1), None, lambda: setattr(ray, "running", False), status(1, 2))
    with pytest.raises(
        follow_run.LostRunError, match=r"night was ended from outside.*launch it again"
    ) as lost:
        shown(coordinator, ray)
    assert lost.value.exit_code == 1
    assert len(coordinator.answers) == 1, "silence alone is waited out; of a dead Ray nothing more is asked"


def test_a_ray_that_died_is_not_blamed_on_a_person(shown: Any, tmp_path: Path) -> None:
    ray = LocalRay("night", "mark", 1, "127.0.0.1:1", str(tmp_path), "")
    assert not ray.exit_status
    exit_file(tmp_path).write_text("1")
    with pytest.raises(follow_run.LostRunError, match=r"ended by itself \(its head exited with 1\)"):
        shown(Coordinator(status(1, 1), None), ray)


def test_an_end_that_nobody_told_this_driver_is_the_one_that_storage_has(shown: Any, tmp_path: Path) -> None:
    """It was stopped for longer than a coordinator that is done lingers."""
    job = a_job(name="night", storage__url=str(tmp_path))
    ended = partial(stored_end, job)

    def run() -> Coordinator:
        return Coordinator(status(3, 1), None, None)

    storage, gone = open_storage(job.storage, job.name), SimpleNamespace(running=False, exit_status="")
    with pytest.raises(follow_run.LostRunError):
        shown(run(), gone, ended)
    summary = {"term": 2, "status": "finished", "detail": "", "steps": 4}
    for torn in (b"{", json.dumps(summary).encode(), json.dumps({**summary, "term": 3}).encode()[:-1]):
        storage.put("summary.json", torn)
        with pytest.raises(follow_run.LostRunError):  # that of an earlier launch says nothing of this one
            shown(run(), gone, ended)
    for name, code in (("finished", 0), ("failed", 3), ("storage", 4)):
        summary = {**summary, "term": 3, "status": name}
        storage.put("summary.json", json.dumps(summary).encode())
        final, text = shown(run(), gone, ended)
        assert (final["state"], final["exit_code"], final["summary"]) == (name, code, summary)
        assert f"run night ended as {name}" in text


def test_the_end_is_not_left_before_all_have_heard_of_it(
    shown: Callable[[Coordinator], tuple[Any, str]],
) -> None:
    run = Coordinator(
        status(1, 1), status(1, 1, 2, done=True, waiting=1), status(1, 1, 2, done=True), status(1, 3)
    )
    final, text = shown(run)
    assert final["done"]
    assert len(run.answers) == 1, "asked until nobody was waiting, and not once more"
    assert text.count("event 1.2") == 1


def test_what_was_heard_of_the_end_stays_heard(shown: Callable[[Coordinator], tuple[Any, str]]) -> None:
    final, _ = shown(Coordinator(status(1, 1, done=True, waiting=1), None, status(1, 2)))
    assert final["done"]


def test_followers_forget_those_that_stopped_asking() -> None:
    followers = Followers()
    assert followers.answered("a", False, 0.0) == 0
    assert followers.answered("b", False, 0.1) == 1
    assert followers.answered("a", True, 0.2) == 1
    assert followers.answered("a", True, 0.3 + RECENT_S) == 0, "b is gone"
    assert followers.answered("b", False, 10.0) == 0
    assert followers.answered("a", True, 10.0) == 1
    assert followers.answered("b", True, 10.1) == 0
    assert followers.answered("a", True, 10.1) == 0


def test_polls_are_paced(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(follow_run, "POLL_S", 0.5)
    monkeypatch.setattr(follow_run, "time", SimpleNamespace(monotonic=lambda: 1.0, sleep=naps.append))
    shown(Coordinator(status(1, 1), None, status(1, 1, done=True)))
    assert naps == [0.5, 0.5]


def test_a_later_command_shows_what_is_new_and_says_how_to_see_the_rest(shown: Any) -> None:
    def told(text: str) -> list[str]:
        return [line for line in text.splitlines() if "event" in line]

    older = "2 earlier events are shown by `picotron-ray status night`"
    _, text = shown(Coordinator(status(3, 1, 2), status(3, 1, 2, 3, done=True)), attached=True)
    assert [line.split()[-1] for line in told(text)[1:]] == ["3.3"]
    assert told(text)[0] == older
    launched = [status(3, 1, 2, 9, recalled=2), status(3, 1, 2, 9, 10, done=True, recalled=2)]
    _, text = shown(Coordinator(*launched))
    assert told(text)[0] == older
    assert [line.split()[-1] for line in told(text)[1:]] == ["3.9", "3.10"]
    # a coordinator that answers before it has looked into its logs
    _, text = shown(Coordinator(status(0), *launched))
    assert [line.split()[-1] for line in told(text)[1:]] == ["3.9", "3.10"]
