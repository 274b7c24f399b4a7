"""What S3's client makes of a TLS handshake that fails: a hiccup is tried again, a wrong setting is not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.storage.tls_errors import FEW_TRIES
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import StorageError, StorageUnavailableError

_DECODE_ERROR = b"\x15\x03\x03\x00\x02\x02\x32"  # RFC 8446, section 6: a fatal alert, 50
_PROTOCOL_VERSION = b"\x15\x03\x03\x00\x02\x02\x46"  # 70
_HANDSHAKE_FAILURE = b"\x15\x03\x03\x00\x02\x02\x28"  # 40
_CERTIFICATE_REQUIRED = b"\x15\x03\x03\x00\x02\x02\x74"  # 116
_UNKNOWN_CA = b"\x15\x03\x03\x00\x02\x02\x30"  # 48
_PLAIN_HTTP = b"HTTP/1.1 400 Bad Request\r\n\r\n"


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], tuple[StorageConfig, list[bytes]]]]:
    """Begin a server that answers every connection's first bytes with ``reply``; also what it has read."""
    servers: list[socket.socket] = []

    def start(reply: bytes) -> tuple[StorageConfig, list[bytes]]:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)
        read: list[bytes] = []
        threading.Thread(target=_serve, args=(server, reply, read), daemon=True).start()
        values = {
            "url": "s3://bucket", "endpoint_url": f"https://127.0.0.1:{server.getsockname()[1]}",
            "path_style": True, "retry_deadline_s": 2.0,
        }  # fmt: skip
        return StorageConfig.model_validate(values), read

    yield start
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def _serve(server: socket.socket, reply: bytes, read: list[bytes]) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return
        with client:
            read.append(client.recv(4096))
            client.sendall(reply)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "x")


Answering = Callable[[bytes], tuple[StorageConfig, list[bytes]]]


def test_an_alert_of_the_server_is_tried_again_until_the_deadline(answering: Answering) -> None:
    config, read = answering(_DECODE_ERROR)
    with pytest.raises(StorageUnavailableError, match=r"did not answer for 2 s at k: .*DECODE_ERROR"):
        open_storage(config, "r").put("k", b"data")
    assert len(read) > 1


@pytest.mark.parametrize(
    ("reply", "advice"),
    [
        (_PLAIN_HTTP, "the server speaks no TLS there: http:// in storage.endpoint_url"),
        (_PROTOCOL_VERSION, "the server's TLS is too old"),
        (_CERTIFICATE_REQUIRED, "the server wants a client's certificate"),
        (_UNKNOWN_CA, "the server does not know the authority of the client's certificate"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_at_once(
    answering: Answering, reply: bytes, advice: str
) -> None:
    config, read = answering(reply)
    with pytest.raises(StorageError, match=advice) as refused:
        open_storage(config, "r").put("k", b"data")
    assert not isinstance(refused.value, StorageUnavailableError)
    assert len(read) == 1


@pytest.mark.parametrize("text", [None, "no certificate\n", "-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_bundle_of_authorities_that_cannot_be_read_is_refused_at_once(
    answering: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    """A worker that restores waits for storage without an end: what no try mends is no outage."""
    bundle = tmp_path / "authorities.pem"
    if text is not None:
        bundle.write_text(text)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    config, _ = answering(_DECODE_ERROR)
    with pytest.raises(StorageError, match=f"AWS_CA_BUNDLE={bundle} cannot be read") as refused:
        open_storage(config, "r").put("k", b"data")
    assert not isinstance(refused.value, StorageUnavailableError)


def test_a_bundle_that_is_a_folder_is_refused_at_once(
    answering: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path))
    config, _ = answering(_DECODE_ERROR)
    with pytest.raises(StorageError, match="cannot be read") as refused:
        open_storage(config, "r").put("k", b"data")
    assert not isinstance(refused.value, StorageUnavailableError)


def test_a_handshake_that_is_refused_without_a_reason_is_tried_a_few_times(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, read = answering(_HANDSHAKE_FAILURE)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(StorageError, match="refused 6 handshakes") as refused:
        open_storage(config.model_copy(update={"retry_deadline_s": 60.0}), "r").put("k", b"data")
    assert not isinstance(refused.value, StorageUnavailableError)
    assert len(read) == FEW_TRIES == 6
