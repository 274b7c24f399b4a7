"""A real run whose ranks stand still for a planted reason: asked meanwhile, and judged from what was kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hanging_model
import pytest

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.debug.verdict_lines import verdict_lines
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import control, hang_verdicts
from tests.support.runs.ray_runs import Watched, start, tiny_job

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(600), pytest.mark.deep]
HANG_S = 20.0
KINDS = ("mismatch", "deadlock", "late")


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """A run of two workers that goes on until the test's end, and stands still while a file says so."""
    many = {"interval_steps": 1_000_000}
    job = tiny_job(
        "hangs", tmp_path / "runs", steps=1_000_000, precision="fp32", layout={"dp": 2}, checkpoint=many,
        evaluate={**many, "samples": 4}, cluster={"max_workers": 2}, elastic={"hang_floor_s": HANG_S},
    )  # fmt: skip
    model = {"vocab_size": 264, "builder": "hanging_model:hanging", "arguments": {"folder": str(tmp_path)}}
    watched = start(job.model_copy(update={"model": ModelConfig.model_validate(model)}))
    monkeypatch.setattr(control, "connect_to_run", lambda run: (watched.coordinator, None))
    yield watched
    (tmp_path / "plant").unlink(missing_ok=True)
    if not watched.look()["done"]:
        watched.coordinator.request.remote("stop")
        watched.finish()


def place_of(kind: str) -> str:
    lines = Path(hanging_model.__file__).read_text().splitlines()
    [number] = [at for at, line in enumerate(lines, 1) if f"# planted: {kind}" in line]
    return f"hanging_model.py:{number} in {kind}"


def wait_for(kind: str, deadline_s: float) -> dict[str, Any]:
    """Ask until something is wrong."""
    deadline = time.monotonic() + deadline_s
    while True:
        began = time.monotonic()
        found = hang_verdicts.verdict("hangs")
        print(f"{kind}: asked for {time.monotonic() - began:.1f} s")
        if found["verdict"]:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.5)


def check(found: dict[str, Any], kind: str, node: str) -> None:
    for question in ("deadlock", "comm"):
        print("\n".join(verdict_lines(found, question)))  # type: ignore[arg-type]
    first = found["verdict"][0]
    assert first["kind"] == kind
    assert 1 in first["ranks"]
    assert f"rank 1 on node {node[:8]}" in first["text"], first["text"]
    assert place_of(kind) in first["text"], first["text"]
    assert found["suggestions"]
    assert not [text for text in found["suggestions"] if " NAME" in text]


def test_what_is_planted_is_named_live_and_from_what_was_kept(live: Watched, tmp_path: Path) -> None:
    live.until(lambda status: status["step"] >= 5)
    calm = hang_verdicts.verdict("hangs")
    assert calm["verdict"] == [], calm["verdict"]
    assert calm["groups"][0]["operations"] > 20
    with pytest.raises(ConfigError, match="no failure of this run has kept"):
        hang_verdicts.verdict("hangs", kept=True)
    for number, kind in enumerate(KINDS, 1):
        (tmp_path / "plant").write_text(kind)
        found = wait_for(kind, HANG_S + 30.0)
        assert found["failure"] is None, "the ranks themselves were asked"
        node = found["ranks"][1]["node"]
        check(found, kind, node)
        (tmp_path / "plant").unlink()
        live.until(lambda status, number=number: len(status["failures"]) >= number)
        live.until(lambda status: status["state"] == "running" and status["step"] >= 5)
        kept = hang_verdicts.verdict("hangs", kept=True)
        assert kept["failure"]["kind"] == "hang"
        assert kept["generation"] == found["generation"]
        check(kept, kind, node)
        newest = live.look()["step"]
        live.until(lambda status, newest=newest: status["step"] > newest + 5)
    live.coordinator.request.remote("stop")
    live.until(lambda status: status["done"])
    with pytest.raises(ConfigError, match=r"^run: 'hangs' is over: no rank of it can be asked"):
        hang_verdicts.verdict("hangs")
