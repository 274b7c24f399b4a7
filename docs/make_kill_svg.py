"""Draw ``docs/_static/kill.svg``: a worker is killed, and the next step follows.

    .venv/bin/python docs/make_kill_svg.py

Runs the packaged recipe ``quickstart`` for real, in a folder of its own. Shows the lines of its output around
the kill. The times of the last step, the kill and the next step are those that the run itself stored: in its
ledger, and in the claim of the scripted fault (``chaos/0``).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from picotron_ray.bench.common.machine import machine

NAME = "quickstart"
OUTPUT = Path(__file__).parent / "_static" / "kill.svg"
COLUMNS = 118
STYLES = {"$": "bold", "#": "bold cyan", "survived": "bold green"}


@dataclass(frozen=True, slots=True)
class ScriptedKill:
    """A scripted kill and the steps on either side of it; times in seconds since the epoch."""

    step: int  # the one that it struck
    before_s: float  # the step before was finished
    killed_s: float
    after_s: float  # the struck step was finished, by those who survived

    def line(self) -> str:
        """The three times, and the seconds from the kill to the next new step."""
        return (
            f"# step {self.step - 1} done {_clock(self.before_s)}, SIGKILL {_clock(self.killed_s)}, step"
            f" {self.step} done {_clock(self.after_s)}: {self.after_s - self.killed_s:.2f} s from the kill to"
            " the next step"
        )


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s)) + f".{round(at_s % 1 * 1000):03d}"


def run(folder: Path, *words: str) -> list[str]:
    """The output of one of our commands, which must succeed; state and storage stay in ``folder``."""
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "COLUMNS": str(COLUMNS)}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


def read_kill(run_folder: Path) -> ScriptedKill:
    """The kill as the run's storage tells it."""
    killed_s = json.loads((run_folder / "chaos" / "0").read_text())["at_s"]
    text = "".join(path.read_text() for path in sorted(run_folder.glob("ledger/*.jsonl")))
    done = {line["step"]: line["at_s"] for line in map(json.loads, text.split())}
    step = min(step for step, at_s in done.items() if at_s > killed_s)
    return ScriptedKill(step, done[step - 1], killed_s, done[step])


def chosen_lines(output: list[str], kill: ScriptedKill, ledger: list[str]) -> list[str]:
    """The lines around the kill, with the commands that printed them."""
    struck = next(i for i, line in enumerate(output) if "warning: worker" in line)
    first = max(i for i, line in enumerate(output[:struck]) if line.startswith("[running]"))
    last = next(i for i, line in enumerate(output[struck:], struck) if " generation 1.3: 4 workers" in line)
    shown = output[first : last + 1]
    shown.insert(next(i for i, line in enumerate(shown) if line.endswith(" steps lost")) + 1, kill.line())
    end = next(i for i, line in enumerate(output) if line.startswith(f"run {NAME} "))
    return [
        "$ python -m picotron_ray.launch quickstart",
        "...",
        *shown,
        "...",
        *output[end:],
        "$ picotron-ray ledger verify quickstart",
        *(line for line in ledger if line),
    ]


def draw(lines: list[str]) -> str:
    """The lines as a terminal, without the fonts that rich would fetch."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in lines:
        style = next((style for start, style in STYLES.items() if line.startswith(start)), "")
        console.print(Text(line, style="bold yellow" if "warning: " in line else style), soft_wrap=False)
    form = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    form = form.replace("Fira Code", "DejaVu Sans Mono").replace("family: arial", "family: arial, sans-serif")
    here = machine()
    title = f"4 workers on {here['cores']} cores of an {here['processor']}, no GPU"
    svg = console.export_svg(title=title, code_format=form, unique_id="kill")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main() -> None:
    """Run, then write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    output: Path = parser.parse_args().output.absolute()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = run(folder, "picotron_ray.launch", NAME)
        ledger = run(folder, "picotron_ray.cli", "ledger", "verify", NAME)
        kill = read_kill(folder / "runs" / NAME)
    output.write_text(draw(chosen_lines(lines, kill, ledger)))
    print(kill.line())


if __name__ == "__main__":
    main()
