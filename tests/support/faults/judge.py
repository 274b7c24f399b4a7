"""Judge the tests: plant faults drawn by seed, one at a time, and see which of them a test notices.

``python -m tests.support.faults.judge --coverage .coverage --times times.xml --seed 2 --count 60`` takes
what a run with ``--cov --cov-context=test --junitxml=times.xml`` has left. A fault is drawn from a package
drawn with equal chances, on a line that some test touches. Tests that touch the line are tried, the cheapest
first, to the first failure; then those that touch its file, because what a fixture or a cache computes once
counts for one test alone. A fault that makes tests run far beyond their known times is noticed too. One that
outlives its tests, or ``--budget-s``, is printed as a survivor. The trees that the faults are planted in are
copies.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from coverage import CoverageData

from tests.support.faults.operators import Fault, faults_in

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = (60.0, 5.0)  # seconds for imports and servers, and how many times their known time tests may take
ENDLESS = "the tests did not end"
MARK = "PICOTRON_JUDGED"  # in the environment of all that a run of tests starts, and so in its children's
ADDOPTS = "addopts=--import-mode=importlib"  # all markers
PYTEST = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "-rfE", "-o", ADDOPTS]
Touched = dict[str, dict[int, set[str]]]


@dataclass(frozen=True)
class Verdict:
    """``by``: what noticed the fault; "" where nothing did. ``tried``: tests that touch its line."""

    fault: Fault
    by: str
    tried: int
    seconds: float


def touched_lines(data_files: list[Path]) -> Touched:
    """Tests by line by file of the package, as the coverage data says; paths are relative to the tree."""
    found: Touched = defaultdict(lambda: defaultdict(set))
    for data_file in data_files:
        data = CoverageData(str(data_file))
        data.read()
        for path in data.measured_files():
            relative = f"picotron_ray/{path.rpartition('/picotron_ray/')[2]}"
            for line, contexts in data.contexts_by_lineno(path).items():
                found[relative][line] |= {context.partition("|")[0] for context in contexts} - {""}
    return found


def tests_for(touched: Touched, fault: Fault, times: dict[str, float]) -> tuple[list[str], list[str]]:
    """Tests that touch a fault's line, and the others that touch its file; the cheapest first."""
    lines = touched[fault.path]
    near = lines[fault.line] & times.keys()
    far = set().union(*lines.values()) & times.keys() - near
    near, far = (near, far) if near else (far, near)  # the line runs on import alone

    def by_cost(test: str) -> tuple[float, str]:
        return times[test], test

    return sorted(near, key=by_cost), sorted(far, key=by_cost)


def read_times(files: list[Path]) -> dict[str, float]:
    """Seconds by node id, from JUnit files."""
    times: dict[str, float] = {}
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            parts = (case.get("classname") or "").split(".")
            names = [part for part in parts if part[:1].isupper()]
            path = "/".join(part for part in parts if part not in names) + ".py"
            times["::".join([path, *names, case.get("name") or ""])] = float(case.get("time") or 0)
    return times


def draw(touched: Touched, seed: int, count: int) -> list[Fault]:
    """``count`` different faults on touched lines, every package with the same chance."""
    packages: dict[str, list[Fault]] = defaultdict(list)
    for path, lines in sorted(touched.items()):
        if (ROOT / path).is_file():
            wanted = [f for f in faults_in(path, (ROOT / path).read_text()) if f.line in lines]
            packages[path.split("/")[1]] += wanted
    chosen: list[Fault] = []
    rng, names = random.Random(seed), sorted(name for name, faults in packages.items() if faults)
    while len(chosen) < count:
        fault = rng.choice(packages[rng.choice(names)])
        if fault not in chosen:
            chosen.append(fault)
    return chosen


