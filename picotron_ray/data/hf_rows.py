"""Datasets of the library `datasets`: a folder that ``save_to_disk`` wrote, or a name on the hub.

Map-style alone: rows have numbers, and the library's fingerprint stands for what they hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from picotron_ray.config.schema.data import DataConfig, SourceConfig
from picotron_ray.data.source_files import require_columns, shown
from picotron_ray.errors import DataError, install_extra


@dataclass(frozen=True, slots=True)
class HfDataset:
    """Dataset, opened."""

    name: str
    dataset: Any

    @property
    def where(self) -> str:
        """Folder or name, for messages."""
        return shown(self.name)

    def identity(self) -> str:
        """Name, number of rows and the library's fingerprint."""
        return f"hf\0{self.name}\0{len(self.dataset)}\0{self.dataset._fingerprint}\n"

    def open(self) -> BinaryIO:
        """Raise DataError: it has rows, not bytes."""
        raise DataError(f"data.path: {self.where} is a dataset; say data.source=hf")

    def rows(self, needed: dict[str, str]) -> Iterator[tuple[Any, str]]:
        """Read all rows, in their order. Raises DataError where a column is missing."""
        require_columns(list(self.dataset.column_names), needed, self.where)
        for number, row in enumerate(self.dataset, 1):
            yield row, f"{self.where}:{number}"


def find_dataset(data: DataConfig) -> HfDataset:
    """Open the dataset of a source. Raises DataError."""
    try:
        import datasets
    except ModuleNotFoundError:
        text = f"saw hf, but the package datasets is not there; on every node {install_extra('text')}"
        raise DataError(f"data.source: {text}") from None
    assert data.path is not None
    path = os.path.expanduser(data.path)
    try:
        if os.path.isdir(path):
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(data.path, split=data.split)
    except Exception as error:  # noqa: BLE001 - the library raises what its parts raise
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"data.path: {shown(data.path)} is no dataset that the package datasets opens ({why}); give a"
            " folder of save_to_disk, or a name on the hub"
        ) from None
    if isinstance(found, datasets.DatasetDict):
        if data.split not in found:
            raise DataError(
                f"data.split: saw {data.split!r}, expected one of {', '.join(map(str, found))}, the splits of"
                f" {shown(data.path)}"
            )
        found = found[data.split]
    elif data.split != SourceConfig().split and os.path.isdir(path):
        raise DataError(
            f"data.split: saw {data.split!r}, but {shown(data.path)} was saved without splits; leave it out"
        )
    return HfDataset(data.path, found)
