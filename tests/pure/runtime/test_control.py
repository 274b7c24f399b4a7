"""Requests to a run and the end of its Ray, with a Ray that only notes what it is told."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.observability.logs.query import Query
from picotron_ray.runtime.driver import control, driver, follow_run, run_logs
from picotron_ray.runtime.driver.follow_run import StoppedEarlyError
from picotron_ray.runtime.driver.resolve_job import ResolvedJob
from picotron_ray.runtime.ray_cluster import kept_slots, local_ray
from picotron_ray.runtime.ray_cluster.names import NAMESPACE


class Remote:
    """A method of an actor."""

    def __init__(self, told: list[str], name: str) -> None:
        self._told, self._name = told, name

    def remote(self, *arguments: object) -> str:
        self._told.append(" ".join(map(str, (self._name, *arguments))))
        return self._name


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of Ray; it has actors of the runs ``night`` and ``other``."""
    calls: list[str] = []
    names = [
        "night/coordinator",
        "night/agent/n1",
        "night/worker/w1",
        "nightly/agent/n1",
        "other/coordinator",
    ]
    listed = [{"name": name, "namespace": NAMESPACE} for name in names]
    listed.append({"name": "night/agent/n2", "namespace": "else"})
    gone = {"night/worker/w1"}

    def get_actor(name: str, namespace: str) -> Any:
        assert namespace == NAMESPACE
        if name in gone:
            raise ValueError(name)
        return SimpleNamespace(name=name, close=Remote(calls, f"close {name}"))

    ray, util = ModuleType("ray"), ModuleType("ray.util")
    ray.__dict__.update(
        get_actor=get_actor,
        kill=lambda actor: calls.append(f"kill {actor.name}"),
        wait=lambda refs, num_returns, timeout: calls.append(f"wait for {num_returns} of {refs}"),
        shutdown=lambda: calls.append("shutdown"),
        util=util,
    )
    util.__dict__.update(list_named_actors=lambda all_namespaces: listed if all_namespaces else [])
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", util)
    monkeypatch.setattr(
        follow_run, "heard", lambda coordinator, what: bool([coordinator.request.remote(what)])
    )
    monkeypatch.setattr(
        local_ray,
        "stop",
        lambda local, grace_s=1.0, discard=False: calls.append(
            f"stop {local.run}" + discard * " and discard"
        ),
    )
    monkeypatch.setattr(control, "coordinator_name", lambda run: f"{run}/coordinator")
    monkeypatch.setattr(control, "agent_name", lambda run, node: f"{run}/agent/{node}")
    return calls


def test_all_actors_of_a_run_are_killed_the_coordinator_first(told: list[str]) -> None:
    assert control.kill_actors("night") == 3
    assert told == [
        "kill night/coordinator",
        "close night/agent/n1 None (0, 0, 0)",
        "wait for 1 of ['close night/agent/n1']",
        "kill night/agent/n1",
    ], "the worker has ended meanwhile"
    told.clear()
    control.kill_actors("night", discard=True)
    assert "close night/agent/n1 None None" in told
    told.clear()
    assert control.kill_actors("other") == 1
    assert told == ["kill other/coordinator"]
    assert control.kill_actors("none") == 0


def test_a_given_ray_loses_the_coordinator_and_ones_own_goes_as_a_whole(told: list[str]) -> None:
    coordinator: Any = SimpleNamespace(name="night/coordinator")
    follow_run.take_down(None, coordinator)
    assert told == ["kill night/coordinator", "shutdown"]
    told.clear()
    follow_run.take_down(None)
    assert told == ["shutdown"]
    told.clear()
    local: Any = SimpleNamespace(run="night")
    follow_run.take_down(local, coordinator)
    assert told == ["shutdown", "stop night"]


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> list[dict[str, Any] | None]:
    """Statuses that the coordinator answers, one poll each; the last one again and again."""
    answers: list[dict[str, Any] | None] = []
    coordinator = SimpleNamespace(request=Remote(told, "request"))
    monkeypatch.setattr(control, "connect_to_run", lambda run: (coordinator, None))
    monkeypatch.setattr(follow_run, "POLL_S", 0.0)
    monkeypatch.setattr(
        follow_run, "poll", lambda coordinator, since: answers.pop(0) if len(answers) > 1 else answers[0]
    )
    return answers


