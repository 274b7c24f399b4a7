"""S3 storage against an imitation, for speed; the proof is in tests/server against a real server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.storage.run_names import run_names
from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import ConfigError, StorageError
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


def test_objects_are_encrypted_by_the_key_of_the_config(config: StorageConfig) -> None:
    key = "arn:aws:kms:us-east-1:111122223333:key/1234abcd"
    run = uuid.uuid4().hex
    storage = open_storage(config.model_copy(update={"kms_key": key}), run)
    storage.put("a", b"1")
    storage.put_if_absent("b", b"2")
    assert [storage.get(name) for name in "ab"] == [b"1", b"2"]
    bucket, _, prefix = config.url.removeprefix("s3://").partition("/")
    client = boto3.session.Session().client("s3", endpoint_url=config.endpoint_url)
    for name in "ab":
        head = client.head_object(Bucket=bucket, Key=f"{prefix}/{run}/{name}")
        assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", key)
    client.close()


def test_a_key_beside_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"storage\.kms_key: saw a value with the local folder"):
        parse_job({"storage": {"kms_key": "alias/a"}})
