"""The trainer beside fakes, without a Ray: which run it takes up, what callbacks hear, how it is left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import driver, resolve_job
from picotron_ray.runtime.driver.consent import NOT_ASKED, PYTHON, Consent
from picotron_ray.runtime.ray_cluster import placement
from picotron_ray.runtime.ray_train import trainer as module
from picotron_ray.runtime.ray_train.trainer import ElasticTrainer, _stop, _Watcher, figures
from tests.support.runs.coordinator_world import job
from tests.support.runs.remembered import remember

JOB = job(name="night")
CHECKED = SimpleNamespace(job=job(name="night", steps=77), follows=4)


class Bench:
    """A trainer whose parts note what they are told."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.told: list[Any] = []
        self.now = 100.0
        self.statuses: list[Any] = []
        self.found: list[Any] = []
        patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        patch.setattr(module.follow_run, "POLL_S", 0.5)
        patch.setattr(module.follow_run, "find_coordinator", lambda run: self.found.pop(0))
        patch.setattr(module.follow_run, "poll", lambda found, since: self.statuses.pop(0))
        patch.setattr(module.follow_run, "take_down", self.note("take down"))
        patch.setattr(module.ray, "kill", self.note("kill"))
        patch.setattr(module.ray, "is_initialized", lambda: self.given)
        patch.setattr(module, "resolve_job", self.note("resolve"))
        check = self.note("check")

        def check_machine(job: Any, own_ray: bool, relative_url: str, _: Any) -> Any:
            return check(job, own_ray, relative_url) or CHECKED

        patch.setattr(module, "check_machine", check_machine)
        patch.setattr(
            module.driver, "prepare", lambda job, *_: ("local", SimpleNamespace(job=job, follows=4))
        )
        patch.setattr(
            module.driver,
            "ensure_coordinator",
            lambda job, owns_ray, tied_to, follows: (
                self.told.append(("ensure", owns_ray, tied_to, follows)) or ("new", False)
            ),
        )
        patch.setattr(module.owner_process, "this_process", lambda: {"pid": 1})
        self.given = False
        self.trainer: Any = ElasticTrainer.__new__(ElasticTrainer)
        self.trainer.job, self.trainer._relative_url, self.trainer._consent = JOB, "runs", NOT_ASKED
        self.trainer._follows = 4

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.told.append(("sleep", seconds))

    def note(self, name: str) -> Any:
        return lambda *words: self.told.append((name, *words))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


@pytest.mark.parametrize("local", [None, "local"])
def test_a_run_that_is_done_is_taken_away_before_a_new_one(bench: Bench, local: Any) -> None:
    bench.found, bench.statuses = ["old", "old", None], [{"done": True}, {"done": True}]
    assert bench.trainer._start(local) == ("new", False)
    checked = [("check", JOB, False, "runs")] if local is None else []
    away = [("kill", "old"), ("sleep", 0.5)]
    assert bench.told == [*away, *away, *checked, ("ensure", local is not None, {"pid": 1}, 4)]
    assert bench.trainer.job == (JOB if local else CHECKED.job), "what was checked is what runs"


class BegunError(Exception):
    """Nothing was refused."""


def begun(*_: Any, **__: Any) -> None:
    raise BegunError


@pytest.fixture(params=[False, True], ids=["own Ray", "given Ray"])
def before_ray(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks neither the machine nor Ray; whatever is let by raises `BegunError`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(module.ray, "is_initialized", lambda: request.param)
    monkeypatch.setattr(module.follow_run, "find_coordinator", lambda run: None)
    monkeypatch.setattr(resolve_job, "ON_THE_MACHINE", ())
    monkeypatch.setattr(placement, "connected", lambda: False)
    monkeypatch.setattr(driver.connect, "connect", begun)
    monkeypatch.setattr(driver, "ensure_coordinator", begun)


def named(url: str) -> JobConfig:
    return load_job("tiny", ["name=night", f"storage.url={url}"])


@pytest.mark.usefixtures("before_ray")
def test_an_empty_storage_is_refused_in_this_doors_words_and_begun_in_where_asked(tmp_path: Path) -> None:
    remember(named(str(tmp_path)), "a")
    with pytest.raises(ConfigError, match=r"saw nothing of run 'night'.*give begin_anew=True or choose"):
        ElasticTrainer(named(str(tmp_path))).fit()
    with pytest.raises(BegunError):
        ElasticTrainer(named(str(tmp_path)), begin_anew=True).fit()


@pytest.mark.usefixtures("before_ray")
def test_a_relative_folder_is_refused_where_the_run_of_another_is_unfinished(tmp_path: Path) -> None:
    """As by a launch; for a Ray of its own this door forgot that the user's folder was relative."""
    remember(named(str(tmp_path / "one")), "a")
    with pytest.raises(ConfigError, match=r"saw nothing of run 'night'.*expected its commits up to step 40"):
        ElasticTrainer(named("./two")).fit()


@pytest.mark.usefixtures("before_ray")
def test_a_run_that_goes_on_elsewhere_is_ended_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Consent] = []
    monkeypatch.setattr(resolve_job, "await_silence", lambda run, storage, consent: told.append(consent))
    for wanted in (False, True):
        with pytest.raises(BegunError):
            ElasticTrainer(named(str(tmp_path)), take_over=wanted).fit()
    assert [consent.take_over for consent in told] == [False, True]
    assert {consent.options for consent in told} == {PYTHON}


