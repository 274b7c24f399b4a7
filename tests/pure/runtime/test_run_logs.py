"""Reading what a run's processes wrote: of all nodes in order of time, from the nearest source of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.errors import ConfigError, StorageError
from picotron_ray.observability.logs.lines import encode, time_text
from picotron_ray.observability.logs.pages import START, Cursor, LogPage
from picotron_ray.observability.logs.query import Query
from picotron_ray.observability.logs.store import LogStore
from picotron_ray.runtime.driver import find_stored, log_readers, run_logs
from picotron_ray.runtime.log_shipping import dead_key, node_key
from picotron_ray.runtime.ray_cluster import local_ray, log_folders

RUN = "night"
NODES = ("a" * 20, "b" * 20)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(run_logs, "POLL_S", 0.0)
    return tmp_path


def entry(node: str, text: str, at_s: float, rank: int | None = None, worker: str = "w0") -> dict[str, Any]:
    where = {"generation": None, "rank": rank, "step": None, "logger": None}
    return {"time": time_text(at_s), "level": "info", **where, "node": node, "worker": worker, "text": text}


def write(node: str, *entries: dict[str, Any]) -> LogStore:
    store = LogStore(log_folders.log_folder(RUN, node))
    store.add(entries)
    return store


def texts(found: Iterator[dict[str, Any]]) -> list[str]:
    return [each["text"] for each in found]


def test_lines_of_all_nodes_come_in_order_of_time() -> None:
    write(NODES[0], entry(NODES[0], "1", 1.0, rank=0), entry(NODES[0], "4", 4.0, rank=1))
    write(NODES[1], entry(NODES[1], "2", 2.0), entry(NODES[1], "3", 3.0, rank=3))
    assert texts(run_logs.log_lines(RUN, Query())) == ["1", "2", "3", "4"]
    assert texts(run_logs.log_lines(RUN, Query(node="bb"))) == ["2", "3"]
    assert texts(run_logs.log_lines(RUN, Query(rank=2))) == [], "it is in between, and wrote nothing"
    with pytest.raises(ConfigError, match=r"--rank: saw 4, expected one of run 'night': 0 to 3$"):
        list(run_logs.log_lines(RUN, Query(rank=4)))
    with pytest.raises(ConfigError, match=r"--node: saw 'c', expected the begin of .*: aaaaaaaa, bbbbbbbb$"):
        list(run_logs.log_lines(RUN, Query(node="c")))
    with pytest.raises(ConfigError, match=r"run: saw 'noon', of which this machine has no lines; give its"):
        list(run_logs.log_lines("noon", Query()))


def test_following_shows_what_comes_until_the_run_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    store = write(NODES[0], entry(NODES[0], "old", 1.0))
    lives = iter((True, True, False))

    def find(run: str) -> Any:
        store.add([entry(NODES[0], "new", 2.0)])
        return SimpleNamespace(running=next(lives))

    monkeypatch.setattr(local_ray, "find", find)
    assert texts(run_logs.log_lines(RUN, Query(), follow=True)) == ["old", "new", "new", "new"]
    assert texts(run_logs.log_lines(RUN, Query(), follow=True, once=True)) == ["old", "new", "new", "new"]


def test_a_node_that_does_not_answer_is_named_and_the_others_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    write(NODES[0], entry(NODES[0], "here", 1.0))
    real = log_readers.LogReaders.find

    def silent(query: Query, cursor: Cursor, most_bytes: int) -> LogPage:
        raise TimeoutError("no answer in 15 s")

    monkeypatch.setattr(log_readers.LogReaders, "find", lambda self: {**real(self), "b" * 16: silent})
    said: list[str] = []
    assert texts(run_logs.log_lines(RUN, Query(), say=said.append)) == ["here"]
    assert said == ["node bbbbbbbbbbbb does not tell its lines: no answer in 15 s"]


def test_a_run_that_is_over_is_read_from_storage_alone_each_line_once(home: Path) -> None:
    storage = LocalStorage(str(home / "runs"), RUN)
    storage.put("run.json", b"{}")
    lines = [
        encode(
            number, entry(NODES[0], f"line {number}", float(number), rank=number % 2, worker=f"w{number % 2}")
        )
        for number in range(1, 7)
    ]
    own = encode(9, entry(NODES[0], "the end", 9.0, worker=log_folders.COORDINATOR))
    for key, part in (
        (dead_key(0), [line for line in lines if b'"w1"' in line]),
        (node_key(NODES[0]), lines[2:]),
        (node_key(log_folders.COORDINATOR), [own]),
    ):
        storage.put(key, zstandard.ZstdCompressor().compress(b"".join(part)))
    storage.put("logs/nodes/torn.jsonl.zst", b"no frame")
    address = str(home / "runs" / RUN)
    assert texts(run_logs.log_lines(address, Query())) == [
        *("line 1", "line 3", "line 4", "line 5", "line 6"),
        "the end",
    ]
    assert texts(run_logs.log_lines(address, Query(rank=1, node="aaaa"))) == ["line 1", "line 3", "line 5"]
    assert texts(run_logs.log_lines(address, Query(node="coord"), follow=True)) == ["the end"]
    for wrong in (f"{home}/runs/noon", "./config.yaml"):
        with pytest.raises(ConfigError, match=r"expected the name of a run, or its address in storage"):
            list(run_logs.log_lines(wrong, Query()))


def test_an_address_with_credentials_is_refused_without_them() -> None:
    with pytest.raises(ConfigError, match=r"credentials") as refused:
        find_stored.at_address("s3://me:hunter2hunter2@bucket/runs/night")
    assert "hunter2" not in str(refused.value)


def test_storage_that_does_not_answer_hides_no_line_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    write(NODES[0], entry(NODES[0], "here", 1.0))
    readers = log_readers.LogReaders(RUN)

    def away(run: str) -> None:
        raise StorageError("away")

    monkeypatch.setattr(find_stored, "of_name", away)
    assert set(readers._of_storage({"a" * 16: lambda *_: LogPage((), START, False)})) == set()
    readers._stored = None
    with pytest.raises(ConfigError, match="the storage of 'night' does not tell: away"):
        readers._of_storage({})


def test_many_pages_of_a_node_are_asked_for_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_logs, "PAGE_BYTES", 1000)
    monkeypatch.setattr(run_logs, "LEAST_PAGE", 100)
    for node in NODES:
        write(node, *(entry(node, f"{number}", float(number)) for number in range(200)))
    found = texts(run_logs.log_lines(RUN, Query()))
    assert found == [f"{number}" for number in range(200) for _ in NODES]
    assert json.dumps(found)
