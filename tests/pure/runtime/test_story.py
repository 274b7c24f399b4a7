"""Reports, lists and differences of runs, from storage alone."""

from __future__ import annotations

import json
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.cli import app
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.observability.goodput import CAUSES, FAILURE_CAUSES
from picotron_ray.runtime.driver import story
from picotron_ray.runtime.run_storage.life_sign import SILENT_S
from picotron_ray.runtime.run_storage.stored_run import CUT_OFF, read_brief
from tests.support.runs.stored_runs import BEGAN_S, STEPS, make, sign


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("story")
    make(folder, "done", finished=True)
    return make(folder, "left", finished=False).parent


@pytest.fixture
def done(runs: Path, tmp_path: Path) -> Path:
    """Folder of a run that has finished."""
    return Path(shutil.copytree(runs / "done", tmp_path / "runs" / "done"))


@pytest.fixture
def left(runs: Path, tmp_path: Path) -> Path:
    """Folder of a run without an end."""
    return Path(shutil.copytree(runs / "left", tmp_path / "runs" / "left"))


def state_of(folder: Path, now_s: float) -> str:
    storage = open_storage(StorageConfig(url=str(folder.parent)), folder.name)
    return read_brief(storage, folder.name, now_s).vitals.state


class Outline(HTMLParser):
    """What a page would load, its headings, and whether its tags are balanced."""

    VOID = ("meta", "link", "img", "br", "input", "rect", "line", "polyline")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.ids: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.loads += [f"{tag} {known[name]}" for name in ("src", "href", "srcset", "data") if name in known]
        self.loads += [tag] if tag in ("script", "link", "iframe", "object", "embed", "base") else []
        self.ids += [known["id"] or ""] if "id" in known else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_of_a_finished_run(done: Path) -> None:
    found = story.report(str(done))
    account = found.account
    assert (account["state"], account["step"], account["loss"]) == ("finished", STEPS, 2.0)
    assert sum(account["seconds"].values()) == pytest.approx(account["wall_s"])
    assert account["wall_s"] == pytest.approx(31.0)
    assert set(account["seconds"]) == set(CAUSES)
    (failure,) = account["failures"]
    parts = {cause: failure[f"{cause}_s"] for cause in FAILURE_CAUSES}
    assert parts == pytest.approx(
        {"detect": 2.0, "decide": 1.0, "rebuild": 1.0, "restore": 1.0, "recompute": 1.0}
    )
    assert account["ledger"]["lost"] == 0
    assert account["recoveries"][0]["rung"] == "snapshots in memory"
    assert account["environment"]["environment"]["torch"]
    assert json.loads(json.dumps(account)) == account
    page = Outline(found.page)
    assert page.open == []
    assert page.loads == ["a #main"]
    assert len(page.ids) == len(set(page.ids))
    assert found.page.count("<svg ") == found.page.count('role="img"') >= 4
    for words in ("Audited goodput", "worker-exited", "dp2", "a test <&> needs it", "12 of 12", "0 lost"):
        assert words in page.text
    assert not re.search(r"(?i)https?://", found.page)


def test_a_dead_run_is_told_from_one_that_goes_on(left: Path) -> None:
    sign(left, 1000.0)
    assert state_of(left, 1010.0) == "running"
    assert state_of(left, 1000.0 + 2 * SILENT_S) == CUT_OFF
    sign(left, BEGAN_S + 70.0)
    account = story.report(str(left)).account
    assert (account["state"], account["ledger"]) == (CUT_OFF, None)
    assert sum(account["seconds"].values()) == pytest.approx(account["wall_s"])
    assert account["seconds"]["unknown"] > 0, "between its last record and its last sign of life"
    sign(left, 1000.0, ended="stopped")
    assert state_of(left, 1e10) == "stopped"


def test_a_run_whose_objects_are_torn_is_reported_as_far_as_it_goes(done: Path) -> None:
    (record,) = (done / "records").glob("*-000002.json")
    record.write_bytes(record.read_bytes()[:-20])
    (segment,) = (done / "telemetry").glob("segment-*")
    segment.write_bytes(b"torn")
    for ledger in (done / "ledger").glob("*"):
        ledger.write_bytes(b"{")
    found = story.report(str(done))
    assert found.account["failures"][0]["kind"] == "worker-exited", "by the record before"
    assert len(found.account["complaints"]) == 3
    assert Outline(found.page).open == []


def test_a_run_that_has_only_begun_has_a_report(done: Path) -> None:
    for entry in ("records", "telemetry", "ledger", "manifests", "log"):
        for file in (done / entry).rglob("*"):
            file.unlink()
    found = story.report(str(done))
    assert found.account["failures"] == []
    assert set(found.account["seconds"].values()) == {0.0}
    assert "Nothing is known of this" in found.page


def test_report_writes_page_and_account(done: Path, tmp_path: Path) -> None:
    page, account = tmp_path / "r.html", tmp_path / "a.json"
    said = CliRunner().invoke(app, ["report", str(done), "--to", str(page), "--json", str(account)])
    assert said.exit_code == 0, said.output
    assert page.read_text().startswith("<!doctype html>")
    keys = {"wall_s", "goodput", "seconds", "failures"}
    assert keys <= json.loads(account.read_text()).keys()
    assert "finished at step 12 of 12" in said.output
    alone = CliRunner().invoke(app, ["report", str(done), "--json", "-"])
    assert json.loads(alone.stdout)["run"] == "done"


