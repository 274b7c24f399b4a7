"""Ranges of objects: a body that breaks off is read again, and one that always does is told."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ResponseStreamingError

from picotron_ray.data import s3_files
from picotron_ray.data.s3_files import S3File
from picotron_ray.errors import DataError

CONTENT = bytes(range(200)) * 50


class Body:
    def __init__(self, data: bytes, breaks: bool) -> None:
        self._data, self._breaks = data, breaks

    def read(self) -> bytes:
        if self._breaks:
            raise ResponseStreamingError(error=ConnectionResetError("reset by peer"))
        return self._data


class Client:
    """Client whose first bodies break off; a real server's do only by chance."""

    def __init__(self, broken: int) -> None:
        self.broken, self.asked = broken, 0

    def get_object(self, Range: str, **words: Any) -> dict[str, Body]:
        self.asked += 1
        first, last = map(int, Range.removeprefix("bytes=").split("-"))
        return {"Body": Body(CONTENT[first : last + 1], self.asked <= self.broken)}


@pytest.fixture(autouse=True)
def _without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_files, "MOST_WAIT_S", 0.0)


def test_a_body_that_breaks_off_is_read_again() -> None:
    client = Client(broken=3)
    with S3File(client, "bucket", "key", "key", len(CONTENT), "etag").open() as stream:
        assert stream.read() == CONTENT
    assert client.asked > 3


def test_one_that_always_does_is_told_in_one_line() -> None:
    client = Client(broken=10**6)
    stream = S3File(client, "bucket", "key", "key", len(CONTENT), "etag").open()
    with pytest.raises(DataError, match=r"data.path: cannot read s3://bucket/key: .*reset by peer") as caught:
        stream.read()
    assert "\n" not in str(caught.value)
    assert client.asked == s3_files.TRIES
