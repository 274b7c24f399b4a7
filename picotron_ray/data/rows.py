"""Rows of a file, each a mapping, with the place that names it in messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.hf_rows import HfDataset
from picotron_ray.data.jsonl_record import parse_line
from picotron_ray.data.source_files import InputFile, require_columns, unreadable
from picotron_ray.errors import DataError

BATCH_ROWS = 1024
Row = tuple[Any, str]


def rows_of(file: InputFile, data: DataConfig) -> Iterator[Row]:
    """Read a file's rows: lines of jsonl; rows of parquet, of arrow (its stream or file format), of hf.

    Raises DataError for a file that cannot be read, or lacks a column that the config names.
    """
    if data.source == "hf":
        assert isinstance(file, HfDataset)
        yield from file.rows(columns(data))
        return
    try:
        with file.open() as stream:
            if data.source == "jsonl":
                yield from _lines(stream, file)
            else:
                yield from _table_rows(stream, file, data)
    except OSError as error:
        raise unreadable(file.where, error) from None


def columns(data: DataConfig) -> dict[str, str]:
    """Return the columns that a source's rows need, each with the config key that names it."""
    if data.chat_template is not None:
        return {data.messages_key: "data.messages_key"}
    keys = ["text_key"] + (["prompt_key", "spans_key"] if data.loss_mask else [])
    return {name: f"data.{key}" for key in keys if (name := getattr(data, key)) is not None}


def _lines(stream: BinaryIO, file: InputFile) -> Iterator[Row]:
    for number, line in enumerate(stream, 1):
        if line.strip():
            place = f"{file.where}:{number}"
            yield parse_line(line, place), place


def _table_rows(stream: BinaryIO, file: InputFile, data: DataConfig) -> Iterator[Row]:
    import pyarrow as pa

    needed, number = columns(data), 0
    invalid = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowSerializationError)
    try:
        for batch in _batches(stream, file, data, needed):
            for row in batch.to_pylist():
                number += 1
                yield row, f"{file.where}:{number}"
    except invalid as error:
        why = " ".join(str(error).split())[:160]
        raise DataError(
            f"data.path: {file.where} is no {data.source} file that pyarrow reads ({why}); choose the files"
            " by a glob, or say another data.source"
        ) from None


def _batches(stream: BinaryIO, file: InputFile, data: DataConfig, needed: dict[str, str]) -> Iterator[Any]:
    if data.source == "parquet":
        import pyarrow.parquet as pq

        table = pq.ParquetFile(stream)
        there = list(table.schema_arrow.names)
        require_columns(there, needed, file.where)
        wanted = [name for name in (*needed, *_optional(data)) if name in there]
        yield from table.iter_batches(BATCH_ROWS, columns=wanted)
        return
    import pyarrow as pa

    whole = stream.read(6) == b"ARROW1"
    stream.seek(0)
    reader = pa.ipc.open_file(stream) if whole else pa.ipc.open_stream(stream)
    there = list(reader.schema.names)
    require_columns(there, needed, file.where)
    wanted = [name for name in (*needed, *_optional(data)) if name in there]
    batches = map(reader.get_batch, range(reader.num_record_batches)) if whole else reader
    for batch in batches:
        for at in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(at, BATCH_ROWS).select(wanted)


def _optional(data: DataConfig) -> tuple[str, ...]:
    """Columns that a row may have."""
    return ("tools",) if data.chat_template is not None else ()
