"""The doctor before a run with a model of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.runtime.doctor.examine import examine
from picotron_ray.runtime.doctor.finding import Finding

MODELS = """
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(264, 8), nn.Linear(8, 264))

def ill():
    raise ValueError("no such size")
"""


def test_a_model_of_ones_own_is_built_and_planned_as_launch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_models.py").write_text(MODELS)

    def found(builder: str) -> dict[str, Finding]:
        words = [f"model={{vocab_size: 264, builder: '{builder}'}}", f"storage.url={tmp_path / 'runs'}"]
        job = load_job("tiny", [*words, "cluster.device=cpu"])
        return {each.check: each for each in next(iter(examine(job, configured=True, drill=False)))}

    well = found("my_models:build")
    assert [well[check].status for check in ("model", "plan", "data")] == ["ok"] * 3, well
    ill = found("my_models:ill")
    assert (ill["model"].status, "no such size" in ill["model"].seen) == ("failed", True)
    assert "plan" not in ill, "nothing is known of its sizes"
