"""A dead run's page comes from its storage alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from picotron_ray.checkpoint.store.run_log import SCHEMA
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.dashboard import history, sources
from picotron_ray.runtime.dashboard.curves import Curves
from picotron_ray.runtime.dashboard.history import History
from picotron_ray.runtime.dashboard.sections import build
from picotron_ray.runtime.dashboard.stored import StoredRun
from tests.support.runs.page_facts import store_run


def test_every_section_of_a_dead_run_is_filled(tmp_path: Path) -> None:
    store_run(tmp_path)
    found = build(sources.find(str(tmp_path / "told")).look(), None, {})  # type: ignore[arg-type]
    assert (found["head"]["state"], found["head"]["step"], found["head"]["committed"]) == ("cut-off", 20, 20)
    assert found["head"]["source"] == "storage"
    assert [len(found["curves"]["figures"][name]) for name in ("loss", "tokens_per_s")] == [20, 18]
    assert found["curves"]["figures"]["eval_loss"] == [[10, 2.5]]
    assert len(found["curves"]["figures"]["goodput_ratio"]) == 20
    assert {mark["kind"] for mark in found["curves"]["marks"]} == {"failure", "generation"}
    rows = found["timeline"]["generations"]
    assert [(row["id"], row["layout"], row["start_step"], row["end_step"]) for row in rows] == [
        ("1.1", "dp2-tp1-pp1-mb1", 0, 10),
        ("1.2", "dp2-tp1-pp1-mb2", 10, 20),
    ]
    assert found["map"]["nodes"] == 2
    assert found["map"]["axes"] == {"dp": [0, 1]}
    assert [commit["step"] for commit in found["checkpoints"]["commits"]] == [10, 20]
    assert found["checkpoints"]["commits"][1]["bytes"] == 1000
    assert found["findings"]["findings"][0]["text"].startswith(
        "worker-exited of w1-1 at step 10: back in 0.50 s"
    )
    assert found["memory"]["predicted"]["state"] > 0
    assert not any(door["enabled"] for door in found["doors"]["doors"])


def test_a_run_without_a_record_still_has_curves_and_a_timeline(tmp_path: Path) -> None:
    store_run(tmp_path, record=False)
    facts = StoredRun("told", store_run(tmp_path, "bare", record=False)).look()
    assert facts.curves.newest("loss") == pytest.approx(0.25)
    assert len(facts.generations) == 2
    assert facts.members == []


def test_a_damaged_ledger_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    storage = store_run(tmp_path)
    storage.put("ledger/1-1-1-10.jsonl", b"{}\n")
    facts = StoredRun("told", storage).look()
    assert len(facts.curves.all("loss")) == 10
    assert "ledger: steps up to 10 cannot be read" in facts.notes[0]


def test_of_a_long_ledger_some_segments_are_read_and_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_SEGMENTS", 1)
    read: list[str] = []
    storage = store_run(tmp_path)
    get = storage.get_range
    monkeypatch.setattr(storage, "get_range", lambda key, *args: (read.append(key), get(key, *args))[1])
    found = History(storage, Curves())
    found.look()
    found.look()
    assert [key for key in read if key.startswith("ledger/")] == ["ledger/1-2-11-20.jsonl"]


@pytest.mark.parametrize("word", ["Nobody", "nobody-at-all", "./no/such/run", "s3:/x", "ftp://host/runs/a"])
def test_an_unknown_run_is_refused_in_one_line(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        sources.find(word)
    assert len(str(refused.value).splitlines()) == 1


def test_credentials_in_an_address_are_refused_and_not_echoed() -> None:
    with pytest.raises(ConfigError) as refused:
        sources.find("s3://me:secret@bucket/runs/a")
    assert "secret" not in str(refused.value)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    storage = store_run(tmp_path)
    first = json.loads(storage.get("log/00000001.json"))
    storage.put("log/00000001.json", json.dumps({**first, "schema": SCHEMA + 1}).encode())
    with pytest.raises(ConfigError, match=f"schema {SCHEMA + 1}, expected at most {SCHEMA}"):
        sources.find(str(tmp_path / "told"))
