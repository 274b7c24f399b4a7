"""S3 storage against a real server: conformance, saves and restores, fencing, bad settings, outages."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from botocore.exceptions import ConnectionClosedError

from picotron_ray.checkpoint.storage.base import Storage, StoredObject, probe
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.storage.s3 import S3Storage
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.checkpoint.store.gc import collect
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import latest_good, read_ledger, verify_all
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.service import CheckpointConfig, StorageConfig
from picotron_ray.errors import AlreadyExistsError, StorageError, StorageUnavailableError
from picotron_ray.runtime.doctor.drill import judge_drill
from picotron_ray.runtime.doctor.storage_rights import judge_storage
from tests.support.checkpoint.checkpoint_kit import generation, load, make_state, same, save
from tests.support.checkpoint.fencing import check_stopped_writer_is_refused
from tests.support.checkpoint.s3_kit import Settings, environment, new_bucket, script, settings_of
from tests.support.checkpoint.storage_suite import StorageConformance
from tests.support.checkpoint.tcp_proxy import tcp_proxy


@pytest.fixture(scope="module")
def config(s3_server: Settings) -> Iterator[StorageConfig]:
    with environment(s3_server):
        yield new_bucket(s3_server)


@pytest.fixture
def storage(config: StorageConfig) -> Storage:
    return open_storage(config, uuid.uuid4().hex)


class TestS3(StorageConformance):
    many = 1003


@pytest.fixture
def log(storage: Storage) -> RunLog:
    log = RunLog(storage)
    log.claim_term("test")
    return log


def test_save_damage_fall_back_and_collect(storage: Storage, log: RunLog, tmp_path: Path) -> None:
    for step in (5, 10):
        save(storage, log, tmp_path / str(step), make_state(step), (1, 1, step))
    reports = list(verify_all(storage, log))
    assert [(r.step, r.problems) for r in reports] == [(10, ()), (5, ())]
    assert reports[0].manifest is not None
    victim = next(iter(reports[0].manifest.chunks))
    key = f"chunks/{victim[:2]}/{victim}"
    data = bytearray(storage.get(key))
    data[len(data) // 2] ^= 1
    storage.put(key, bytes(data))
    good = latest_good(storage, log)
    assert good is not None
    assert good.manifest.step == 5
    assert good.complaints == (
        f"commit of step 10 is not used: chunk {key}: {len(data)} bytes do not match their address",
    )
    assert same(load(storage, good.manifest), make_state(5))
    assert len(read_ledger(storage, good.manifest)) == 5
    log.append("generation", generation(1, 2, 5, (1, 1)))
    save(storage, log, tmp_path / "15", make_state(15), (1, 2, 15))
    time.sleep(1.1)  # the store's times may have whole seconds only
    report = collect(storage, log, CheckpointConfig(keep_last=1, gc_grace_s=0))
    assert report.retired == ("manifests/10-1-1.json", "manifests/5-1-1.json")
    assert report.deleted == 4
    good = latest_good(storage, log)
    assert good is not None
    assert same(load(storage, good.manifest), make_state(15))


@pytest.mark.deep
def test_a_thousand_and_more_chunks_go_in_few_requests(
    storage: Storage, log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(storage, log, tmp_path / "5", make_state(5), (1, 1, 5))
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda n: storage.put(chunk_key(f"{n:064x}"), b"x"), range(1200)))
    time.sleep(1.1)  # the store's times may have whole seconds only
    asked: list[int] = []
    real = S3Storage.delete_many

    def counted(self: S3Storage, keys: Sequence[str], until_s: float) -> Sequence[str]:
        asked.append(len(keys))
        return real(self, keys, until_s)

    monkeypatch.setattr(S3Storage, "delete_many", counted)
    monkeypatch.setattr(S3Storage, "delete", lambda self, key: asked.append(0) if "chunks/" in key else None)
    assert collect(storage, log, CheckpointConfig(keep_last=1, gc_grace_s=0)).deleted == 1200
    assert max(asked) == 1000
    assert sum(asked) >= 1200
    assert 0 not in asked
    (report,) = verify_all(storage, log)
    assert not report.problems


@pytest.mark.parametrize("point", ["commit", "put"])
def test_stopped_writer_is_refused(config: StorageConfig, tmp_path: Path, point: str) -> None:
    check_stopped_writer_is_refused(config, uuid.uuid4().hex, tmp_path, point)


# --- settings that cannot work ---------------------------------------------------------------------


def refused(config: StorageConfig, **changes: object) -> str:
    with pytest.raises(StorageError) as caught:
        probe(open_storage(config.model_copy(update=changes), "r1"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_wrong_bucket(config: StorageConfig) -> None:
    assert refused(config, url="s3://no-such-bucket-here/x").startswith(
        "bucket no-such-bucket-here does not exist"
    )
    assert "names no bucket" in refused(config, url="s3://")


def test_wrong_keys(config: StorageConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        message = refused(config)
        assert "SignatureDoesNotMatch" in message
        assert "check the credentials" in message
        assert "wrong" not in message.replace("the secret key is wrong", "")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "AKnobody")
        assert "the access key is unknown" in refused(config)
    with monkeypatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        assert "set AWS_ACCESS_KEY_ID" in refused(config)


def test_nobody_listens(config: StorageConfig) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{held.getsockname()[1]}"
        start = time.monotonic()
        message = refused(config, endpoint_url=endpoint, retry_deadline_s=1.0)
        assert "did not answer for 1 s" in message
        assert time.monotonic() - start < 5
    assert "check storage.endpoint_url" in refused(config, endpoint_url="not a url")


def test_a_lost_reply_is_settled(config: StorageConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does the conditional put, the connection breaks: the repeated try finds its own bytes."""
    storage = S3Storage(config, "lost-reply")
    real = storage._client.put_object
    calls: list[str] = []

    def put(**request: object) -> object:
        reply = real(**request)
        calls.append("put")
        if len(calls) == 1:
            raise ConnectionClosedError(endpoint_url="s3")
        return reply

    monkeypatch.setattr(storage._client, "put_object", put)
    storage.put_if_absent("log/1", b"mine")
    assert storage.get("log/1") == b"mine"
    with pytest.raises(AlreadyExistsError):
        storage.put_if_absent("log/1", b"other")


