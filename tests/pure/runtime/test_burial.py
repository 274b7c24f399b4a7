"""Dead workers leave nothing behind that grows with their number, and nothing that is needed goes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader
from picotron_ray.config.schema.service import ElasticConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import plain
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.heartbeat import Page, PageView, read_page
from picotron_ray.runtime.node_agent.burial import bury, newest_complete
from picotron_ray.runtime.ray_cluster import kept_slots
from picotron_ray.runtime.ray_cluster.data_notes import leave_note

A, B = m.GenerationId(1, 1), m.GenerationId(1, 2)


def spec(generation: m.GenerationId, source: m.Source) -> m.GenerationSpec:
    return m.GenerationSpec(generation, (m.Member("w", "n"),), Layout(), source, "test")


FIRST = spec(A, m.Source("init"))
SECOND = spec(B, m.Source("slots", 6, A, layout=Layout()))


def page(folder: Path, worker: str, n: int, complete: int) -> PageView:
    written = Page(folder / f"{worker}.page", ElasticConfig())
    written.begin(1, n, 0, 0)
    written.put(complete=complete)
    view = read_page(folder / f"{worker}.page")
    assert view is not None
    return view


def slot(folder: Path, name: str, n: int, step: int) -> None:
    made = SlotFile.create(folder / name, 1)
    made.write(SlotHeader(1, n, step, 0), [], [])
    made.close()


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_worker_is_buried_once_a_newer_state_is_sealed_everywhere(tmp_path: Path) -> None:
    (tmp_path / "agent").write_text("1 1")
    alive = page(tmp_path, "alive", 2, -1)
    page(tmp_path, "dead", 1, 7)
    for worker in ("alive", "dead"):
        leave_note(tmp_path, worker, "aa")
    (tmp_path / "dead.spec").write_text(json.dumps(plain(FIRST)))
    (tmp_path / "alive.spec").write_text(json.dumps(plain(SECOND)))
    for index, step in enumerate((5, 6, 7)):
        slot(tmp_path, f"dead.{index}.slot", 1, step)
    SlotFile.create(tmp_path / "dead.3.slot", 1).close()
    mine = {"agent", "alive.page", "alive.spec", "alive.data"}
    bury(tmp_path, lambda: [alive], lambda: SECOND)
    assert left(tmp_path) == mine | {"dead.1.slot", "dead.2.slot"}, "step 6 is what generation 1.2 came from"
    bury(tmp_path, lambda: [page(tmp_path, "alive", 2, 7)], lambda: SECOND)
    assert left(tmp_path) == mine
    bury(tmp_path, lambda: [alive], lambda: AssertionError("nobody is dead"))  # type: ignore[arg-type, return-value]


def test_a_worker_that_starts_while_the_dead_are_looked_for_is_not_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that stood still between its two looks removed its page: seen by nobody, it trained on, and
    no snapshot of its generation was ever whole again."""
    (tmp_path / "dead.spec").write_text(json.dumps(plain(FIRST)))
    living: list[PageView] = []
    listing = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        living.append(page(folder, "early", 2, -1))  # it starts just before the folder is listed
        found = list(listing(folder))
        living.append(page(folder, "late", 2, -1))
        slot(folder, "late.0.slot", 2, 7)
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    bury(tmp_path, lambda: [each for each in living if each.worker == "early"], lambda: SECOND)
    monkeypatch.undo()
    assert left(tmp_path) == {"early.page", "late.page", "late.0.slot"}


def test_evidence_of_an_end_goes_once_it_is_old(tmp_path: Path) -> None:
    page(tmp_path, "dead", 1, 7)
    (tmp_path / "starting.stacks").write_text("")  # its page comes later
    for suffix in (".stacks", ".ask", ".collectives"):
        (tmp_path / f"dead{suffix}").write_text("")
    alive = page(tmp_path, "alive", 1, 7)
    (tmp_path / "alive.stacks").write_text("")
    bury(tmp_path, lambda: [alive], lambda: None)
    bury(tmp_path, lambda: [alive], lambda: None)
    assert {"dead.stacks", "starting.stacks"} < left(tmp_path)
    for path in tmp_path.glob("[!s]*.*"):
        os.utime(path, (0, 0))
    bury(tmp_path, lambda: [alive], lambda: None)
    assert left(tmp_path) == {"alive.page", "alive.stacks", "starting.stacks"}


def test_no_spec_is_read_while_there_is_nothing_to_bury_but_fresh_evidence(tmp_path: Path) -> None:
    """Else each heartbeat would read the spec of every generation's largest part, for an hour."""

    def newest() -> m.GenerationSpec | None:
        raise AssertionError("it was read")

    alive = page(tmp_path, "alive", 1, 7)
    (tmp_path / "dead.stacks").write_text("")
    bury(tmp_path, lambda: [alive], newest)
    os.utime(tmp_path / "dead.stacks", (0, 0))
    bury(tmp_path, lambda: [alive], lambda: None)
    assert left(tmp_path) == {"alive.page"}


def test_the_newest_spec_and_what_is_kept_outlive_their_writer(tmp_path: Path) -> None:
    (tmp_path / "dead.spec").write_text(json.dumps(plain(SECOND)))
    slot(tmp_path, "dead.0.slot", 1, 5)
    kept_slots.mark(tmp_path, {"dead.0.slot": 5}, None)
    bury(tmp_path, lambda: [page(tmp_path, "alive", 2, 9)], lambda: SECOND)
    assert left(tmp_path) == {"dead.spec", "dead.0.slot", kept_slots.MARKER, "alive.page"}


def test_what_is_complete_is_judged_by_the_newest_generation(tmp_path: Path) -> None:
    old, new = page(tmp_path, "old", 1, 9), page(tmp_path, "new", 2, 8)
    fresh = page(tmp_path, "fresh", 2, -1)
    assert newest_complete([fresh], None) is None
    assert newest_complete([old, fresh], FIRST) == (1, 1, 9)
    assert newest_complete([old, fresh], SECOND) == (1, 1, 6), (
        "1.2 went back: its own states count from now on"
    )
    assert newest_complete([old, new], SECOND) == (1, 2, 8)
