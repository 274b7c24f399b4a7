"""S3 storage against an imitation, for speed; the proof is in tests/server against a real server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.storage.run_names import run_names
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import StorageError
from tests.support.checkpoint.s3_kit import environment, new_bucket
from tests.support.checkpoint.storage_suite import StorageConformance


@pytest.fixture(scope="module")
def config() -> Iterator[StorageConfig]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "S3_ENDPOINT": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }
    with environment({**settings, "AWS_DEFAULT_REGION": "us-east-1"}):
        yield new_bucket(settings)
    server.stop()


class TestMoto(StorageConformance):
    @pytest.fixture
    def storage(self, config: StorageConfig) -> Storage:
        return open_storage(config, uuid.uuid4().hex)


def test_bucket_that_does_not_exist(config: StorageConfig) -> None:
    storage = open_storage(config.model_copy(update={"url": "s3://nobody-has-this/x"}), "r1")
    with pytest.raises(StorageError, match=r"bucket nobody-has-this does not exist"):
        storage.put("x", b"")


def test_runs_below_a_prefix_are_named(config: StorageConfig) -> None:
    below = config.model_copy(update={"url": f"{config.url.rstrip('/')}/{uuid.uuid4().hex}"})
    for run in ("b-run", "a-run"):
        open_storage(below, run).put("chunks/aa/one", b"x")
        open_storage(below, run).put("run.json", b"{}")
    assert run_names(below) == ["a-run", "b-run"]
    assert run_names(below.model_copy(update={"url": f"{below.url}/none"})) == []
