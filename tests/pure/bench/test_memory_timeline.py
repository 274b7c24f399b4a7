"""The timeline's page, and the account of a step in the results of ``bench mfu``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from picotron_ray.bench.mfu.memory_timeline import as_html, thinned
from picotron_ray.bench.mfu.result import memory_of
from picotron_ray.config.schema.memory import MEMORY_CLASSES
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver.asked_files import refuse_unwritable

pytestmark = pytest.mark.pure

POINTS = [(number / 1e4, (100, 0, 50, number % 997, 5)) for number in range(5000)]


def account(points: list[Any]) -> dict[str, Any]:
    classes = dict.fromkeys(MEMORY_CLASSES, 10)
    peak = max((sum(sizes) for _, sizes in points), default=0)
    return {
        "timeline": points,
        "phases": [(0.1, "forward")],
        "peak_bytes": peak,
        "by_class": classes,
        "most": classes,
    }


def test_fewer_points_lose_no_peak() -> None:
    few = thinned(POINTS, 100)
    assert len(few) == 100
    assert max(sum(sizes) for _, sizes in few) == max(sum(sizes) for _, sizes in POINTS)
    assert thinned(POINTS[:7], 100) == [[at, list(sizes)] for at, sizes in POINTS[:7]]


def test_the_page_is_whole_and_holds_every_class() -> None:
    page = as_html("<a run>", account(thinned(POINTS)))
    assert "<a run>" not in page
    assert "http" not in page
    (picture,) = re.findall(r"<svg.*</svg>", page)
    root = ElementTree.fromstring(picture)
    assert [area.findtext("title") for area in root.findall("polygon")] == list(MEMORY_CLASSES)
    heights = [
        float(y)
        for area in root.findall("polygon")
        for y in re.findall(r",([-0-9.]+)", area.attrib["points"])
    ]
    assert min(heights) == pytest.approx(40, abs=0.1), "the peak touches the top"
    assert "Nothing was allocated" in as_html("empty", account([]))


def test_the_fullest_rank_speaks_for_a_setting() -> None:
    events = [
        {"index": 0, "rank": 0, "memory": {"peak_bytes": 5}},
        {"index": 0, "rank": 1, "memory": {"peak_bytes": 7}},
        {"index": 1, "rank": 0, "memory": None},
        {"index": 1, "rank": 1, "refused": "no room"},
        {"index": 0, "rank": 0, "steps_s": [1.0]},
    ]
    assert memory_of(events) == {0: {"peak_bytes": 7}, 1: None}


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    refuse_unwritable("--memory-timeline", tmp_path / "new.html")
    for bad in (tmp_path, tmp_path / "none" / "new.html"):
        with pytest.raises(
            ConfigError, match=r"^--memory-timeline: saw .*, expected a file in a folder that exists$"
        ):
            refuse_unwritable("--memory-timeline", bad)
