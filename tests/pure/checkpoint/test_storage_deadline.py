"""Storage that hangs: every call of it ends in time, and what hangs is bounded and counted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.checkpoint.storage import deadline
from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.deadline import DeadlineStorage
from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.storage.open import call_limit_s, open_storage
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import NotFoundError, StorageUnavailableError
from tests.support.checkpoint.storage_suite import StorageConformance

LIMIT_S = 0.2


class Hanging:
    """A storage whose calls return nothing before they are woken."""

    where = "a dead mount"

    def __init__(self) -> None:
        self.woken = threading.Event()

    def _hang(self, *_: object) -> Any:
        self.woken.wait(30)
        return b"late"

    put = put_if_absent = get = get_range = size = delete = _hang

    def list(self, prefix: str) -> Iterator[Any]:
        self._hang()
        yield from ()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    made = Hanging()
    yield made
    made.woken.set()


CALLS: dict[str, Callable[[Storage], object]] = {
    "put": lambda storage: storage.put("k", b""),
    "put_if_absent": lambda storage: storage.put_if_absent("k", b""),
    "get": lambda storage: storage.get("k"),
    "get_range": lambda storage: storage.get_range("k", 0, 1),
    "size": lambda storage: storage.size("k"),
    "list": lambda storage: list(storage.list("k")),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_that_hangs_ends(call: Callable[[Storage], object], hanging: Hanging) -> None:
    began = time.monotonic()
    with pytest.raises(StorageUnavailableError, match=r"a dead mount gave no answer at k for 0\.2 s"):
        call(DeadlineStorage(hanging, LIMIT_S))
    assert LIMIT_S <= time.monotonic() - began < 10


def test_nobody_goes_on_before_a_delete_has_ended(hanging: Hanging) -> None:
    """Given up, it could happen after a commit has put the same chunk again."""
    threading.Timer(0.05, hanging.woken.set).start()
    DeadlineStorage(hanging, 0.001).delete("k")
    assert hanging.woken.is_set()


def test_hanging_threads_do_not_pile_up_and_their_end_is_noticed(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "MOST_HANGING", 2)
    now = 100.0
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now))
    storage = DeadlineStorage(hanging, 0.01)
    for _ in range(2):
        with pytest.raises(StorageUnavailableError, match="gave no answer"):
            storage.get("k")
    with pytest.raises(StorageUnavailableError, match="2 calls hang, other is not tried"):
        storage.get("other")
    now += 0.01  # one may find out whether the mount was replaced
    for said in ("gave no answer at other", "3 calls hang, other is not tried"):
        with pytest.raises(StorageUnavailableError, match=said):
            storage.get("other")
    hanging.woken.set()
    for _ in range(1000):
        if not storage._hanging:
            break
        time.sleep(0.01)
    assert storage.get("k") == b"late"


def test_a_folder_on_a_dead_device_ends_too(tmp_path: Path) -> None:
    """A read of a named pipe that nobody writes blocks in the kernel, as on a mount whose server is gone."""
    os.mkfifo(tmp_path / "pipe")
    storage = DeadlineStorage(LocalStorage(str(tmp_path.parent), tmp_path.name), LIMIT_S)
    with pytest.raises(StorageUnavailableError, match="gave no answer at pipe"):
        storage.get("pipe")
    os.close(os.open(tmp_path / "pipe", os.O_WRONLY))  # lets the reader go


def test_errors_come_through_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing does not exist"):
        open_storage(StorageConfig(url=str(tmp_path)), "r").get("nothing")


def test_the_limit_leaves_time_for_the_retries() -> None:
    assert call_limit_s(StorageConfig()) == 120
    assert call_limit_s(StorageConfig(retry_deadline_s=1)) == 60
    assert call_limit_s(StorageConfig(retry_deadline_s=1, call_timeout_s=2)) == 2


class TestWithDeadline(StorageConformance):
    many = 2003

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage(StorageConfig(url=str(tmp_path)), "r1")
