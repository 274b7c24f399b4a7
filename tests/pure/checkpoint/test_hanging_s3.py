"""S3 servers that take a request and never answer it, or never finish: every call ends in time."""

from __future__ import annotations

import time

import pytest

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import StorageUnavailableError
from tests.support.checkpoint.tcp_proxy import tcp_proxy


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "x")


@pytest.mark.parametrize("mode", ["swallow", "drip"])
def test_a_server_that_never_finishes_its_answer_is_given_up(mode: str) -> None:
    with tcp_proxy(mode=mode) as proxy:
        values = {
            "url": "s3://bucket", "endpoint_url": proxy.url, "path_style": True, "call_timeout_s": 1.0,
            "retry_deadline_s": 0.5,
        }  # fmt: skip
        storage = open_storage(StorageConfig.model_validate(values), "r")
        began = time.monotonic()
        with pytest.raises(StorageUnavailableError, match=r"no answer at k for 1 s"):
            storage.put("k", b"data")
        with pytest.raises(StorageUnavailableError):
            list(storage.list(""))
        assert time.monotonic() - began < 20, "its socket's own timeouts are 30 s"
