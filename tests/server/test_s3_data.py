"""Data in S3 on a real server: the same tokens as a folder gives; what is missing, changed or forbidden."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.documents import S3Access
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.data import s3_files, sources
from picotron_ray.data.cache import byte_splits
from picotron_ray.data.listing import find_files
from picotron_ray.errors import DataError
from tests.support.checkpoint.s3_kit import Settings, environment, new_bucket

NAMES = ("b.txt", "one/a.txt", "one/two/c.txt", ".hidden", "one/.d/e.txt", "x.md")


@pytest.fixture(scope="module")
def storage(s3_server: Settings) -> Iterator[StorageConfig]:
    with environment(s3_server):
        yield new_bucket(s3_server)


@pytest.fixture
def client(storage: StorageConfig) -> Any:
    return boto3.client("s3", endpoint_url=storage.endpoint_url)


def config(storage: StorageConfig, tail: str, source: Any = "text", **given: Any) -> DataConfig:
    s3 = S3Access(endpoint_url=storage.endpoint_url, region=storage.region, path_style=storage.path_style)
    path = f"s3://{bucket(storage)}/{tail}"
    return DataConfig(source=source, path=path, s3=s3, held_out_fraction=0.3, **given)


def bucket(storage: StorageConfig) -> str:
    return storage.url.removeprefix("s3://").partition("/")[0]


def test_a_prefix_gives_what_the_folder_gives(tmp_path: Path, storage: StorageConfig, client: Any) -> None:
    for name in NAMES:
        (tmp_path / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "docs" / name).write_text(f"The text of {name} é. " * 20)
        client.put_object(
            Bucket=bucket(storage), Key=f"docs/{name}", Body=(tmp_path / "docs" / name).read_bytes()
        )
    client.put_object(Bucket=bucket(storage), Key="docs-other/x.txt", Body=b"not in that folder")
    for tail in ("", "/**/*.txt", "/*", "/one/[a-z].*", "/o?e/*.txt", "/one/a.txt"):
        local = find_files(DataConfig(source="text", path=f"{tmp_path}/docs{tail}"))
        assert [f.name for f in find_files(config(storage, f"docs{tail}"))] == [f.name for f in local], tail
    wanted = byte_splits(
        DataConfig(source="text", path=str(tmp_path / "docs"), held_out_fraction=0.3), tmp_path / "cache"
    )
    for tail in ("docs", "docs/"):
        assert byte_splits(config(storage, tail), tmp_path / "cache").digest == wanted.digest


def test_a_table_is_read_by_ranges(
    tmp_path: Path, storage: StorageConfig, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_files, "RANGE_BYTES", 1000)
    rows = pa.Table.from_pylist(
        [{"text": f"The sum of {i} is {i * i}", "other": "x" * 50} for i in range(2000)]
    )
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=500)
    client.put_object(Bucket=bucket(storage), Key="t/a.parquet", Body=(tmp_path / "a.parquet").read_bytes())
    local = DataConfig(source="parquet", path=str(tmp_path / "a.parquet"), held_out_fraction=0.3)
    found = byte_splits(config(storage, "t/*.parquet", "parquet"), tmp_path / "cache")
    assert found.digest == byte_splits(local, tmp_path / "cache").digest


def refused(data: DataConfig, folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        byte_splits(data, folder / "cache")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_not_there_is_one_line(tmp_path: Path, storage: StorageConfig) -> None:
    where = f"s3://{bucket(storage)}/none"
    assert refused(config(storage, "none"), tmp_path) == (
        f"data.path: no files in {where}; give a file, folder or glob that holds some"
    )
    other = config(storage, "x").model_copy(update={"path": "s3://no-such-bucket-here/x"})
    assert "data.path: cannot read s3://no-such-bucket-here/x" in refused(other, tmp_path)
    assert "names no bucket" in refused(other.model_copy(update={"path": "s3://"}), tmp_path)


def test_an_object_that_changed_since_it_was_listed_is_named(
    tmp_path: Path, storage: StorageConfig, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(text: bytes) -> None:
        client.put_object(Bucket=bucket(storage), Key="c/a.jsonl", Body=text)

    put(b'{"text": "one"}\n')
    read = sources.rows_of

    def before(file: Any, data: DataConfig) -> Any:
        put(b'{"text": "two"}\n')
        yield from read(file, data)

    def after(file: Any, data: DataConfig) -> Any:
        yield from read(file, data)
        put(b'{"text": "six"}\n')

    for change, words in ((before, "changed since it was listed"), (after, "changed while it was read")):
        monkeypatch.setattr(sources, "rows_of", change)
        line = refused(config(storage, "c", "jsonl"), tmp_path)
        assert line.startswith("data.path: ")
        assert words in line
