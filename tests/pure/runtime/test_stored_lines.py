"""Stored lines of one node: its own objects alone are read, those of earlier versions among them."""

from __future__ import annotations

from pathlib import Path

import zstandard

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.runtime.log_shipping import node_key, stored_lines

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
