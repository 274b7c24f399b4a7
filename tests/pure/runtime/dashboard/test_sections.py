"""What is pushed stays small at any size, and is JSON whatever a run holds."""

from __future__ import annotations

import json
import time

import pytest

from picotron_ray.runtime.dashboard import cells, sections
from picotron_ray.runtime.dashboard.cells import MOST_CELLS, build_map, coordinates, degrees
from picotron_ray.runtime.dashboard.sections import MOST_BYTES, NAMES, ROWS, build, encode, plain, rank_rows
from picotron_ray.runtime.dashboard.watch import Board
from tests.support.runs.page_facts import SCRIPT, many_ranks

ALL_BYTES = 400 << 10


@pytest.mark.parametrize("ranks", [1, 64, 1024, 4096, 16_384])
def test_a_push_is_bounded_at_any_number_of_ranks(ranks: int) -> None:
    facts = many_ranks(max(64, ranks))
    began = time.process_time()
    sizes = {name: len(encode(name, value)) for name, value in build(facts, None, {}).items()}
    assert time.process_time() - began < 5.0
    assert max(sizes.values()) < MOST_BYTES, sizes
    assert sum(sizes.values()) < ALL_BYTES, sizes


def test_ranks_beyond_the_cells_are_shown_by_node_and_none_is_left_out() -> None:
    found = build_map(many_ranks(4096))
    assert (found["level"], len(found["cell_health"]), sum(found["sizes"])) == ("node", 512, 4096)
    assert found["axes"]["tp"] == [cells.SEVERAL] * 512  # a node has all of them
    assert set(found["axes"]["pp"]) == set(range(8))
    large = build_map(many_ranks(4096, each=1))
    assert large["level"] == "group"
    assert len(large["cell_health"]) <= MOST_CELLS
    assert sum(large["sizes"]) == 4096


def test_a_cell_has_the_gravest_health_of_its_ranks() -> None:
    facts = many_ranks(4096)
    del facts.status["pages"]["w1-800"]
    facts.status["pages"]["w1-1600"]["step"] = 5
    facts.status["failures"] = [{"kind": "hang", "target": "w1-2400", "step": 1, "recovered_s": None}]
    found = build_map(facts)
    at = {
        name: found["cell_health"].index(cells.HEALTH.index(name)) for name in ("silent", "behind", "failed")
    }
    assert at == {"silent": 100, "behind": 200, "failed": 300}
    assert found["health"] == {"well": 4061, "over": 0, "behind": 1, "slow": 32, "silent": 1, "failed": 1}


def test_places_on_the_mesh_are_those_of_the_layout() -> None:
    assert coordinates("dp2-tp1-pp2-zero2-1f1b-mb4", 4) == {"dp": [0, 1, 0, 1], "pp": [0, 0, 1, 1]}
    assert coordinates("dp2-tp1-pp2-zero2-1f1b-mb4", 3) == {}
    assert coordinates(None, 1) == {}
    assert degrees("dp99999999999999999999-tp1-pp1")["dp"] <= 1 << 20


def test_rows_of_ranks_come_in_pages() -> None:
    facts = many_ranks(4096)
    found = rank_rows(facts, 4000, 10_000)
    assert [row["rank"] for row in found["rows"]] == list(range(4000, 4000 + ROWS))
    assert found["rows"][0]["at"] == {"dp": 52, "tp": 0, "pp": 7}
    of_node = rank_rows(facts, 0, 64, facts.nodes[80])
    assert [row["rank"] for row in of_node["rows"]] == list(range(80, 88))
    assert rank_rows(facts, 1 << 40, 5)["rows"] == []


def test_text_is_kept_as_it_is_and_cut_and_figures_are_finite() -> None:
    facts = many_ranks(64, text=SCRIPT)
    found = build(facts, None, {})
    assert found["events"]["events"][0]["text"] == SCRIPT  # as text; the page puts in no markup
    assert found["head"]["loss"] is None
    assert len(plain("x" * 10_000)) == sections.TEXT
    json.loads(encode("all", found), parse_constant=lambda word: pytest.fail(word))


def test_a_section_that_is_too_large_is_left_out_and_said() -> None:
    assert json.loads(encode("map", ["x" * MOST_BYTES]))["section"] == "map"


def test_a_board_gives_what_changed_and_has_it_built_not_too_often() -> None:
    board = Board()
    assert board.due(0.0) == list(NAMES)
    board.post(dict.fromkeys(NAMES, 1), 0.0)
    version = board.since(0)[-1][0]
    assert board.due(1.0) == ["head", "checkpoints", "ranks", "findings", "doors"]
    board.post({"head": 1}, 1.0)
    assert board.since(version) == []
    assert board.due(4.9) == list(NAMES)
    board.post({"head": 2, "curves": 2}, 4.9)
    assert [(name, data) for _, name, data in board.since(version)] == [("head", b"2"), ("curves", b"2")]
