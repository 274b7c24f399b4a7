"""Files of token ids: what a scan finds in them, and remembers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from picotron_ray.data import memmap

FILES = [([0, 0, 0], 0), ([5, 0, 3], 5), ([0, 1], 1), ([1, 2, 3, 9, 4], 9)]


@pytest.mark.parametrize(("ids", "largest"), FILES)
def test_a_scan_finds_the_largest_id_in_every_part(
    ids: list[int], largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memmap, "SCAN_TOKENS", 2)
    path = tmp_path / "tokens.bin"
    np.array(ids, np.uint16).tofile(path)
    tokens = np.fromfile(path, np.uint16)
    found = memmap._scan(path, tokens, tmp_path)
    assert found[0] == largest
    assert memmap._scan(path, tokens[:0], tmp_path) == found, "remembered, and not read again"
