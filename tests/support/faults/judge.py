"""Judge the tests: plant faults drawn by seed, one at a time, and see which of them a test notices.

``python -m tests.support.faults.judge --coverage .coverage --times times.xml --seed 2 --count 60`` takes
what a run with ``--cov --cov-context=test --junitxml=times.xml`` has left; of several runs (the default one,
then ``.ci/deep``) the later are asked where the earlier notice nothing. A fault is drawn from a package drawn
with equal chances, on a line that a test of the first run touches. Tests that touch the line are tried, the
cheapest first, to the first failure; then those that touch its file, because what a fixture or a cache
computes once counts for one test alone. A fault that makes tests run far beyond their known times is noticed
too. One that outlives its tests, or ``--budget-s``, is printed as a survivor. Faults that no test could
notice stand in equivalent.tsv with the reason, and others are drawn for them. The trees that the faults are
planted in are copies.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue

from coverage import CoverageData

from tests.support.faults.operators import Fault, faults_in

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = (60.0, 5.0)  # seconds for imports and servers, and how many times their known time tests may take
FEW = 8  # tests that are asked apart at first: of so few it is soon told that they do not end
FAR_SHARE = 0.3  # of the budget, for tests that touch a fault's file and not its line
ENDLESS = "the tests did not end"
MARK = "PICOTRON_JUDGED"  # in the environment of all that a run of tests starts, and so in its children's
ADDOPTS = "addopts=--import-mode=importlib"  # all markers
PYTEST = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "-rfE", "-o", ADDOPTS]
Touched = dict[str, dict[int, set[str]]]


@dataclass(frozen=True)
class Verdict:
    """``by``: what noticed the fault, in run number ``run``; "" where nothing did."""

    fault: Fault
    by: str
    run: int
    seconds: float


@dataclass(frozen=True)
class Recorded:
    """What a run of tests has left: ``touched`` lines, and seconds by node id."""

    touched: Touched
    times: dict[str, float]

    def ordered_tests(self, fault: Fault) -> tuple[list[str], list[str]]:
        """Tests that touch a fault's line, and the others that touch its file; the cheapest first."""
        lines = self.touched[fault.path]
        near = lines[fault.line] & self.times.keys()
        far = set().union(*lines.values()) & self.times.keys() - near
        near, far = (near, far) if near else (far, near)  # the line runs on import alone

        def by_cost(test: str) -> tuple[float, str]:
            return self.times[test], test

        return sorted(near, key=by_cost), sorted(far, key=by_cost)


def touched_lines(data_file: Path) -> Touched:
    """Tests by line by file of the package, as the coverage data says; paths are relative to the tree."""
    found: Touched = defaultdict(lambda: defaultdict(set))
    data = CoverageData(str(data_file))
    data.read()
    for path in data.measured_files():
        relative = f"picotron_ray/{path.rpartition('/picotron_ray/')[2]}"
        for line, contexts in data.contexts_by_lineno(path).items():
            found[relative][line] |= {context.partition("|")[0] for context in contexts} - {""}
    return found


def read_times(file: Path) -> dict[str, float]:
    """Seconds by node id, from a JUnit file."""
    times: dict[str, float] = {}
    for case in ElementTree.parse(file).iter("testcase"):
        parts = (case.get("classname") or "").split(".")
        names = [part for part in parts if part[:1].isupper()]
        path = "/".join(part for part in parts if part not in names) + ".py"
        times["::".join([path, *names, case.get("name") or ""])] = float(case.get("time") or 0)
    return times


def equivalents() -> set[tuple[str, str, str]]:
    """Faults that change nothing, as (path, source line, what stands there instead)."""
    rows = (Path(__file__).parent / "equivalent.tsv").read_text().splitlines()
    return {(path, line, text) for path, line, text, _ in (row.split("\t") for row in rows)}


def draw(touched: Touched, seed: int, count: int, wanted_packages: list[str]) -> list[Fault]:
    """``count`` different faults on touched lines, every package with the same chance; [] wants all."""
    packages: dict[str, list[Fault]] = defaultdict(list)
    for path, lines in sorted(touched.items()):
        if (ROOT / path).is_file():
            wanted = [f for f in faults_in(path, (ROOT / path).read_text()) if f.line in lines]
            packages[path.split("/")[1] if path.count("/") > 1 else "."] += wanted
    chosen: list[Fault] = []
    names = sorted(name for name in wanted_packages or packages if packages[name])
    rng, harmless = random.Random(seed), equivalents()
    while len(chosen) < count:
        fault = rng.choice(packages[rng.choice(names)])
        line = (ROOT / fault.path).read_text().split("\n")[fault.line - 1].strip()
        if fault not in chosen and (fault.path, line, fault.text) not in harmless:
            chosen.append(fault)
    return chosen


