"""``bench comm`` as users run it, on two ranks and small buffers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.slow  # most of it is torchrun's start
def test_every_strategy_is_measured(tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    asked = ["--groups", "2", "--sizes", "1KiB,64KiB", "--budget-s", "40", "--json", str(target)]
    command = [sys.executable, "-m", "picotron_ray.cli", "bench", "comm", *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text())
    assert {"cells", "cuts", "selected_within_10_percent"} < set(found)
    assert len(found["cells"]) + len(found["cuts"]) == 2 * (10 + 3 + 3 + 2 + 2)
    for cell in found["cells"]:
        assert 0 < cell["min_s"] <= cell["avg_s"] <= cell["max_s"]
        assert 5 <= cell["repeats"] <= 100
        factor = 1.0 if cell["collective"] in ("all-reduce", "broadcast") else 0.5
        assert cell["busbw_bytes_s"] == pytest.approx(factor * cell["size_bytes"] / cell["avg_s"])
    large = [c for c in found["cells"] if c["size_bytes"] == 65536]
    sent = {(c["collective"], c["strategy"]): c["sent_bytes"] for c in large}
    assert sent["all-reduce", "auto"] == 65536
    assert sent["all-reduce", "int8"] < 0.27 * 65536
    for way in ("flat", "ring", "mesh"):
        assert sent["all-gather", way] == sent["reduce-scatter", way] == 32768
    assert "selector: " in done.stdout


@pytest.mark.slow
def test_a_budget_names_what_it_cuts(tmp_path: Path) -> None:
    """Sums of 256 MiB do not fit five times: they are cut after a call, not measured beyond the budget."""
    target = tmp_path / "found.json"
    asked = ["--groups", "2", "--sizes", "1KiB,256MiB", "--collectives", "all-reduce", "--budget-s", "6"]
    command = [sys.executable, "-m", "picotron_ray.cli", "bench", "comm", *asked, "--json", str(target)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60, "most of it is torchrun's start"
    found = json.loads(target.read_text())
    large = {cell["strategy"] for cell in found["cells"] if cell["size_bytes"] > 1024}
    cut = {cell["strategy"] for cell in found["cuts"] if cell["cut"] == "budget"}
    assert {cell["size_bytes"] for cell in found["cells"]} >= {1024}
    assert cut
    assert large | cut == {cell["strategy"] for cell in found["cells"] if cell["size_bytes"] == 1024}
    assert not large & cut
