"""What `data stats` counts, against what was written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from picotron_ray import cli
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.statistics import SourceStatistics, source_statistics


def token_files(folder: Path, train: list[int], held_out: list[int]) -> Path:
    folder.mkdir(parents=True)
    for name, ids in (("train", train), ("held_out", held_out)):
        np.array(ids, "<u2").tofile(folder / f"{name}.bin")
        np.array([token % 2 for token in ids], "u1").tofile(folder / f"{name}.mask")
    return folder


def counted(tmp_path: Path, **given: object) -> SourceStatistics:
    data = DataConfig.model_validate({"sequence_length": 4, **given})
    return source_statistics("data", data, 300, 0, tmp_path / "cache")


def test_documents_duplicates_and_overlap_are_counted(tmp_path: Path) -> None:
    # five documents, the third the first again, and the last without its end; two held out, one known
    path = token_files(tmp_path / "ids", [1, 2, 9, 3, 9, 1, 2, 9, 9, 5, 5, 5], [3, 9, 4, 4, 9])
    found = counted(tmp_path, source="memmap", path=str(path), end_token=9, loss_mask=True)
    assert (found.train.tokens, found.train.documents, found.train.duplicates) == (12, 5, 1)
    assert found.train.lengths == {"mean": 2.4, "p50": 3, "p90": 3, "p99": 3, "longest": 3}
    assert (found.held_out.documents, found.held_out.duplicates, found.overlap) == (2, 0, 1)
    assert (found.train.counted_share, found.held_out.counted_share) == (10 / 12, 3 / 5)
    assert (found.train.rows, found.train.full) == (2, 1.0)


def test_the_end_belongs_to_no_document(tmp_path: Path) -> None:
    """What a stream's last document lacks is not what makes it another one."""
    path = token_files(tmp_path / "ids", [1, 2, 9, 1, 2], [1, 2, 9, 7, 7])
    found = counted(tmp_path, source="memmap", path=str(path), end_token=9)
    assert (found.train.duplicates, found.overlap) == (1, 1)


def test_without_an_end_documents_are_not_known(tmp_path: Path) -> None:
    path = token_files(tmp_path / "ids", list(range(8)), list(range(5)))
    found = counted(tmp_path, source="memmap", path=str(path))
    assert (found.train.documents, found.train.lengths, found.overlap) == (None, None, None)
    assert found.train.tokens == 8


def test_rows_of_packed_documents_and_why_there_are_none(tmp_path: Path) -> None:
    path = token_files(tmp_path / "ids", [1, 9, 2, 3, 9, 4, 4, 4, 4, 4, 9], [5, 9, 6, 9])
    given = {"source": "memmap", "path": str(path), "end_token": 9, "batching": "packed"}
    full = counted(tmp_path, **given, long_documents="drop").train
    assert (full.rows, full.full) == (1, 1.0)
    refused = counted(tmp_path, **given).train
    assert (refused.rows, refused.documents) == (None, 3)
    assert refused.no_rows is not None
    assert refused.no_rows.startswith("data.long_documents: 1 documents are longer than the 5 tokens")


def test_the_command_counts_every_source(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(30):
            (tmp_path / name / f"{number}.txt").write_text("the same text " * 40)
    sources = [{"name": name, "source": "text", "path": str(tmp_path / name)} for name in "ab"]
    (tmp_path / "run.yaml").write_text(json.dumps({"name": "counted", "data": {"sources": sources}}))
    command = ["data", "stats", str(tmp_path / "run.yaml"), "data.held_out_fraction=0.3"]
    found = json.loads(CliRunner().invoke(cli.app, [*command, "--json"]).stdout)
    assert [source["source"] for source in found] == ["data.sources.a", "data.sources.b"]
    for source in found:
        train, held = source["train"], source["held_out"]
        assert train["documents"] + held["documents"] == 30
        assert train["duplicates"] == train["documents"] - 1
        assert source["overlap"] == held["documents"] > 0
    text = CliRunner().invoke(cli.app, command).stdout
    assert f"held-out documents that stand in train, too: {found[0]['overlap']}\n" in text
