"""Stored lines of one node: its own objects alone are read, those of earlier versions among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import zstandard

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.runtime.driver.log_readers import LogReaders
from picotron_ray.runtime.log_shipping import node_key, stored_lines, stored_nodes

NODE, OTHER = "abcd1" + 51 * "0", "abcd2" + 51 * "0"


def test_a_read_of_one_node_reads_its_objects_alone(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path), "night")
    old, foreign = "logs/nodes/abcd.jsonl.zst", "logs/nodes/beef.jsonl.zst"
    assert node_key(NODE) != node_key(OTHER)
    for key in (node_key(NODE), node_key(OTHER), old, foreign, node_key("coordinator")):
        storage.put(key, zstandard.ZstdCompressor().compress(b"line\n"))
    assert set(stored_lines(storage, NODE[:12])) == {node_key(NODE), old}
    assert set(stored_lines(storage, NODE)) == {node_key(NODE), old}
    assert set(stored_lines(storage, "coord")) == {node_key("coordinator")}
    assert len(stored_lines(storage)) == 5


def test_for_a_node_that_is_unknown_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand nodes have a gigabyte of lines; their names stand in their keys."""
    storage = LocalStorage(str(tmp_path), "night")
    storage.put(node_key(NODE), zstandard.ZstdCompressor().compress(b"line\n"))
    storage.put(node_key("coordinator"), b"not to be read")
    monkeypatch.setattr(storage, "get_range", None)
    monkeypatch.setattr(storage, "get", None)
    reader = LogReaders("night", "ffff")
    reader._storage = storage
    assert reader._read_storage() == {NODE[:16]: [], "coordinator": []}
    assert stored_nodes(storage) == [NODE[:16], "coordinator"]