@pytest.mark.parametrize("status", [None, {"done": False}])
def test_a_run_that_goes_on_is_joined(bench: Bench, status: Any) -> None:
    bench.found, bench.statuses = ["old"], [status]
    assert bench.trainer._start("local") == ("old", True)
    assert [words[0] for words in bench.told] == ["resolve"]


def test_a_stopped_run_is_taken_up_again_and_nothing_is_left(bench: Bench) -> None:
    starts = iter([("old", True), ("new", False)])
    ends = iter([{"state": "stopped", "summary": {}}, {"state": "stopped", "summary": {"steps": 3}}])
    bench.trainer._start = lambda local: next(starts)
    bench.trainer._follow = lambda coordinator, local: next(ends)
    assert bench.trainer._train() == {"steps": 3}
    assert bench.told == [("kill", "old"), ("take down", "local", "new")]
    bench.told.clear()
    bench.given = True
    bench.trainer._start = lambda local: bench.told.append(local) or ("old", True)
    bench.trainer._follow = lambda coordinator, local: {"state": "finished", "summary": {"steps": 9}}
    assert bench.trainer._train() == {"steps": 9}
    assert bench.told == [None, ("kill", "old")], "the Ray that was given stays"


def test_a_stop_is_waited_for_but_not_for_ever(bench: Bench) -> None:
    asked: list[str] = []
    coordinator = SimpleNamespace(request=SimpleNamespace(remote=asked.append))
    bench.statuses = [None, {"done": False}, {"done": True}]
    _stop(coordinator)
    assert (asked, bench.told) == (["stop"], [("sleep", 0.5)] * 2)
    bench.statuses = [{"done": False}] * 10_000
    bench.now = 0.0
    _stop(coordinator)
    assert bench.now == module.STOP_S


def status(step: int, committed: int | None = None, **more: Any) -> dict[str, Any]:
    plain = {"step": step, "loss": 2.0, "eval_loss": None, "eval_step": None, "tokens_per_s": None}
    rest = {
        "committed": committed,
        "failures": [],
        "members": ["a", "b"],
        "pages": {"a": {"step_time_s": 0.5}},
    }
    return {**plain, **rest, **more}


def test_figures_have_a_row_for_each_worker() -> None:
    common = {"step": 3, "loss": 2.0}
    assert figures(status(3)) == [
        {**common, "rank": 0, "worker": "a", "step_time_s": 0.5},
        {**common, "rank": 1, "worker": "b", "step_time_s": None},
    ]
    assert figures(status(3, members=[])) == [common]


def test_callbacks_hear_of_news_commits_and_failures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def report(context: Any, rows: list[Any], checkpoint: Any) -> None:
        told.append((rows[0]["step"], len(rows), checkpoint))

    def fail(context: Any, failed: dict[int, Exception]) -> None:
        told.extend((rank, str(error)) for rank, error in failed.items())

    callback = SimpleNamespace(after_report=report, after_exception=fail)
    context: Any = SimpleNamespace(run_config=SimpleNamespace(callbacks=[callback]))
    monkeypatch.setattr(module, "_newest_checkpoint", lambda job: "commit")
    seen: list[Any] = []
    view: Any = SimpleNamespace(
        say=lambda *words: seen.append(words), show=lambda status: seen.append("show")
    )
    watcher = _Watcher(JOB, context, view)
    for shown in (status(0), status(1), status(1), status(2, 2), status(3, 2), status(3, 2, eval_step=3)):
        watcher.show(shown)
    assert told == [(1, 2, None), (2, 2, "commit"), (3, 2, None), (3, 2, None)]
    told.clear()
    failure = {"kind": "hang", "target": "b", "step": 3}
    lost = {"kind": "node-lost", "target": "n", "step": 4}
    watcher.show(status(3, 2, eval_step=3, failures=[failure], members=["b"]))
    watcher.show(status(3, 2, eval_step=3, failures=[failure, lost], members=["b"]))
    watcher.show(status(3, 2, eval_step=3, failures=[failure, lost, failure]))
    assert told == [(1, "hang of b at step 3"), (-1, "node-lost of n at step 4"), (0, "hang of b at step 3")]
    watcher.say("x", "red")
    assert seen == ["show"] * 9 + [("x", "red")]
    alone = _Watcher(JOB, SimpleNamespace(run_config=SimpleNamespace(callbacks=None)), None)  # type: ignore[arg-type]
    alone.say("x")
    alone.show(status(1, 1, failures=[failure]))


@pytest.mark.parametrize(("bodies", "newest"), [([], None), (["a", "b"], "b")])
def test_the_newest_commit_is_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, bodies: list[str], newest: str | None
) -> None:
    refreshed: list[bool] = []
    log = SimpleNamespace(
        refresh=lambda: refreshed.append(True), commits=lambda: [SimpleNamespace(body=b) for b in bodies]
    )
    monkeypatch.setattr(module, "open_storage", lambda storage, name: name)
    monkeypatch.setattr(module, "RunLog", lambda storage: log)
    monkeypatch.setattr(module, "CommitCheckpoint", lambda storage, name, body: (name, body))
    assert module._newest_checkpoint(JOB) == (None if newest is None else ("night", newest))
    assert refreshed == [True]
