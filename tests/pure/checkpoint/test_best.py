"""The best commit by a figure of its own step: found in the log, and kept by retention."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.best import best_commit
from picotron_ray.checkpoint.store.gc import collect, retained
from picotron_ray.checkpoint.store.run_log import Entry, RunLog
from tests.support.checkpoint.checkpoint_kit import generation, make_state, save
from tests.support.checkpoint.gc_kit import config

LOSSES = {1: 3.0, 2: 1.0, 3: 1.0, 4: None, 5: 0.5, 6: 2.0}


def log_of(*resumes: tuple[int, int]) -> tuple[Any, list[Entry]]:
    """Generation 1 went to step 6; each later one resumed at a step, and has a commit of the next one."""
    entries: list[Entry] = []

    def add(kind: Any, **body: Any) -> None:
        entries.append(Entry(len(entries) + 1, kind, 1, "w", "", body))

    add("generation", **generation(1, 1))
    for step, loss in LOSSES.items():
        figures = {} if loss is None else {"figures": {"eval_loss": loss, "eval_loss/web": -loss}}
        add("commit", term=1, n=1, step=step, manifest=f"1-{step}", **figures)
    for n, step in resumes:
        add("generation", **generation(1, n, step=step, parent=(1, n - 1)))
        add("commit", term=1, n=n, step=step + 1, manifest=f"{n}-{step}")
    commits = [entry for entry in entries if entry.kind == "commit"]
    return SimpleNamespace(entries=lambda: entries, commits=lambda: commits), commits


def test_the_lowest_figure_is_the_best_and_of_equal_ones_the_newest() -> None:
    log, commits = log_of()
    best = best_commit(log, commits, (1, 1), "eval_loss")
    assert best is not None
    assert best.body["step"] == 5
    without = [entry for entry in commits if entry.body["step"] != 5]
    equal = best_commit(log, without, (1, 1), "eval_loss")
    assert equal is not None
    assert equal.body["step"] == 3
    assert best_commit(log, commits, (1, 1), "eval_loss/other") is None


def test_retention_keeps_it_unless_a_rewind_has_made_it_void() -> None:
    def kept(log: Any, **values: Any) -> list[int]:
        return [entry.body["step"] for entry in retained(log, config(**values))]

    log, _ = log_of()
    assert kept(log) == [6]
    assert kept(log, keep_best="eval_loss") == [5, 6]
    assert kept(log, keep_best="eval_loss/web") == [1, 6]
    back, _ = log_of((2, 3))  # step 5 is void, and 3 is the newest of the two with 1.0
    assert kept(back, keep_best="eval_loss") == [3, 4]


def test_a_commit_carries_the_figures_of_its_slots(storage: LocalStorage, memory_path: Path) -> None:
    """From the header of a slot by manifest and log to a reader, and through a collection."""
    log = RunLog(storage)
    log.claim_term("test")
    log.append("generation", generation(1, 1))
    for step, loss in ((1, 2.0), (2, 5.0), (3, 4.0)):
        extra = {"evaluation": {"eval_loss": loss}}
        save(storage, log, memory_path / str(step), make_state(step), (1, 1, step), extra=extra)
    assert [entry.body["figures"]["eval_loss"] for entry in log.commits()] == [2.0, 5.0, 4.0]
    collect(storage, log, config(keep_best="eval_loss", gc_grace_s=0.0))
    read = RunLog(storage)
    read.refresh()
    assert [entry.body["step"] for entry in read.commits()] == [1, 3]
    best = best_commit(read, read.commits(), (1, 1), "eval_loss")
    assert best is not None
    assert best.body["step"] == 1
