"""Tables, datasets and URLs: the same tokens as jsonl files of a folder give, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data import cache, sources
from picotron_ray.data.cache import TokenSplits, byte_splits
from picotron_ray.data.listing import find_files
from picotron_ray.errors import DataError

ROWS = [
    {"text": f"The sum of {i} and é is {i * i}", "q": f"{i}? ", "s": [[0, 3], [4, 5]]} for i in range(3000)
]


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    if system.exists("/box"):
        system.rm("/box", recursive=True)


def config(source: Any, path: object, **given: Any) -> DataConfig:
    return DataConfig(source=source, path=str(path), held_out_fraction=0.2, sequence_length=8, **given)


def jsonl(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def same(ours: TokenSplits, theirs: TokenSplits) -> None:
    assert ours.digest == theirs.digest
    np.testing.assert_array_equal(ours.train, theirs.train)


def arrow(path: Path, stream: bool) -> None:
    table = pa.Table.from_pylist(ROWS)
    with (
        pa.OSFile(str(path), "wb") as sink,
        (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as out,
    ):
        out.write_table(table, max_chunksize=1300)


@pytest.mark.parametrize("mask", [{}, {"prompt_key": "q"}, {"spans_key": "s"}], ids=str)
@pytest.mark.parametrize("kind", ["parquet", "arrow file", "arrow stream", "hf"])
def test_tables_give_what_json_lines_give(tmp_path: Path, kind: str, mask: dict[str, str]) -> None:
    given: dict[str, Any] = {"loss_mask": bool(mask), **mask}
    wanted = byte_splits(config("jsonl", jsonl(tmp_path / "lines"), **given), tmp_path / "cache")
    source, place = kind.partition(" ")[0], tmp_path / "table"
    if kind == "hf":
        import datasets

        datasets.Dataset.from_list(ROWS).save_to_disk(str(place))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), place, row_group_size=700)
    else:
        arrow(place, kind.endswith("stream"))
    same(byte_splits(config(source, place, **given), tmp_path / "cache"), wanted)


def test_a_dataset_of_several_splits_gives_the_one_asked_for(tmp_path: Path) -> None:
    import datasets

    parts = {"train": ROWS[:1500], "test": ROWS[1500:]}
    made = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    made.save_to_disk(str(tmp_path / "set"))
    for split, rows in parts.items():
        wanted = byte_splits(config("jsonl", jsonl(tmp_path / split, rows)), tmp_path / "cache")
        same(byte_splits(config("hf", tmp_path / "set", split=split), tmp_path / "cache"), wanted)
    with pytest.raises(
        DataError, match=r"^data.split: saw 'dev', expected one of train, test, the splits of"
    ):
        byte_splits(config("hf", tmp_path / "set", split="dev"), tmp_path / "cache")


def refused(data: DataConfig, folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        byte_splits(data, folder / "cache")
    line = str(caught.value)
    assert "\n" not in line
    assert not list((folder / "cache").glob("tokens-*[!k]"))
    return line


def test_a_missing_column_is_one_line(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    arrow(tmp_path / "a.arrow", stream=True)
    for source in ("parquet", "arrow"):
        place = tmp_path / f"a.{source}"
        assert refused(config(source, place, text_key="body"), tmp_path) == (
            f"data.text_key: {place} has no column 'body' (seen: text, q, s); name the right one"
        )
    asked = config("parquet", tmp_path / "a.parquet", loss_mask=True, prompt_key="ask")
    assert "data.prompt_key:" in refused(asked, tmp_path)
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "b.parquet")
    assert f"{tmp_path}/b.parquet:2 has no string under 'text'" in refused(
        config("parquet", tmp_path / "b.parquet"), tmp_path
    )


def test_what_is_no_table_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("not a table at all")
    for source in ("parquet", "arrow"):
        assert f"data.path: {tmp_path}/x is no {source} file that" in refused(
            config(source, tmp_path / "x"), tmp_path
        )
    assert "is no dataset that the package datasets opens" in refused(config("hf", tmp_path), tmp_path)


# --- URLs ----------------------------------------------------------------------------------------------


def test_a_url_gives_what_the_folder_gives(tmp_path: Path, memory: Any) -> None:
    names = ("b.txt", "one/a.txt", "one/two/c.txt", ".hidden", "one/.d/e.txt", "x.md")
    for name in names:
        (tmp_path / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "docs" / name).write_text(f"The text of {name} é. " * 20)
        memory.pipe(f"/box/docs/{name}", (tmp_path / "docs" / name).read_bytes())
    for tail in ("", "/**/*.txt", "/*", "/one/[a-z].*", "/o?e/*.txt", "/one/a.txt"):
        paths = [f"{tmp_path}/docs{tail}", f"memory://box/docs{tail}", f"file://{tmp_path}/docs{tail}"]
        found = [[file.name for file in find_files(config("text", path))] for path in paths]
        assert found[0] == found[1] == found[2], tail
        assert found[0]
    wanted = byte_splits(config("text", tmp_path / "docs"), tmp_path / "cache")
    same(byte_splits(config("text", "memory://box/docs"), tmp_path / "cache"), wanted)


def test_a_table_at_a_url(tmp_path: Path, memory: Any) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    memory.pipe("/box/a.parquet", (tmp_path / "a.parquet").read_bytes())
    wanted = byte_splits(config("parquet", tmp_path / "a.parquet"), tmp_path / "cache")
    same(byte_splits(config("parquet", "memory://box/*.parquet"), tmp_path / "cache"), wanted)


def test_places_that_hold_nothing_or_nobody_reads_are_one_line(tmp_path: Path, memory: Any) -> None:
    empty = "data.path: no files in memory://box/none; give a file, folder or glob that holds some"
    assert refused(config("text", "memory://box/none"), tmp_path) == empty
    assert "odd://x: nothing here reads that scheme" in refused(config("text", "odd://x"), tmp_path)


@pytest.mark.parametrize("url", [False, True])
def test_a_file_that_changes_while_it_is_read_is_named(
    url: bool, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New files beside it do no harm: they are not part of what was listed."""
    folder, read = jsonl(tmp_path / "lines"), sources.rows_of
    memory.pipe("/box/lines/a.jsonl", (folder / "a.jsonl").read_bytes())
    data = config("jsonl", "memory://box/lines" if url else folder)

    def during(name: str) -> Any:
        def rows(file: Any, data: DataConfig) -> Any:
            yield from read(file, data)
            if url:
                memory.pipe(f"/box/lines/{name}", b'{"text": "more"}\n')
            else:
                (folder / name).write_text('{"text": "more"}\n')

        return rows

    monkeypatch.setattr(sources, "rows_of", during("a.jsonl"))
    assert "data.path: a.jsonl (of " in (line := refused(data, tmp_path))
    assert "changed while it was read" in line
    jsonl(folder)
    memory.pipe("/box/lines/a.jsonl", (folder / "a.jsonl").read_bytes())
    monkeypatch.setattr(sources, "rows_of", during("b.jsonl"))
    assert len(cache.byte_splits(data, tmp_path / "cache").train) > 1000


def test_a_file_that_changed_makes_a_new_cache(tmp_path: Path, memory: Any) -> None:
    for size in (3000, 2999):
        jsonl(tmp_path / "lines", ROWS[:size])
        memory.pipe("/box/lines/a.jsonl", (tmp_path / "lines" / "a.jsonl").read_bytes())
        wanted = byte_splits(config("jsonl", tmp_path / "lines"), tmp_path / "cache")
        same(byte_splits(config("jsonl", "memory://box/lines"), tmp_path / "cache"), wanted)