def test_a_server_that_stops_answering_in_the_middle_is_given_up_and_taken_again(
    config: StorageConfig, s3_server: Settings, tmp_path: Path
) -> None:
    """A save through a proxy that swallows everything from one moment on; later it goes through."""
    host, port = s3_server["S3_ENDPOINT"].removeprefix("http://").split(":")
    with tcp_proxy((host, int(port))) as proxy:
        changes = {"endpoint_url": proxy.url, "retry_deadline_s": 0.5, "call_timeout_s": 1.5}
        storage = open_storage(config.model_copy(update=changes), "swallowed")
        log = RunLog(storage)
        log.claim_term("test")
        proxy.mode = "swallow"
        began = time.monotonic()
        with pytest.raises(StorageUnavailableError, match=r"gave no answer at \S+ for 1\.5 s"):
            save(storage, log, tmp_path / "a", make_state(1), (1, 1, 5))
        assert time.monotonic() - began < 20
        proxy.mode = "pass"
        save(storage, log, tmp_path / "b", make_state(1), (1, 1, 5))
    good = latest_good(open_storage(config, "swallowed"), log)
    assert good is not None
    assert good.manifest.step == 5


# --- the doctor ---------------------------------------------------------------------------------------


def test_the_doctor_tries_every_right_on_a_real_server_and_leaves_nothing(config: StorageConfig) -> None:
    found = list(judge_storage(config))
    assert [(one.check, one.status) for one in found] == [
        ("storage write", "ok"),
        ("storage read", "ok"),
        ("storage clock", "ok"),
        ("storage conditional put", "ok"),
        ("storage delete", "ok"),
    ]
    assert all(stored.key.split("/")[0][:7] != "doctor-" for stored in everything(config))


def everything(config: StorageConfig) -> list[StoredObject]:
    """All objects below the config's address, of all runs."""
    url, _, last = config.url.rpartition("/")
    return list(open_storage(config.model_copy(update={"url": url}), last).list(""))


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_the_doctors_drill_commits_to_a_real_server_and_leaves_nothing(config: StorageConfig) -> None:
    before = [stored.key for stored in everything(config)]
    job = load_job("tiny").model_copy(update={"storage": config})
    found = list(judge_drill(job, own_storage=False))
    assert [(one.check, one.status) for one in found] == [("drill", "ok"), ("drill ledger", "ok")], found
    assert [stored.key for stored in everything(config)] == before


# --- TLS, and a server that dies -------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(s3_server: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A second server of our own, over TLS, that tests may kill. (``s3_server`` unpacked the packages.)"""
    folder = tmp_path_factory.mktemp("s3-tls")
    script("start", folder, S3_TLS="1")
    settings = settings_of(folder)
    with environment(settings):
        yield {**settings, "folder": str(folder)}
    script("stop", folder)


class TestS3OverTls(StorageConformance):
    @pytest.fixture
    def storage(self, tls: Settings) -> Storage:
        return open_storage(new_bucket(tls), "r1")


def test_unknown_authority_is_named(tls: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    config = new_bucket(tls)
    monkeypatch.delenv("AWS_CA_BUNDLE")
    assert "set AWS_CA_BUNDLE" in refused(config)


# a connection that broke under TLS is closed by the garbage collector, with a warning, wherever that runs
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_killed_server(tls: Settings, tmp_path: Path) -> None:
    """SIGKILL of the gateway: refused after the deadline, waited out within it, and nothing is lost."""
    config = new_bucket(tls, retry_deadline_s=60.0)
    storage, hasty = (
        open_storage(config.model_copy(update={"retry_deadline_s": s}), "r1") for s in (60.0, 2.0)
    )
    log = RunLog(storage)
    log.claim_term("test")
    save(storage, log, tmp_path / "a", make_state(1), (1, 1, 5))
    os.kill(int((Path(tls["folder"]) / "run" / "client.rgw.pid").read_text()), signal.SIGKILL)
    with pytest.raises(StorageUnavailableError, match="did not answer for 2 s"):
        hasty.put("x", b"")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(save, storage, log, tmp_path / "b", make_state(2), (1, 1, 10))
        script("start", Path(tls["folder"]))
        waiting.result(timeout=60)
    good = latest_good(storage, log)
    assert good is not None
    assert good.manifest.step == 10
    assert same(load(storage, good.manifest), make_state(2))
    gc.collect()