class Judge:
    """One copy of the tree, in which one fault at a time is planted."""

    def __init__(self, tree: Path, budget_s: float, times: dict[str, float]) -> None:
        self.tree, self.budget_s, self.times = tree, budget_s, times
        self._sound: set[str] = set()  # tests that pass without a fault, as far as that was asked

    def judge(self, fault: Fault, near: list[str], far: list[str]) -> Verdict:
        """Run tests to the first failure that the fault has caused."""
        started = time.monotonic()
        end = started + self.budget_s
        by = self._first_failure(fault, near, end) or self._first_failure(fault, far, end)
        return Verdict(fault, by, len(near) + len(far), time.monotonic() - started)

    def _first_failure(self, fault: Fault, tests: list[str], end: float) -> str:
        left = list(tests)
        while left and time.monotonic() < end:
            by = self._planted(fault, left, end - time.monotonic())
            test = by.partition(" ")[2].partition(" - ")[0]
            if test not in left:  # none failed, or they broke off or did not end as a whole
                return by if by and (by == ENDLESS or not self._run(left[:1], self.budget_s)) else ""
            if test in self._sound or not self._run([test], self.budget_s):
                self._sound.add(test)
                return by
            left = left[left.index(test) + 1 :]  # fails without the fault too
        return ""

    def _planted(self, fault: Fault, tests: list[str], limit_s: float) -> str:
        target = self.tree / fault.path
        source = target.read_text()
        target.write_text(fault.apply(source))
        try:
            return self._run(tests, limit_s)
        finally:
            target.write_text(source)

    def _run(self, tests: list[str], limit_s: float) -> str:
        """The line of pytest's summary that names the first failure; "" where there was none in time."""
        listed = self.tree / "chosen-tests.txt"
        listed.write_text("\n".join(tests))
        command = [sys.executable, "-m", "pytest", *PYTEST, f"@{listed.name}"]
        mark = uuid.uuid4().hex
        patience_s = PATIENCE[0] + PATIENCE[1] * sum(self.times[test] for test in tests)
        try:
            done = subprocess.run(
                command,
                cwd=self.tree,
                env={**os.environ, MARK: mark},
                capture_output=True,
                text=True,
                timeout=min(limit_s, patience_s),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ENDLESS if patience_s < limit_s else ""
        finally:
            end_marked(mark)
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return "" if done.returncode == 0 else (lines or ["the run broke off"])[0]


def end_marked(mark: str) -> None:
    """Kill what a run of tests has left behind: local Rays live in sessions of their own."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def copy_of_tree(folder: Path) -> Path:
    """What git tracks, as it is in the working tree."""
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coverage", type=Path, nargs="+", default=[Path(".coverage")])
    parser.add_argument("--times", type=Path, nargs="+", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--budget-s", type=float, default=600.0, help="for the tests of one fault")
    parser.add_argument("--least", type=int, default=0, help="exit 1 where fewer faults are noticed")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are judged at once")
    options = parser.parse_args()
    touched, times = touched_lines(options.coverage), read_times(options.times)
    faults = draw(touched, options.seed, options.count)
    judges: SimpleQueue[Judge] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        for number in range(options.jobs):
            (Path(folder) / str(number)).mkdir()
            judges.put(Judge(copy_of_tree(Path(folder) / str(number)), options.budget_s, times))

        def judged(fault: Fault) -> Verdict:
            judge = judges.get()
            try:
                return judge.judge(fault, *tests_for(touched, fault, times))
            finally:
                judges.put(judge)

        noticed = 0
        for number, verdict in enumerate(pool.map(judged, faults), 1):
            noticed += bool(verdict.by)
            word = verdict.by or f"SURVIVED {verdict.tried} tests"
            shown = verdict.fault.show((ROOT / verdict.fault.path).read_text())
            print(f"{number:3d} {verdict.seconds:6.1f} s  {shown}\n      {word}", flush=True)
    print(f"{noticed} of {len(faults)} faults noticed, seed {options.seed}")
    sys.exit(noticed < options.least)


if __name__ == "__main__":
    main()
