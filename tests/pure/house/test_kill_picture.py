"""The picture of a kill: its times add up, it fetches nothing, the script draws it from a run's files."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "docs" / "make_kill_svg.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_kill_svg", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def text_of(svg: str) -> str:
    """The words of a picture, in order."""
    found = re.findall(r"<text[^>]*>(.*?)</text>", svg, re.DOTALL)
    return " ".join(html.unescape(part).replace("\xa0", " ").strip() for part in found if part.strip())


def check_adds_up(text: str) -> None:
    """The seconds that a picture names are those between the times that it names."""
    form = r"SIGKILL (\d+):(\d+):([\d.]+), step \d+ done (\d+):(\d+):([\d.]+): ([\d.]+) s from the kill"
    found = re.search(form, text)
    assert found is not None
    h, m, s, h2, m2, s2, said = map(float, found.groups())
    seconds = ((h2 - h) * 60 + m2 - m) * 60 + s2 - s
    assert abs(seconds % 86400 - said) < 0.011  # it may have been midnight


def test_the_committed_picture_shows_a_kill_and_the_next_step() -> None:
    svg = (ROOT / "docs" / "_static" / "kill.svg").read_text()
    text = text_of(svg)
    check_adds_up(text)
    for said in ("exited: process gone", "0 steps lost", "survived", "0 lost, 0 repeated, 0 wrong", "no GPU"):
        assert said in text, said
    assert set(re.findall(r"https?://[^\"\s<]+", svg)) == {
        "http://www.w3.org/2000/svg",
        "https://www.textualize.io",
    }


OUTPUT = """\
[running] step 80/200  loss 2.0
[running] step 90/200  loss 1.9
12:00:00 warning: worker w1-2 on abc exited: process gone
12:00:00 warning: generation 1.2: 3 workers, dp3, from host memory of step 99; 0 steps lost
12:00:05 generation 1.3: 4 workers, dp4, from host memory of step 116
[running] step 150/200  loss 1.7
run quickstart finished at step 200 in 50.0 s
"""


def test_the_script_reads_a_runs_files(tmp_path: Path, script: ModuleType) -> None:
    (tmp_path / "chaos").mkdir()
    (tmp_path / "chaos" / "0").write_text(json.dumps({"at_s": 1000.75, "nonce": "x"}))
    ledger = {"1-1-1-99": {98: 1000.1, 99: 1000.7}, "1-2-100-200": {100: 1001.0, 101: 1002.0}}
    (tmp_path / "ledger").mkdir()
    for name, steps in ledger.items():
        lines = [
            json.dumps({"step": step, "at_s": at_s}, separators=(",", ":")) for step, at_s in steps.items()
        ]
        (tmp_path / "ledger" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    kill = script.read_kill(tmp_path)
    assert (kill.step, kill.after_s - kill.killed_s) == (100, 0.25)
    lines = script.chosen_lines(OUTPUT.splitlines(), kill, ["ledger of 200 steps", ""])
    assert lines[2].startswith("[running] step 90/200")
    assert lines[lines.index(kill.line()) - 1].endswith("0 steps lost")
    assert lines[-1] == "ledger of 200 steps"
    text = text_of(script.draw(lines))
    check_adds_up(text)
    assert "step 150" not in text
