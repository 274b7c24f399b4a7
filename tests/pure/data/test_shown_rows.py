"""Rows of a step for people: each part is of its document, says its text, and what counts is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.data.batch import make_batch
from picotron_ray.data.dataset import build_dataset
from picotron_ray.data.ledger_line import line_rows
from picotron_ray.data.shown_rows import ShownRow, shown_rows
from picotron_ray.data.tokenizer import open_tokenizer
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.driver import data_commands

BATCH = 6


def job_of(folder: Path, **data: Any) -> Any:
    for name, first in (("lower", 97), ("upper", 65)):
        records = [
            {"question": f"{at % 10}?", "text": chr(first + at % 26) * (1 + at % 9)} for at in range(200)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    words = {"sequence_length": 24, "global_batch": BATCH, **data}
    job = {
        "name": "shown",
        "storage": {"url": str(folder / "runs")},
        "model": {"vocab_size": 260},
        "data": words,
    }
    return parse_job(job)


def of(folder: Path, name: str) -> dict[str, Any]:
    return {"source": "jsonl", "path": str(folder / f"{name}.jsonl")}


def rows_of(job: Any, step: int) -> list[ShownRow]:
    data = build_dataset(job.data, 260, job.seed, data_commands.cache_folder())
    batch = make_batch(data.feed, Layout(micro_batch=BATCH), 0, step)
    names = tuple(source.name for source in job.data.sources) or ("",)
    return list(shown_rows(data.feed, batch, names, open_tokenizer(job.data)))


@pytest.mark.parametrize("batching", ["packed", "buckets"])
def test_each_part_is_a_document_of_its_source(tmp_path: Path, batching: str) -> None:
    sources = [{"name": name, **of(tmp_path, name)} for name in ("lower", "upper")]
    job = job_of(tmp_path, sources=sources, batching=batching)
    data = build_dataset(job.data, 260, job.seed, data_commands.cache_folder())
    seen = set()
    for row in (row for step in range(1, 9) for row in rows_of(job, step)):
        seen.add(row.source)
        for part in row.parts:
            if part.stream is None:
                assert part.texts == ()
                continue
            ((text, counts),) = part.texts
            letters = text.removesuffix("<|end of document|>")
            assert counts
            assert len(set(letters)) == 1
            assert letters.islower() == (row.source == "lower")
            assert part.counted == ((part.first + 1, part.last),)
            source = data.train.parts[("lower", "upper").index(row.source)]  # type: ignore[attr-defined]
            assert source.tokens[part.stream] == ord(letters[0]), "that is where it stands"
        assert row.parts[0].first == 0
        assert row.parts[-1].last == 25
    assert seen == {"lower", "upper"}


def test_what_does_not_count_is_told(tmp_path: Path) -> None:
    masked = {"loss_mask": True, "prompt_key": "question", "batching": "packed"}
    for row in rows_of(job_of(tmp_path, **of(tmp_path, "lower"), **masked), 2):
        for part in row.parts:
            if part.stream is not None:
                (asked, first), (answer, second) = part.texts
                assert (asked[-1], first, second) == ("?", False, True)
                assert part.counted == ((part.first + 2, part.last),)
                assert answer.endswith("<|end of document|>")


def test_a_fixed_row_is_one_part(tmp_path: Path) -> None:
    rows = rows_of(job_of(tmp_path, **of(tmp_path, "lower")), 1)
    assert [len(row.parts) for row in rows] == [1] * BATCH
    assert {row.parts[0].stream for row in rows} == {24 * row.sample for row in rows}


def test_a_step_is_compared_with_its_line(tmp_path: Path) -> None:
    job = job_of(tmp_path, **of(tmp_path, "lower"))
    data, layout = (
        build_dataset(job.data, 260, job.seed, data_commands.cache_folder()),
        Layout(dp=3, micro_batch=1),
    )
    batches = [make_batch(data.feed, layout, at, 4) for at in range(3)]
    line = {"rows": line_rows([(*batch.rows, batch.digest.hex()) for batch in batches])}
    assert data_commands._compared(line, data.feed, layout, 4).startswith("the same")
    assert data_commands._compared(line, data.feed, layout, 5).startswith("differs: 3 of 3")
    wrong = replace(batches[1], digest=bytes(16))
    line = {"rows": line_rows([(*b.rows, b.digest.hex()) for b in (batches[0], wrong, batches[2])])}
    assert data_commands._compared(line, data.feed, layout, 4).startswith("differs: 1 of 3")


def test_without_a_commit_the_config_says_what_a_step_would_feed(tmp_path: Path) -> None:
    job = job_of(tmp_path, **of(tmp_path, "lower"))
    found = data_commands.show_step(job, 3, most=2)
    assert (found["ledger"], len(found["rows"]), found["left_off"]) == ("not in a committed ledger", 2, 4)
    assert found["samples"] == [2 * BATCH, 3 * BATCH]
    for words, said in (
        ((0,), r"--step: saw 0, expected 1 to 200"),
        ((3, 1), r"--rank: saw 1, but no committed ledger has the step"),
    ):
        with pytest.raises(ConfigError, match=said):
            data_commands.show_step(job, *words)
    stages = {
        "advance": "auto",
        "stages": [{"name": "a", "steps": 9, "difficulty": 0.5}, {"name": "b", "steps": 1}],
    }
    with pytest.raises(ConfigError, match="advance=auto the run decides"):
        data_commands.show_step(job_of(tmp_path, **of(tmp_path, "lower"), curriculum=stages), 18)
