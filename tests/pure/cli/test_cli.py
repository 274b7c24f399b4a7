"""The command line's commands that start nothing, and what people read."""

from __future__ import annotations

import errno
import json
import shlex
import subprocess
import sys
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from picotron_ray import cli, launch
from picotron_ray.config.load import load_job
from picotron_ray.errors import ConfigError, PicotronError, StorageError
from picotron_ray.runtime.driver import console as report

STATUS: dict[str, Any] = {
    "run": "night",
    "state": "running",
    "generation": "1.2",
    "layout": "dp3-tp1-pp1-mb4",
    "members": ["w0", "w1", "w3"],
    "step": 41,
    "steps": 100,
    "loss": 2.5,
    "tokens_per_s": 12345.6,
    "eval_loss": 2.25,
    "baseline_loss": 2.75,
    "events": [
        {"seq": 1, "t": 0.0, "level": "warning", "kind": "failure", "text": f"w2 [gone] on {'0f' * 28}"}
    ],
    "done": False,
}
SUMMARY: dict[str, Any] = {
    "run": "night",
    "status": "finished",
    "detail": "",
    "steps": 100,
    "eval_loss": 1.5,
    "baseline_loss": 2.75,
    "tokens_per_s": 1000.0,
    "wall_s": 12.34,
    "failures": [
        {
            "kind": "worker-exited",
            "target": "w2",
            "step": 40,
            "recovered_s": 0.31,
            "lost_steps": 1,
            "restored_from": "slots",
        }
    ],
    "checkpoints": [{"step": 50}, {"step": 100}],
    "ledger": {"samples": 3200, "lost": 0, "repeated": 0},
}


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, list(words))
    return result.exit_code, result.stdout, result.stderr


def test_validate_prints_a_config_that_loads_back() -> None:
    code, out, _ = run("validate", "tiny", "steps=3")
    assert code == 0
    assert yaml.safe_load(out)["steps"] == 3
    code, out, _ = run("validate", "tiny", "steps=3", "--json")
    assert json.loads(out)["config"] == load_job("tiny", ["steps=3"]).model_dump(mode="json")


def test_validate_prints_one_line_per_mistake() -> None:
    code, out, err = run("validate", "tiny", "steps=0", "model.lyers=2", "--json")
    assert code == 2
    assert [line.split(":")[1].strip() for line in err.splitlines()] == ["steps", "model.lyers"]
    assert json.loads(out)["exit_code"] == 2


def test_config_schema_describes_every_key() -> None:
    code, out, _ = run("config-schema")
    assert code == 0
    assert json.loads(out)["properties"]["steps"]["description"]
    assert json.loads(run("config-schema", "--json")[1]) == json.loads(out)


