"""Deletions of many objects in S3: what a server says of each key, and servers that know no batches."""

from __future__ import annotations

import time
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError

from picotron_ray.checkpoint.storage.s3 import S3Storage
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import StorageError

KEYS = ["chunks/aa/1", "chunks/aa/2", "chunks/aa/3"]


def refusal(code: str, status: int = 400) -> ClientError:
    return ClientError(
        {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "DeleteObjects"
    )


class Server:
    """A server that gives the answers of a script, the last one again and again."""

    def __init__(self, *answers: Any, single: Exception | None = None) -> None:
        self.answers, self.single = list(answers), single
        self.batches: list[list[str]] = []
        self.singles: list[str] = []

    def delete_objects(self, Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:
        assert Bucket == "bucket"
        self.batches.append([each["Key"] for each in Delete["Objects"]])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return {"Errors": [{"Key": f"p/r/{key}", "Code": code} for key, code in answer.items()]}

    def delete_object(self, Bucket: str, Key: str) -> None:
        if self.single is not None:
            raise self.single
        self.singles.append(Key)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "x")


def storage(server: Server) -> S3Storage:
    made = S3Storage(StorageConfig(url="s3://bucket/p"), "r")
    made._client.close()
    made._client = server
    return made


def soon() -> float:
    return time.monotonic() + 60.0


def test_one_request_deletes_all() -> None:
    server = Server({})
    assert storage(server).delete_many(KEYS, soon()) == []
    assert server.batches == [[f"p/r/{key}" for key in KEYS]]


def test_what_the_server_was_too_busy_for_is_left_and_what_is_not_there_is_not() -> None:
    server = Server({KEYS[0]: "SlowDown", KEYS[1]: "NoSuchKey", KEYS[2]: "InternalError"})
    assert storage(server).delete_many(KEYS, soon()) == [KEYS[0], KEYS[2]]


@pytest.mark.parametrize(
    ("code", "told"), [("AccessDenied", "may not do this"), ("ObjectLocked", f"refused {KEYS[1]}")]
)
def test_a_key_that_may_not_be_deleted_is_told_at_once(code: str, told: str) -> None:
    with pytest.raises(StorageError, match=told):
        storage(Server({KEYS[1]: code})).delete_many(KEYS, soon())


def test_a_request_that_fails_is_tried_again_but_never_too_late() -> None:
    server = Server(refusal("SlowDown", 503), ConnectionClosedError(endpoint_url="x"), {})
    assert storage(server).delete_many(KEYS, soon()) == []
    assert len(server.batches) == 3
    server = Server(refusal("SlowDown", 503))
    there = storage(server)
    until_s = time.monotonic() + 3.0
    assert there.delete_many(KEYS, until_s) == KEYS, "all are left"
    tried = len(server.batches)
    assert tried >= 1
    assert there.delete_many(KEYS, time.monotonic() - 0.001) == KEYS
    assert len(server.batches) == tried, "time was over"


@pytest.mark.parametrize("code", ["NotImplemented", "MissingContentMD5", "MethodNotAllowed"])
def test_a_server_that_knows_no_batches_gets_single_deletions_from_then_on(code: str) -> None:
    server = Server(refusal(code, 501))
    there = storage(server)
    assert there.delete_many(KEYS, soon()) == []
    assert there.delete_many(["chunks/aa/4"], soon()) == []
    assert len(server.batches) == 1
    assert sorted(server.singles) == [f"p/r/{key}" for key in [*KEYS, "chunks/aa/4"]]
    server.single = refusal("SlowDown", 503)
    assert sorted(there.delete_many(KEYS, time.monotonic() + 1.0)) == KEYS
    server.single = refusal("AccessDenied", 403)
    with pytest.raises(StorageError, match="may not do this"):
        there.delete_many(KEYS, soon())