def seen(committed: int | None, done: bool = False) -> dict[str, Any]:
    there = {"state": "running", "step": 9, "loss": 2.0, "generation": "1.1", "waits": None}
    return {"committed": committed, "done": done, **there}


def test_a_status_is_asked_for_until_it_comes(connected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    connected += [None, None, seen(3)]
    naps: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=naps.append)
    monkeypatch.setattr(control, "time", clock)
    assert control.status("night") == seen(3)
    assert naps == [0.0, 0.0], "it does not spin"
    naps.clear()
    connected[:] = [seen(1), seen(1), None, seen(2)]
    assert control.checkpoint_now("night", 5.0) == 2
    assert naps == [0.0, 0.0]


def test_a_checkpoint_is_awaited(connected: list[Any], told: list[str]) -> None:
    connected += [seen(None), seen(None), None, seen(5)]
    assert control.checkpoint_now("night", 5.0) == 5
    assert told == ["request checkpoint"]
    connected[:] = [seen(5), seen(5), seen(6, done=True)]
    assert control.checkpoint_now("night", 5.0) == 6
    connected[:] = [seen(40), seen(40), seen(25), seen(30)]
    assert control.checkpoint_now("night", 5.0) == 30, "a rewind meanwhile"
    for answers in ([seen(5), seen(5, done=True)], [seen(0), seen(None, done=True)]):
        connected[:] = answers
        with pytest.raises(follow_run.LostRunError, match="no new commit within 5 s"):
            control.checkpoint_now("night", 5.0)
    connected[:] = [seen(5)]
    with pytest.raises(follow_run.LostRunError, match="within 0 s"):
        control.checkpoint_now("night", 0.0)


def test_a_checkpoint_of_a_run_that_does_not_train_says_what_it_waits_for(
    connected: list[Any], told: list[str]
) -> None:
    waits = {"ready": 3, "needed": 100, "wanted": 100, "left_s": 87.4}
    starting = {**seen(None), "state": "starting", "term": 1, "generation": None, "waits": waits}
    connected += [starting, starting, starting, seen(5)]
    said: list[str] = []
    assert control.checkpoint_now("night", 5.0, said.append) == 5
    missing = (
        "workers to start: 3 of 100 workers ready (cluster.min_workers); the run ends in 87 s without them"
    )
    assert said == [f"run night commits once it trains: waiting for {missing}"]
    connected[:] = [starting, starting, {**starting, "done": True}]
    with pytest.raises(follow_run.LostRunError, match="within 5 s, waiting for workers to start: 3 of 100"):
        control.checkpoint_now("night", 5.0)