class Judge:
    """One copy of the tree, in which one fault at a time is planted."""

    def __init__(self, tree: Path, budget_s: float, runs: list[Recorded]) -> None:
        self.tree, self.budget_s, self.runs = tree, budget_s, runs
        self.times = {test: time for run in runs for test, time in run.times.items()}
        self._sound: set[str] = set()  # tests that pass without a fault, as far as that was asked

    def judge(self, fault: Fault) -> Verdict:
        """Run tests to the first failure that the fault has caused."""
        started = time.monotonic()
        for number, run in enumerate(self.runs):
            near, far = run.ordered_tests(fault)
            by = self._first_failure(fault, near, self.budget_s)
            by = by or self._first_failure(fault, far, FAR_SHARE * self.budget_s)
            if by:
                return Verdict(fault, by, number, time.monotonic() - started)
        return Verdict(fault, "", len(self.runs), time.monotonic() - started)

    def _first_failure(self, fault: Fault, tests: list[str], budget_s: float) -> str:
        left, end = list(tests), time.monotonic() + budget_s
        few: int | None = FEW
        while left and time.monotonic() < end:
            asked = left[:few]
            by = self._planted(fault, asked, end - time.monotonic())
            test = by.partition(" ")[2].partition(" - ")[0]
            if not by:
                left, few = left[len(asked) :], None
                continue
            if test not in asked:  # they broke off, or did not end, as a whole
                return by if by == ENDLESS or not self._run(left[:1], self.budget_s) else ""
            if test in self._sound or not self._run([test], self.budget_s):
                self._sound.add(test)
                if self._planted(fault, [test], self.budget_s):  # and not by chance
                    return by
            left = left[left.index(test) + 1 :]  # fails without the fault too, or not always with it
        return ""

    def _planted(self, fault: Fault, tests: list[str], limit_s: float) -> str:
        target = self.tree / fault.path
        source = target.read_text()
        _write(target, fault.apply(source))
        try:
            return self._run(tests, limit_s)
        finally:
            _write(target, source)

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


def _write(module: Path, source: str) -> None:
    """With its bytecode gone: that is told from the source's by size and whole seconds alone."""
    module.write_text(source)
    Path(cache_from_source(str(module))).unlink(missing_ok=True)


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
    parser.add_argument("--coverage", type=Path, nargs="+", default=[Path(".coverage")], help="one per run")
    parser.add_argument("--times", type=Path, nargs="+", required=True, help="one per run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--after", type=int, default=0, help="pass over the first faults that are drawn")
    parser.add_argument("--packages", nargs="*", default=[], help="default: all; . is the modules in none")
    parser.add_argument("--budget-s", type=float, default=600.0, help="for the tests of one fault in one run")
    parser.add_argument(
        "--least", type=int, nargs="+", default=[], help="exit 1 where fewer are noticed, per run"
    )
    parser.add_argument("--jobs", type=int, default=1, help="faults that are judged at once")
    options = parser.parse_args()
    files = zip(options.coverage, options.times, strict=True)
    runs = [Recorded(touched_lines(data), read_times(times)) for data, times in files]
    noticed = [0 for _ in runs]
    for number, verdict in enumerate(verdicts(runs, options), options.after + 1):
        for run in range(verdict.run, len(runs)):
            noticed[run] += 1
        shown = verdict.fault.show((ROOT / verdict.fault.path).read_text())
        print(f"{number:3d} {verdict.seconds:6.1f} s  {shown}")
        print(f"      {f'run {verdict.run + 1}: {verdict.by}' if verdict.by else 'SURVIVED'}", flush=True)
    for run, count in enumerate(noticed, 1):
        of = options.count - options.after
        took_s = sum(runs[run - 1].times.values())
        print(
            f"{count} of {of} noticed by runs 1 to {run}, seed {options.seed}; run {run} takes {took_s:.0f} s"
        )
    sys.exit(any(count < least for count, least in zip(noticed, options.least, strict=False)))


def verdicts(runs: list[Recorded], options: argparse.Namespace) -> Iterator[Verdict]:
    """One for each fault that is drawn, in order."""
    faults = draw(runs[0].touched, options.seed, options.count, options.packages)[options.after :]
    judges: SimpleQueue[Judge] = SimpleQueue()

    def judged(fault: Fault) -> Verdict:
        judge = judges.get()
        try:
            return judge.judge(fault)
        finally:
            judges.put(judge)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        for number in range(options.jobs):
            (Path(folder) / str(number)).mkdir()
            judges.put(Judge(copy_of_tree(Path(folder) / str(number)), options.budget_s, runs))
        yield from pool.map(judged, faults)


if __name__ == "__main__":
    main()
