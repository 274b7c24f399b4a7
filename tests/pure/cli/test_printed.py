"""Words of each command, what it asks of the package, and what it prints: as text, and as JSON."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from picotron_ray import cli, launch
from picotron_ray.config.json_schema import job_schema
from picotron_ray.config.load import load_job
from picotron_ray.config.resume import markdown, table
from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.observability.catalogue import CATALOGUE
from picotron_ray.observability.dashboard import dashboard
from picotron_ray.observability.logs.query import Query
from picotron_ray.runtime.driver.resolve_job import FROM_WORDS

TINY = load_job("tiny")
DRIVER = "picotron_ray.runtime.driver"
STORAGE = "picotron_ray.runtime.run_storage"
COMMIT = {"step": 7, "kept": ["newest", "best"], "problems": []}
DAMAGED = {"step": 8, "kept": [], "problems": ["chunk 1 is gone"]}
LEDGER = {"steps": 3, "samples": 24, "lost": 0, "repeated": 0, "skipped": 0, "passed_over": 0, "wrong": []}
STATUS: dict[str, Any] = {
    "run": "night", "state": "running", "layout": "dp1-tp1-pp1-mb4", "members": ["w0"], "pages": {},
    "step": 4, "steps": 9, "loss": 2.5, "tokens_per_s": 10.0,
    "submissions": [{"submission_id": "raysubmit_1"}],
    "metrics": {"endpoints": {"w0": "127.0.0.1:9"}, "file": "/targets.json"},
    "events": [{"t": 0.0, "level": "info", "kind": "start", "text": "generation 1.1"}],
}  # fmt: skip
SUMMARY: dict[str, Any] = {"run": "night", "status": "stopped", "steps": 4, "wall_s": 1.0}


class Asked:
    """Stands in for a function of the package: notes its arguments and gives what it was made with."""

    def __init__(self, gives: Any) -> None:
        self.gives = gives
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append((*arguments, named) if named else arguments)
        if isinstance(self.gives, BaseException):
            raise self.gives
        return self.gives


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], Asked]:
    def replace(name: str, gives: Any) -> Asked:
        monkeypatch.setattr(name, found := Asked(gives))
        return found

    return replace


def out(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, list(words))
    assert result.exit_code == code, result.output
    return str(result.stdout)


def test_status(asked: Callable[[str, Any], Asked]) -> None:
    status = asked(f"{DRIVER}.control.status", STATUS)
    lines = out("status", "night").splitlines()
    assert lines[:-1] == [
        "[running] step 4/9  loss 2.5000  10 tokens/s  dp1-tp1-pp1-mb4 on 1 workers",
        "rank 0: w0",
        "submitted as raysubmit_1",
        "metrics of w0: http://127.0.0.1:9/metrics",
        "all of them, for Prometheus' file_sd_configs: /targets.json",
    ]
    assert lines[-1].endswith(" generation 1.1")
    assert out("status", "night", "--json") == json.dumps(STATUS) + "\n"
    assert status.calls == [("night",), ("night",)]


def test_logs(asked: Callable[[str, Any], Asked]) -> None:
    entry = {"run": "night", "seq": 1, "time": "2026-11-26T10:00:00.000Z", "level": "stderr"}
    entry |= {"generation": "1.2", "rank": 3, "step": 17, "logger": None, "node": "abcdef0123"}
    entry |= {"worker": "w1-4", "pid": 12, "text": "one"}
    read = asked(f"{DRIVER}.run_logs.log_lines", [entry])
    shown = "2026-11-26 10:00:00.000 STDERR   1.2 rank 3 step 17 w1-4 abcdef01: one\n"
    assert out("logs", "night") == shown
    found = out("logs", "night", "-f", "--once", "--rank", "3", "--level", "error", "--json")
    assert json.loads(found) == entry
    assert read.calls == [
        ("night", Query(), False, False),
        ("night", Query(rank=3, level="error"), True, True),
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--rank", "-1"), "--rank: saw -1, expected the number of a worker"),
        (("--since", "yesterday"), "--since: saw 'yesterday', expected a time ago such as 90s"),
        (("--since", "2999-01-01"), "--since: saw '2999-01-01', expected a time that has passed; it is"),
        (("--level", "loud"), "--level: saw 'loud', expected one of debug, info, stdout"),
        (("--level", "warn"), ".*, critical; did you mean warning.$"),
        (("--level", "worning"), ".*, critical; did you mean warning.$"),
        (("--grep", "(a"), "--grep: saw .*, expected a pattern of RE2: .*missing"),
        (("--grep", "(?=a)"), "--grep: .*RE2: .*invalid perl operator"),
    ],
)
def test_bad_filters_of_logs_are_one_line(words: tuple[str, ...], told: str) -> None:
    result = CliRunner().invoke(cli.app, ["logs", "night", *words])
    assert result.exit_code == 2
    assert re.match(f"error: {told}", result.stderr), result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_stop(asked: Callable[[str, Any], Asked]) -> None:
    stop = asked(f"{DRIVER}.control.stop", (0, SUMMARY))
    assert out("stop", "night").splitlines()[0] == "run night stopped at step 4 in 1.0 s"
    assert out("stop", "night", "--now", "--json") == json.dumps(SUMMARY) + "\n"
    assert [call[:2] for call in stop.calls] == [("night", False), ("night", True)]
    stop.gives = (4, {**SUMMARY, "status": "storage"})
    assert (
        out("stop", "night", code=4).splitlines()[0]
        == "run night ended for want of storage at step 4 in 1.0 s"
    )
    assert json.loads(out("stop", "night", "--json", code=4))["status"] == "storage"
    stop.gives = (1, None)  # the user left
    assert json.loads(out("stop", "night", "--json", code=1)) == {"run": "night", "status": "stopping"}
    stop.gives = (0, None)  # it had ended
    assert out("stop", "night") == ""
    assert json.loads(out("stop", "night", "--json")) == {"run": "night", "status": "ended"}


def test_checkpoint_now(asked: Callable[[str, Any], Asked]) -> None:
    commit = asked(f"{DRIVER}.control.checkpoint_now", 12)
    assert out("checkpoint-now", "night") == "run night: step 12 is committed\n"
    assert json.loads(out("checkpoint-now", "night", "--timeout-s", "3", "--json")) == {
        "run": "night",
        "step": 12,
    }
    assert [call[:2] for call in commit.calls] == [("night", 120.0), ("night", 3.0)]


def test_tables_of_commits(asked: Callable[[str, Any], Asked]) -> None:
    rows = asked(f"{DRIVER}.storage_commands.list_commits", [COMMIT, DAMAGED])
    assert out("checkpoints", "ls", "tiny") == (
        "step  kept          problems\n7     newest; best  none\n8     none          chunk 1 is gone\n"
    )
    assert json.loads(out("checkpoints", "ls", "tiny", "steps=3", "--json")) == [COMMIT, DAMAGED]
    assert rows.calls == [(TINY,), (load_job("tiny", ["steps=3"]),)]
    rows.gives = []
    assert out("checkpoints", "ls", "tiny") == "nothing is committed\n"
    assert out("checkpoints", "ls", "tiny", "--json") == "[]\n"
    freed = asked(f"{DRIVER}.storage_commands.collect_garbage", {"retired": 2, "deleted_bytes": 100})
    assert out("checkpoints", "gc", "tiny") == "retired  deleted_bytes\n2        100\n"
    assert json.loads(out("checkpoints", "gc", "tiny", "--json")) == [freed.gives]
    out("checkpoints", "gc", "tiny", "--force")
    assert freed.calls == [(TINY, False), (TINY, False), (TINY, True)]


def test_a_damaged_commit_ends_verify_with_4(asked: Callable[[str, Any], Asked]) -> None:
    rows = asked(f"{DRIVER}.storage_commands.verify_commits", [COMMIT])
    assert out("checkpoints", "verify", "tiny") == "step  kept          problems\n7     newest; best  none\n"
    rows.gives = [COMMIT, DAMAGED]
    assert out("checkpoints", "verify", "tiny", code=4).endswith("8     none          chunk 1 is gone\n")
    assert json.loads(out("checkpoints", "verify", "tiny", "--json", code=4)) == [COMMIT, DAMAGED]
    assert rows.calls == [(TINY,)] * 3


def test_verify_tells_of_samples_without_an_update(asked: Callable[[str, Any], Asked]) -> None:
    asked(f"{DRIVER}.storage_commands.verify_ledger", {**LEDGER, "skipped": 8})
    assert out("ledger", "verify", "tiny").endswith(" 0 wrong; 8 fed without an update\n")


@pytest.mark.parametrize("wrong", [{}, {"lost": 1}, {"repeated": 2}, {"wrong": ["step 2: saw 3 rows", "x"]}])
def test_a_ledger_that_differs_ends_verify_with_4(
    wrong: dict[str, Any], asked: Callable[[str, Any], Asked]
) -> None:
    found = {**LEDGER, **wrong}
    verify = asked(f"{DRIVER}.storage_commands.verify_ledger", found)
    code = 4 if wrong else 0
    head = (
        f"ledger of 3 steps: 24 samples, {found['lost']} lost, {found['repeated']} repeated,"
        f" {len(found['wrong'])} wrong\n"
    )
    tail = "".join(f"{line}\n" for line in found["wrong"])
    assert out("ledger", "verify", "tiny", code=code) == head + tail
    assert json.loads(out("ledger", "verify", "tiny", "--json", code=code)) == found
    assert verify.calls == [(TINY,), (TINY,)]


def test_import_from_hugging_face(asked: Callable[[str, Any], Asked]) -> None:
    section = asked(f"{STORAGE}.hf_import.model_section", {"layers": 2, "heads": 4})
    assert out("checkpoints", "import-hf", "folder") == "model:\n  layers: 2\n  heads: 4\n"
    assert json.loads(out("checkpoints", "import-hf", "folder", "--json")) == section.gives
    assert [str(*call) for call in section.calls] == ["folder"] * 2
    done = asked(f"{STORAGE}.hf_import.import_hf", {"run": "tiny", "tensors": 9})
    text = "run tiny: step 0 is committed, 9 tensors from folder\n"
    assert out("checkpoints", "import-hf", "folder", "tiny") == text
    assert json.loads(out("checkpoints", "import-hf", "folder", "tiny", "--json")) == done.gives
    done.gives = {**done.gives, "note": "a head of its own"}
    assert out("checkpoints", "import-hf", "folder", "tiny") == text + "note: a head of its own\n"
    assert [(job, str(folder)) for job, folder in done.calls] == [(TINY, "folder")] * 3


def test_export_to_hugging_face(asked: Callable[[str, Any], Asked]) -> None:
    done = asked(f"{STORAGE}.hf_export.export_hf", {"run": "tiny", "step": 5, "files": 2})
    words = ("checkpoints", "export-hf", "tiny", "--to", "folder")
    assert out(*words) == "run tiny: step 5 is in folder, 2 files of tensors\n"
    assert json.loads(out(*words, "--json")) == done.gives
    out(*words, "--step", "3", "--dtype", "bfloat16", "--shard-gib", "0.5", "--weights", "ema", "--adapter")
    asked_for = [(job, str(folder), *rest) for job, folder, *rest in done.calls]
    plain = (TINY, "folder", None, "float32", 4 * 2**30, "trained", {"adapter": False})
    assert asked_for[0] == asked_for[1] == plain
    assert asked_for[2] == (TINY, "folder", 3, "bfloat16", 2**29, "ema", {"adapter": True})
    refused = CliRunner().invoke(cli.app, [*words, "--dtype", "float16"])
    assert (refused.exit_code, len(done.calls)) == (2, 3)
    assert refused.stderr == "error: --dtype: saw float16, expected float32 or bfloat16\n"
    refused = CliRunner().invoke(cli.app, [*words, "--weights", "best"])
    assert refused.stderr == "error: --weights: saw best, expected trained or ema\n"


def test_validate_compares_with_the_stored_run_where_asked(asked: Callable[[str, Any], Asked]) -> None:
    changed = asked(f"{DRIVER}.storage_commands.changed_keys", ["steps: 3 -> 4"])
    assert out("validate", "tiny").startswith("name: tiny\n")
    assert json.loads(out("validate", "tiny", "--json")).keys() == {"valid", "config"}
    assert changed.calls == []
    assert out("validate", "tiny", "--resume") == "steps: 3 -> 4\n"
    found = json.loads(out("validate", "tiny", "--resume", "--json"))
    assert (found["valid"], found["changed"]) == (True, ["steps: 3 -> 4"])
    assert len(changed.calls) == 2
    auto = out("validate", "tiny", "precision=auto", "cluster.device=cpu").splitlines()
    note = "precision: auto comes to fp32, workers run on CPUs; a run keeps it"
    assert auto[-1] == f"# {note}"
    found = json.loads(out("validate", "tiny", "precision=auto", "cluster.device=cpu", "--json"))
    assert found["notes"] == [note]


def test_validate_names_the_step_that_refused(asked: Callable[[str, Any], Asked]) -> None:
    error = ConfigError("steps: saw 0")
    asked(f"{DRIVER}.resolve_job.resolve_words", error)
    assert out("validate", "tiny", code=2) == ""
    error.step = "data"
    assert out("validate", "tiny", code=2) == "# refused by step: data\n"
    found = json.loads(out("validate", "tiny", "--json", code=2))
    assert found == {"error": "steps: saw 0", "exit_code": 2, "step": "data"}


def test_validate_takes_the_steps_of_a_launch(asked: Callable[[str, Any], Asked]) -> None:
    written = SimpleNamespace(job=TINY)
    asked(f"{DRIVER}.resolve_job.resolve_words", written)
    taken = asked(f"{DRIVER}.resolve_job.resolve", None)
    assert out("validate", "tiny").startswith("name: tiny\n")
    assert taken.calls == [(written, FROM_WORDS)]


def test_schema_and_resume_rules() -> None:
    assert out("config-schema") == json.dumps(job_schema(), indent=2) + "\n"
    assert out("config-schema", "--json") == json.dumps(job_schema()) + "\n"
    assert out("config-schema", "--on-resume") == markdown()
    assert out("config-schema", "--on-resume", "--json") == json.dumps(dict(table())) + "\n"


def test_catalogue_of_metrics() -> None:
    lines = out("metrics").splitlines()
    assert lines[0].split() == ["metric", "kind", "labels", "of", "means"]
    assert [line.split()[0] for line in lines[1:]] == list(CATALOGUE)
    rows = json.loads(out("metrics", "--json"))
    first = next(iter(CATALOGUE.values()))
    assert rows[0] == {
        "metric": first.name,
        "kind": first.kind,
        "labels": list(first.all_labels),
        "of": first.server,
        "means": first.help,
    }
    assert len(rows) == len(CATALOGUE)
    made = out("metrics", "--grafana")
    assert json.loads(made) == json.loads(out("metrics", "--grafana", "--json")) == dashboard()
    assert made.startswith("{\n")


def test_tests_of_rules_need_the_rules(tmp_path: Path) -> None:
    """A file that was not there, and a page, got 680 lines of tests."""
    rules, page = tmp_path / "rules.yml", tmp_path / "r.html"
    page.write_text("<!doctype html><p>x: y")
    for bad, said in (
        (rules, "cannot read .*: No such file or directory"),
        (page, "holds no rules of Prometheus"),
    ):
        refused = CliRunner().invoke(cli.app, ["metrics", "--rule-tests", str(bad)])
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert re.match(f"error: --rule-tests: .*{said}; `picotron-ray metrics --rules", refused.stderr)
    made = out("metrics", "--rules")
    rules.write_text(made.replace("PicotronStraggler", "Mine"))
    told = CliRunner().invoke(cli.app, ["metrics", "--rule-tests", str(rules)])
    assert "without the rule PicotronStraggler" in told.stderr
    rules.write_text(made)
    assert f"- {rules}\n" in out("metrics", "--rule-tests", str(rules))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("drain", "nr", "x", "--deadline-s", "5m"), "--deadline-s: saw '5m', expected a number"),
        (("debug", "rm", "nr", "x"), "NUMBER: saw 'x', expected a whole number"),
        (
            ("top", "nr", "--interval-s", "0.1"),
            "--interval-s: saw '0.1', expected greater than or equal to",
        ),
        (("debug", "rmm", "nr"), "No such command 'rmm'. Did you mean 'rm'?"),
        (("drain", "nr"), "Missing argument"),
    ],
)
def test_words_that_cannot_be_read_are_one_line(words: tuple[str, ...], told: str) -> None:
    """They were told in a frame, with the words of a library."""
    found = CliRunner().invoke(cli.app, list(words))
    assert (found.exit_code, found.stdout) == (2, "")
    [line] = found.stderr.splitlines()
    assert line.startswith(f"error: {told}")
    assert line.endswith(" --help`)")


def test_no_words_get_the_help() -> None:
    for words, code in ((["debug"], 2), (["debug", "--help"], 0), (["metrics", "--help"], 0)):
        found = CliRunner().invoke(cli.app, words)
        assert (found.exit_code, "error: " in found.output) == (code, False)
        assert "--help" in found.output


def test_what_the_dashboard_printed_before_it_was_a_page() -> None:
    assert out("dashboard", "--grafana") == out("metrics", "--grafana")
    assert out("dashboard") == out("metrics")
    assert "picotron-ray metrics --grafana" in CliRunner().invoke(cli.app, ["dashboard", "--grafana"]).stderr


def test_train_ends_with_the_drivers_code(asked: Callable[[str, Any], Asked]) -> None:
    drive = asked(f"{DRIVER}.driver.drive", 0)
    out("train", "tiny")
    drive.gives = 130
    out("train", "tiny", "steps=3", "--json", "--detach", "--take-over", "--begin-anew", code=130)
    assert drive.calls == [
        ("tiny", [], {"as_json": False, "detach": False, "take_over": False, "begin_anew": False}),
        ("tiny", ["steps=3"], {"as_json": True, "detach": True, "take_over": True, "begin_anew": True}),
    ]
    drive.gives = PicotronError("no worker\nis left")
    failed = CliRunner().invoke(cli.app, ["train", "tiny"])
    assert (failed.exit_code, failed.stdout) == (3, "")
    assert failed.stderr == "error: no worker\nerror: is left\n"
    assert json.loads(out("train", "tiny", "--json", code=3)) == {
        "error": "no worker\nis left",
        "exit_code": 3,
    }


@pytest.mark.parametrize("module", [cli, launch], ids=["cli", "launch"])
def test_entry_points_take_the_command_line(
    module: Any, asked: Callable[[str, Any], Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function of the console script, and the module that is run."""
    drive = asked(f"{DRIVER}.driver.drive", 1)
    command = ["train"] if module is cli else []
    monkeypatch.setattr("sys.argv", ["program", *command, "tiny", "--detach"])
    for run in (module.main, lambda: runpy.run_path(module.__file__, run_name="__main__")):
        with pytest.raises(SystemExit) as end:
            run()
        assert end.value.code == 1
    assert (
        drive.calls
        == [("tiny", [], {"as_json": False, "detach": True, "take_over": False, "begin_anew": False})] * 2
    )