@pytest.mark.parametrize(
    ("found", "now", "cluster", "ended"),
    [(None, True, "", False), (True, False, "", False), (True, True, "", True), (False, False, "", True),
     (False, True, "x:1", False)],
)  # fmt: skip
def test_a_local_ray_that_is_dead_or_unwanted_is_ended(
    found: bool | None, now: bool, cluster: str, ended: bool, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    local = None if found is None else SimpleNamespace(run="night", alive=found, folders=())
    monkeypatch.setattr(local_ray, "find", lambda run: local)
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    assert control._is_local_and_dead_or_unwanted("night", now) is ended
    assert told == (["stop night"] if ended else [])


@pytest.fixture
def rays(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> dict[str, Any]:
    """Local Rays by run; the coordinator of ``night`` lives on whatever is connected."""
    found: dict[str, Any] = {}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(local_ray, "find", found.get)
    monkeypatch.setattr(local_ray, "runs", lambda: sorted(found.keys() - {"status"}))
    monkeypatch.setattr(control.connect, "connect_to", lambda address: told.append(f"connect to {address}"))
    monkeypatch.setattr(control.connect, "attach", lambda local: told.append(f"attach to {local.run}"))
    placement: Any = ModuleType("placement")
    placement.kept_on, placement.living_nodes = lambda *_: {}, lambda: "the nodes"
    placement.ask_nodes = lambda *_: {}
    monkeypatch.setitem(sys.modules, "picotron_ray.runtime.ray_cluster.placement", placement)
    coordinator = SimpleNamespace(request=Remote(told, "request"))
    monkeypatch.setattr(follow_run, "poll", lambda coordinator, since: found.get("status"))
    monkeypatch.setattr(follow_run, "find_coordinator", lambda run: coordinator if run == "night" else None)
    return found


def test_a_run_is_found_on_its_own_ray_or_on_the_one_that_is_named(
    rays: dict[str, Any], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(run: str) -> str:
        with pytest.raises(control.ConfigError) as caught:
            control.connect_to_run(run)
        return str(caught.value)

    nowhere = "run: saw 'night', which does not run on this machine (local runs: {}; set RAY_ADDRESS to look"
    assert refused("night").startswith(nowhere.format("none"))
    rays["night"] = SimpleNamespace(run="night", alive=False)
    rays["other"] = SimpleNamespace(run="other", alive=True)
    assert refused("night").startswith(nowhere.format("other")), "what is over does not run here"
    assert told == []
    assert refused("other").startswith("run: saw 'other', which does not run on its Ray here, and no launch")
    rays["night"].alive = True
    coordinator, local = control.connect_to_run("night")
    assert (coordinator is not None, local) == (True, rays["night"])
    assert told == ["attach to other", "attach to night"]
    told.clear()
    monkeypatch.setenv("RAY_ADDRESS", "x:1")
    assert control.connect_to_run("night") == (coordinator, None)
    assert refused("other") == "run: saw 'other', which does not run on the Ray at x:1"
    assert told == ["connect to x:1"] * 2


def test_a_stop_of_a_name_that_was_never_launched_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for now, discard in ((False, False), (True, False), (False, True)):
        with pytest.raises(control.ConfigError, match="run: saw 'nobody', which does not run on this"):
            control.stop("nobody", now, Console(), discard)
    assert list(tmp_path.iterdir()) == []


def test_a_stop_follows_the_run_to_its_end(
    rays: dict[str, Any], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    final: list[Any] = [{"exit_code": 130, "summary": {"status": "stopped"}}]
    monkeypatch.setattr(
        follow_run, "follow", lambda *_, stop, local, attached: final[0] if stop and attached else 1 / 0
    )
    monkeypatch.setattr(
        follow_run, "take_down", lambda local, coordinator: told.append(f"take down {local.run}")
    )
    rays["night"] = SimpleNamespace(run="night", alive=True, folders=())
    console = Console(file=io.StringIO())
    assert control.stop("night", False, console) == (0, {"status": "stopped"})
    assert told == ["attach to night", "request stop", "take down night"]
    told.clear()
    for code, status, expected in ((0, "finished", 0), (3, "failed", 3), (4, "storage", 4)):
        final[0] = {"exit_code": code, "summary": {"status": status}}
        assert control.stop("night", False, console) == (expected, {"status": status})
    told.clear()
    final[0] = None
    assert control.stop("night", False, console) == (1, None)
    assert "left stopping" in console.file.getvalue()  # type: ignore[attr-defined]
    assert told == ["attach to night", "request stop"], "the user left"
    told.clear()
    assert control.stop("night", True, console) == (0, None)
    assert told == ["attach to night", "shutdown", "stop night"]
    assert console.file.getvalue().endswith("run night: ended, without a commit\n")  # type: ignore[attr-defined]


def test_what_storage_has_not_taken_is_not_deleted_unless_told(
    rays: dict[str, Any], told: list[str], tmp_path: Path
) -> None:
    console = Console(file=io.StringIO())
    rays["night"] = SimpleNamespace(run="night", alive=True, folders=(str(tmp_path),))
    rays["status"] = {"uncommitted": True, "step": 40, "committed": None}
    with pytest.raises(
        control.ConfigError, match="'night' at step 40 is committed up to step 0 only; stop it"
    ):
        control.stop("night", True, console)
    assert told == ["attach to night", "shutdown"], "nothing was ended"
    told.clear()
    assert control.stop("night", False, console, discard=True) == (0, None)
    assert told == ["stop night and discard"]
    told.clear()
    rays["night"].alive = False
    (tmp_path / "n1").mkdir()
    kept_slots.mark(tmp_path / "n1", {"w1.0.slot": 40}, None)
    for ask in (lambda: control.stop("night", False, console), lambda: control.status("night")):
        with pytest.raises(
            control.StorageError, match=r"'night' has ended.*keeps step 40.*launch it again"
        ) as kept:
            ask()
        assert kept.value.exit_code == 4
    assert told == ["stop night"], "its processes are gone"
    rays["status"]["uncommitted"] = False
    rays["night"] = SimpleNamespace(run="night", alive=True, folders=())
    assert control.stop("night", True, console) == (0, None)


def test_a_stop_on_a_cluster_kills_what_is_left(
    rays: dict[str, Any], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO())
    monkeypatch.setenv("RAY_ADDRESS", "x:1")
    assert control.stop("night", True, console) == (0, None)
    assert told[:3] == ["connect to x:1"] * 2 + ["kill night/coordinator"]
    told.clear()
    assert control.stop("nightly", False, console) == (0, None), "its coordinator is gone"
    assert "kill nightly/agent/n1" in told
    with pytest.raises(control.ConfigError, match="saw 'none'"):
        control.stop("none", False, console)
    monkeypatch.delenv("RAY_ADDRESS")
    told.clear()
    with pytest.raises(control.ConfigError, match="saw 'nightly'"):
        control.stop("nightly", False, console)
    assert told == []


def test_a_stop_on_a_cluster_asks_its_nodes_for_what_they_keep(
    rays: dict[str, Any], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    kept = {"n1": 30, "n2": 40}

    def look(nodes: Any, run: str, folder: str, discard: bool) -> dict[str, int]:
        asked.append((nodes, run, folder, discard))
        return kept

    placement: Any = sys.modules["picotron_ray.runtime.ray_cluster.placement"]
    monkeypatch.setattr(placement, "kept_on", look)
    monkeypatch.setenv("RAY_ADDRESS", "x:1")
    console = Console(file=io.StringIO())
    for ask in (lambda: control.status("gone"), lambda: control.stop("gone", False, console)):
        with pytest.raises(control.StorageError, match=r"'gone' has ended.*keeps step 40 in memory"):
            ask()
        assert asked.pop() == ("the nodes", "gone", "/dev/shm", False)
    assert control.stop("gone", False, console, discard=True) == (0, None)
    assert asked == [("the nodes", "gone", "/dev/shm", True)]
    kept.clear()
    with pytest.raises(control.ConfigError, match="saw 'gone'"):
        control.stop("gone", False, console)


def test_a_start_that_fails_takes_its_ray_down(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "ensure_coordinator", fail)
    monkeypatch.setattr(driver, "take_down", taken.append)
    local, signals = SimpleNamespace(), SimpleNamespace(asked=False)
    with pytest.raises(KeyboardInterrupt):
        driver._start(ResolvedJob(JobConfig()), local, Console(file=io.StringIO()), signals)  # type: ignore[arg-type]
    assert taken == [local]
    signals.asked = True
    with pytest.raises(StoppedEarlyError, match="stopped by request before anything was started"):
        driver._start(ResolvedJob(JobConfig()), local, Console(file=io.StringIO()), signals)  # type: ignore[arg-type]
    assert taken == [local, local]


def test_what_is_kept_of_a_run_whose_ray_nobody_knows_is_told_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(control.local_ray, "find", lambda run: None)
    monkeypatch.setattr(control, "_default_folder", lambda run: tmp_path / run)
    node = tmp_path / "lost" / "node"
    node.mkdir(parents=True)
    (node / "w1.0.slot").write_bytes(b"state")
    (node / kept_slots.MARKER).write_text(json.dumps({"slots": {"w1.0.slot": 7}, "spec": None, "run": ""}))
    console = Console(file=io.StringIO())
    for ask in (lambda: control.status("lost"), lambda: control.stop("lost", False, console)):
        with pytest.raises(control.StorageError, match=r"'lost' has ended.*keeps step 7 in memory"):
            ask()
    assert control.stop("lost", False, console, discard=True) == (0, None)
    assert not node.exists()
    with pytest.raises(control.ConfigError, match="saw 'lost'"):
        control.stop("lost", False, console, discard=True)


@pytest.mark.parametrize("run", ["", "..", "../other", "a/b", "./my.yaml", "Night", "x" * 64, "night\n"])
def test_a_word_that_can_be_no_runs_name_is_refused(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would become a part of the paths that `stop` removes."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("find", "stop", "locked", "log_folder"):
        monkeypatch.setattr(local_ray, name, None)
    console = Console(file=io.StringIO())
    for ask in (
        lambda: control.status(run),
        lambda: control.stop(run, now=True, console=console),
        lambda: control.stop(run, now=False, console=console, discard=True),
        lambda: control.checkpoint_now(run, 1.0),
        lambda: list(run_logs.log_lines(run, Query())),
    ):
        with pytest.raises(control.ConfigError, match=r"^run: saw .*, expected the name of a run") as refused:
            ask()
        assert len(str(refused.value).splitlines()) == 1
