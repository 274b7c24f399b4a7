"""``bench mfu`` on the devices at hand, as users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.conftest import Devices

pytestmark = [pytest.mark.any_device, pytest.mark.timeout(600)]
FEW = "--rounds 1 --steps 3 --warmup 2 --peers plain"


@pytest.mark.parametrize("workers", [1, 2])
def test_figures_of_a_small_model(devices: Devices, tmp_path: Path, workers: int) -> None:
    devices.need(workers)
    target = tmp_path / "found.json"
    words = f"bench mfu tiny precision=bf16 cluster.device={devices.kind} --workers {workers} {FEW}"
    text = f"data.source=text data.path={__file__} data.held_out_fraction=0.5"
    done = subprocess.run(
        [sys.executable, "-m", "picotron_ray.cli", *words.split(), *text.split(), "--json", str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text())
    assert 0 < found["mfu"] < 1
    assert found["peak_bytes"] > 0
    assert list(found["peers"]) == ["plain"]
