"""Part ``tests`` of ``bench gpu``: tests/gpu of a checkout in a process of their own, and what came of it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from picotron_ray.errors import PicotronError

REHEARSAL = "PICOTRON_GPU_REHEARSAL"
"""Variable by which tests/gpu runs on CPUs what it can."""
LONGEST_S = 4 * 3600
"""After which they are ended: a kernel that hangs holds pytest's own timeouts up too."""


def checkout() -> Path | None:
    """Folder of the checkout that this package lies in; None where it is installed without its tests."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "tests" / "gpu").is_dir() else None


def bench_tests(root: Path, kind: str, chosen: str, folder: Path, at_once: int = 1) -> dict[str, Any]:
    """Run them.

    Args:
        chosen: pytest's expression of names (``-k``); empty: all.
        at_once: files whose tests run beside each other, where pytest-xdist is installed.

    Raises PicotronError where pytest itself fails, TimeoutExpired after `LONGEST_S`.
    """
    report = folder / "tests.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",  # pytest-benchmark warns beside pytest-xdist, and warnings are errors
        f"--junitxml={report}",
    ]
    environment = {**os.environ, **({REHEARSAL: "cpu"} if kind == "cpu" else {})}
    beside = at_once > 1 and importlib.util.find_spec("xdist") is not None
    done = subprocess.run(
        [*command, *(["-k", chosen] if chosen else []), *(["-n", str(at_once)] if beside else [])],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST_S,
    )
    if not report.exists():
        said = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["nothing"]
        raise PicotronError(f"bench gpu: pytest ended with {done.returncode} and says: {said[0][:300]}")
    return summed_up(report.read_text())


def summed_up(junit: str) -> dict[str, Any]:
    """Count a report of pytest in JUnit's XML: passed, failed with the first line each, skipped by reason.

    >>> summed_up('<testsuite><testcase classname="a" name="b" time="1.5"/></testsuite>')
    {'passed': 1, 'failed': {}, 'skipped': {}, 'seconds': 1.5}
    """
    passed, seconds = 0, 0.0
    failed: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    for case in ElementTree.fromstring(junit).iter("testcase"):
        seconds += float(case.get("time", 0))
        bad = [each for tag in ("failure", "error") for each in case.iter(tag)]
        left_out = list(case.iter("skipped"))
        if bad:
            failed[f"{case.get('classname')}::{case.get('name')}"] = bad[0].get("message", "")[:300]
        elif left_out:
            skipped[re.sub(r"^Skipped: ", "", left_out[0].get("message", ""))] += 1
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": dict(skipped), "seconds": round(seconds, 1)}
