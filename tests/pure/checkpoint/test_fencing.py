"""On local disk: a coordinator stopped before its commit and woken after the next term is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from picotron_ray.config.schema.service import StorageConfig
from tests.support.checkpoint.fencing import check_stopped_writer_is_refused


@pytest.mark.parametrize("point", ["commit", "put"])
def test_stopped_writer_is_refused(tmp_path: Path, point: str) -> None:
    check_stopped_writer_is_refused(StorageConfig(url=str(tmp_path / "runs")), "r1", tmp_path, point)
