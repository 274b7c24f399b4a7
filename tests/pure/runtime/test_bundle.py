"""A bug report's bundle: what is in it of a run that is over, and that no secret is."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from typer.testing import CliRunner

from picotron_ray import cli
from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.errors import ConfigError
from picotron_ray.observability.logs.lines import encode, time_text
from picotron_ray.runtime.driver import bundle
from picotron_ray.runtime.driver.bundle_parts import BundleSource
from picotron_ray.runtime.log_shipping import node_key
from picotron_ray.runtime.ray_cluster.names import event_folder

RUN = "night"


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Secrets as they come, each in a place of its own."""
    yield (found := [f"canary{number:02d}Xq7" for number in range(12)])
    assert len(set(found)) == 12


@pytest.fixture
def address(tmp_path: Path, canaries: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """A run in storage, with a secret in ten and more places of it and of the environment."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    at = iter(canaries)
    in_environment = next(at)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", in_environment)
    monkeypatch.setenv("WANDB_API_KEY", next(at))
    monkeypatch.setenv("MLFLOW_TRACKING_URL", f"https://me:{next(at)}@host/x")
    storage = LocalStorage(str(tmp_path / "runs"), RUN)
    config = {
        "storage": {"url": f"s3://key:{next(at)}@bucket/runs"},
        "trackers": [{"kind": "wandb", "api_key": next(at)}],
        "env": [{"name": "HF_TOKEN", "value": next(at)}],
        "steps": 10,
    }
    storage.put("run.json", json.dumps({"config": config, "version": "0.1.0"}).encode())
    detail = f"no answer from https://host/x?X-Amz-Signature={next(at)}&a=1"
    summary = {"status": "failed", "failures": [{"kind": "failed", "detail": detail}]}
    storage.put("summary.json", json.dumps(summary).encode())
    stacks = f'File "x.py", line 3: connect(password="{next(at)}")'
    storage.put("evidence/1-1-1.1.json", json.dumps({"ranks": [{"stacks": stacks}]}).encode())
    texts = [f"Authorization: Bearer {next(at)}abcd", f"with {in_environment}", f"token={next(at)}", "step 1"]
    lines = [encode(number, line(text)) for number, text in enumerate(texts, 1)]
    storage.put(node_key("n1"), zstandard.ZstdCompressor().compress(b"".join(lines)))
    folder = event_folder(RUN)
    folder.mkdir(parents=True)
    events = [json.dumps({"secret": next(at)}), json.dumps({"text": f"ghp_{next(at)}0123456789"})]
    (folder / "events-1.jsonl").write_text("\n".join(events) + "\n")
    return str(tmp_path / "runs" / RUN)


def line(text: str) -> dict[str, Any]:
    where = {"generation": "1.1", "rank": 0, "step": 1, "logger": None}
    return {"time": time_text(1.0), "level": "info", **where, "node": "n1", "worker": "w0", "text": text}


def parts(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_a_bundle_is_made_of_storage_alone_and_holds_no_secret(
    address: str, canaries: list[str], tmp_path: Path
) -> None:
    result = CliRunner().invoke(cli.app, ["debug", address, "bundle", "--to", f"{tmp_path}/b.zip", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    found = parts(tmp_path / "b.zip")
    assert set(told["files"]) == found.keys() - {"index.json"}
    wanted = {"versions", "environment", "config", "summary", "failures", "evidence", "objects"}
    assert {f"{name}.json" for name in wanted} | {"logs.jsonl"} <= found.keys()
    assert "stacks_now.json" in told["missing"]
    for name, text in found.items():
        for canary in canaries:
            assert canary not in text, f"{canary} in {name}"
    config = json.loads(found["config.json"])["run.json"]["config"]
    assert config["storage"]["url"] == "s3://bucket/runs"
    assert config["steps"] == 10
    assert "https://host/x" in found["failures.json"]
    shown = [json.loads(each)["text"] for each in found["logs.jsonl"].splitlines()]
    assert shown == ["Authorization: Bearer ***", "with ***", "token=***", "step 1"]
    assert json.loads(found["environment.json"])["values"]["AWS_SECRET_ACCESS_KEY"] == "***"


def test_each_secret_would_have_been_seen(address: str, canaries: list[str], tmp_path: Path) -> None:
    """What the scan must find lies in what it reads: with nothing cut out all but two are in the bundle."""
    source = BundleSource(address)
    raw = ""
    for name, part in source.parts():
        if name not in ("stacks_now.json", "versions.json", "environment.json"):
            raw += json.dumps(part(), default=str)
    assert sum(canary in raw for canary in canaries) >= 9


def test_a_bundle_is_bounded_and_keeps_the_newest(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "PART_BYTES", 400)
    told = bundle.write_bundle(address, tmp_path / "b.zip")
    assert all(len(text) <= 400 for name, text in parts(tmp_path / "b.zip").items() if name != "index.json")
    assert json.loads(parts(tmp_path / "b.zip")["logs.jsonl"].splitlines()[-1])["text"] == "step 1"
    assert "logs.jsonl, the older part" in told["missing"]


def test_a_part_that_fails_is_named_and_the_others_are_there(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: BundleSource) -> None:
        raise ValueError("no such thing: password=hunter2hunter2")

    monkeypatch.setattr(BundleSource, "evidence", broken)
    told = bundle.write_bundle(address, tmp_path / "b.zip")
    assert told["missing"]["evidence.json"] == "ValueError: no such thing: password=***"
    assert "config.json" in told["files"]


def test_bad_words_are_one_line_and_leave_nothing(address: str, tmp_path: Path) -> None:
    (tmp_path / "there.zip").touch()
    with pytest.raises(ConfigError, match=r"^--to: .*there.zip is there already; name another file$"):
        bundle.write_bundle(address, tmp_path / "there.zip")
    with pytest.raises(ConfigError, match=r"^--to: .*cannot be written: No such file or directory$"):
        bundle.write_bundle(address, tmp_path / "none" / "b.zip")
    with pytest.raises(ConfigError, match=r"^run: saw 'noon', which does not run on this machine .*address"):
        bundle.write_bundle("noon", tmp_path / "b.zip")
    assert not (tmp_path / "b.zip").exists()