def test_validate_loads_neither_torch_nor_ray() -> None:
    program = (
        "import sys; from picotron_ray import cli\n"
        "try: cli.app(['validate', 'quickstart'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_launch_refuses_a_bad_config_before_it_imports_ray() -> None:
    program = (
        "import sys; from picotron_ray import launch; sys.argv = ['launch', 'quickstart', 'steps=none']\n"
        "try: launch.main()\n"
        "except SystemExit as end: assert end.code == 2\n"
        "sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stderr.startswith("error: steps: saw 'none'")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a: b", "c: d"), 2),
        (StorageError("full"), 4),
        (PicotronError("x"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_raised_on_purpose_become_lines_and_an_exit_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(launch.typer.Exit) as end, launch.reported(as_json=False):
        raise error
    assert end.value.exit_code == code
    assert capsys.readouterr().err.count("error: ") == max(1, len(str(error).splitlines()))


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), launch.reported(as_json=False):
        raise ZeroDivisionError


def shown(terminal: bool, *statuses: dict[str, Any]) -> str:
    console = Console(force_terminal=terminal, width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with report.ProgressView(console) as progress:
        for status in statuses:
            progress.show(status)
    console.file.close()
    return console.export_text()


def test_plain_progress_has_every_figure_once() -> None:
    out = shown(False, STATUS, {**STATUS, "events": []})
    assert out.count("step 41/100  loss 2.5000  eval_loss 2.2500 (bigram 2.7500)  12,346 tokens/s") == 1
    assert out.count("warning: w2 [gone] on 0f0f0f0f\n") == 1
    assert "dp3-tp1-pp1-mb4 on 3 workers" in out


def test_live_progress_has_layout_members_and_events() -> None:
    out = shown(True, STATUS)
    for text in ("41 of 100", "dp3-tp1-pp1-mb4", "w0 w1 w3", "w2 [gone]", "generation 1.2"):
        assert text in out


def test_progress_before_the_first_step_has_dashes() -> None:
    nothing = {
        "layout": None,
        "members": [],
        "loss": None,
        "eval_loss": None,
        "tokens_per_s": None,
        "step": 0,
    }
    assert "step 0/100  loss -  - tokens/s  - on 0 workers" in shown(False, {**STATUS, **nothing})


def test_summary_names_what_was_survived_and_what_the_ledger_says() -> None:
    text = "\n".join(report.summary_lines(SUMMARY))
    assert "run night finished at step 100 in 12.3 s" in text
    assert "eval_loss 1.5000  baseline_loss 2.7500" in text
    assert "worker-exited of w2 at step 40: back in 0.31 s, 1 steps lost, restored from slots" in text
    assert "2 commits, the newest of step 100; 3200 samples fed, 0 lost, 0 repeated" in text
    failed = "\n".join(
        report.summary_lines({**SUMMARY, "status": "failed", "detail": "no progress", "ledger": None})
    )
    assert "because: no progress" in failed


def test_the_doctor_says_a_line_for_each_check_and_fails_by_its_exit_code(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    words = ["doctor", "tiny", f"storage.url={tmp_path}/runs", "--no-drill"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert {line[:4].strip() for line in lines} <= {"ok", "WARN", "skip"}
    assert [line for line in lines if "storage conditional put" in line]
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    done = CliRunner().invoke(cli.app, [*words, f"snapshot.folder={tmp_path}/gone", "--json"])
    assert done.exit_code == 3
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert [check["check"] for check in found["checks"] if check["status"] == "failed"] == ["snapshot folder"]
    assert CliRunner().invoke(cli.app, ["doctor", "tiny", "steps=0"]).exit_code == 2


def test_an_output_that_takes_no_more_is_said_in_one_line() -> None:
    """A log on a full disk, a pipe that nobody reads: forty lines of traceback, or not a word."""
    code = "from picotron_ray.runtime.driver.console import console\n"
    code += "from picotron_ray.launch import reported\n"
    code += (
        "import time, typer\ndef say():\n  with reported(False, launches=True):\n    for at in range(100):\n"
    )
    code += "      console(False).print('x' * 99)\n      time.sleep(0.01)\n"
    code += "typer.run(say)\n"
    python = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"
    wanted = "error: what is printed is not taken ({}); a run that was started goes on: "
    for ends, why in ((">/dev/full", "No space left on device"), ("| head -2 >/dev/null", "Broken pipe")):
        command = ["bash", "-c", f"{python} {ends}; exit ${{PIPESTATUS[0]}}"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith(wanted.format(why))


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("| true", 141, ""),
        (
            ">/dev/full",
            1,
            "error: what is printed is not taken (No space left on device); free space, or have it printed"
            " elsewhere\n",
        ),
    ],
)
def test_a_command_that_only_looks_ends_quietly_where_nobody_reads(ends: str, code: int, said: str) -> None:
    """It spoke of a run that was started."""
    command = f"sleep 0.3; {shlex.quote(sys.executable)} -m picotron_ray.cli plan tiny --gpus 2 --json -"
    words = ["bash", "-c", f"({command}) {ends}; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full", "a file"), BrokenPipeError(errno.EPIPE, "gone")]
)
def test_an_error_of_something_else_is_not_taken_for_the_outputs(error: OSError) -> None:
    with pytest.raises(type(error)), launch.reported(False):
        raise error
