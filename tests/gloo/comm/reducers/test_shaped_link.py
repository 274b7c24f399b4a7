"""Two nodes with a slow link between them: two network namespaces, the link shaped by htb."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gloo.shaped_link import may_make_namespaces, run, shaped

FAST_MBIT, HALVED_MBIT = 160, 80
NEAR = 1.25
"""The choice is left only for what is 10 % faster, and times spread."""


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_two_levels_and_compression_beat_flat_sums_and_the_selector_follows(tmp_path: Path) -> None:
    if not may_make_namespaces():
        pytest.skip("no right to make network namespaces and to shape links with tc")
    with shaped(FAST_MBIT) as link:
        ranks = run(link, tmp_path, HALVED_MBIT)
    for found in ranks:
        before = {name: round(1e3 * seconds, 1) for name, seconds in found["before"].items()}
        after = {name: round(1e3 * seconds, 1) for name, seconds in found["after"].items()}
        print(f"ms at {FAST_MBIT} Mbit/s: {before}; at {HALVED_MBIT}: {after}; chosen {found['used'][-1]}")
    first = ranks[0]
    assert first["inner"] == 2, "the namespaces are known as nodes"
    for name in ("hierarchical", "bf16", "int8"):
        assert first["before"][name] < first["before"]["overlapped"], name
    assert all(found["used"] == first["used"] for found in ranks)
    assert first["after"][first["used"][-1]] < NEAR * min(first["after"].values())