def test_a_report_that_cannot_be_written_is_one_line_and_exit_2(done: Path) -> None:
    """It was a traceback."""
    for option, bad in (("--to", "/proc/x.html"), ("--to", "/dev/full"), ("--json", "/dev/full")):
        said = CliRunner().invoke(app, ["report", str(done), option, bad])
        assert said.exit_code == 2, said.output
        assert said.stderr.startswith(f"error: {option}: cannot write {bad}: ")
        assert len(said.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tiny-nothing-here", "--json", "-"], "run: saw 'tiny-nothing-here', expected the name of a run"),
        (["tiny-nothing-here"], "or its config: a YAML file, or a packaged recipe"),
        (["{folder}/other", "--json", "-"], "other', expected the name of a run, or its address in storage"),
        (["{folder}x", "--json", "-"], "did you mean '{folder}'?"),
        (["{folder}/..", "--json", "-"], "; this folder holds runs: done (give {folder}/../done)"),
        (["{folder}"], "--to: saw neither"),
        (["{folder}", "--to", "{folder}/none/r.html"], "expected a file in a folder that exists"),
        (["file://{folder}x", "--to", "{folder}/r.html"], "expected a local folder or s3://"),
    ],
)
def test_bad_words_are_one_line_and_exit_2(done: Path, words: list[str], says: str) -> None:
    said = CliRunner().invoke(app, ["report", *(word.format(folder=done) for word in words)])
    assert said.exit_code == 2
    assert says.format(folder=done) in said.output


def test_a_config_names_its_run(done: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = {"name": "done", "storage": {"url": str(tmp_path / "runs")}}
    (tmp_path / "job.yaml").write_text(json.dumps(config))
    assert story.report(str(tmp_path / "job.yaml")).account["run"] == "done"


def test_all_runs_below_a_folder_are_listed(done: Path, left: Path, tmp_path: Path) -> None:
    sign(left, time.time() - 1)
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "run.json").write_text("{")
    listed = tmp_path / "runs.json"
    said = CliRunner().invoke(app, ["runs", str(tmp_path / "runs"), "--json", str(listed)])
    assert said.exit_code == 0, said.output
    rows = {row["name"]: row for row in json.loads(listed.read_text())}
    assert {name: row["state"] for name, row in rows.items()} == {
        "done": "finished",
        "left": "running",
        "bad": "unreadable",
    }
    assert rows["done"].keys() >= {"name", "state", "step", "loss", "goodput", "updated_s"}
    assert (rows["done"]["step"], rows["done"]["loss"]) == (STEPS, 2.0)
    assert 0 < rows["left"]["goodput"] < 1
    assert said.output.splitlines()[0].split() == ["name", "state", "step", "loss", "goodput", "age"]
    sign(left, time.time() - 2 * SILENT_S)
    assert "cut-off" in CliRunner().invoke(app, ["runs", str(tmp_path / "runs")]).output


def test_the_address_of_a_run_lists_that_run(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said that no run is in it."""
    monkeypatch.chdir(done.parent)
    for word in ("done", "./done/", str(done)):
        said = CliRunner().invoke(app, ["runs", word, "--json", "-"])
        assert [row["name"] for row in json.loads(said.stdout)] == ["done"]
    said = CliRunner().invoke(app, ["runs", "done/log"])
    assert (said.exit_code, said.output) == (0, "no run is in done/log\n")


def test_two_runs_are_compared(done: Path, left: Path, tmp_path: Path) -> None:
    config = json.loads((left / "launch.json").read_text())
    config["config"]["seed"] = 7
    (left / "launch.json").write_text(json.dumps(config))
    said = CliRunner().invoke(app, ["runs", "diff", str(done), str(left), "--json", "-"])
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert found["runs"] == ["done", "left"]
    assert found["config"] == {"name": ["done", "left"], "seed": [0, 7]}
    assert found["environment"] == {}
    assert found["curves"]["newest"] == {"step": STEPS, "loss": [2.0, 2.0]}
    text = CliRunner().invoke(app, ["runs", "diff", str(done), str(left)]).output
    assert "seed: 0 against 7" in text
    assert "loss at the newest common step 12: 2 against 2" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{folder}/nowhere"], "does not exist"),
        (["{folder}/done/run.json"], "run.json is a file; expected a folder of runs"),
        (["dif", "{folder}/done", "{folder}/done"], "expected one URL, or: diff RUN RUN; did you mean diff?"),
        (["diff", "{folder}"], "expected one URL, or: diff RUN RUN"),
        (["diff", "{folder}/done", "{folder}/nobody"], "second run: saw '{folder}/nobody', expected the"),
        (["diff", "nobody", "{folder}/done"], "first run: saw 'nobody', expected the name of a run"),
        (["ftp://host/runs"], "expected a local folder or s3://bucket/prefix"),
        (["s3://user:hidden@bucket/x"], "put credentials into the environment"),
    ],
)
def test_bad_words_of_runs(done: Path, words: list[str], says: str) -> None:
    said = CliRunner().invoke(app, ["runs", *(word.format(folder=done.parent) for word in words)])
    assert said.exit_code == 2
    assert says.format(folder=done.parent) in said.output
    assert "hidden" not in said.output
