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
from picotron_ray.checkpoint.storage.deadline import DeadlineStorage, deletions_given_up
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


def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)


CALLS: dict[str, Callable[[Storage], object]] = {
    "put": lambda storage: storage.put("k", b""),
    "put_if_absent": lambda storage: storage.put_if_absent("k", b""),
    "get": lambda storage: storage.get("k"),
    "get_range": lambda storage: storage.get_range("k", 0, 1),
    "size": lambda storage: storage.size("k"),
    "list": lambda storage: list(storage.list("k")),
    "delete": lambda storage: storage.delete("k"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_that_hangs_ends(call: Callable[[Storage], object], hanging: Hanging) -> None:
    began = time.monotonic()
    with pytest.raises(StorageUnavailableError, match=r"a dead mount gave no answer at k for 0\.2 s"):
        call(DeadlineStorage(hanging, LIMIT_S))
    assert LIMIT_S <= time.monotonic() - began < 10


def test_a_deletion_that_was_given_up_is_named_until_it_has_ended(hanging: Hanging) -> None:
    """It may happen after the same object was put again; more of them would only hang too."""
    storage = DeadlineStorage(hanging, 0.01)
    with pytest.raises(StorageUnavailableError, match="gave no answer at k"):
        storage.delete("k")
    with pytest.raises(StorageUnavailableError, match="a deletion of k hangs, another is not tried"):
        storage.delete("k")
    with pytest.raises(StorageUnavailableError, match="gave no answer at other"):
        storage.get("other")
    assert deletions_given_up(storage) == {"k"}
    assert storage._hanging == 2
    hanging.woken.set()
    until(lambda: not storage._hanging)
    assert deletions_given_up(storage) == frozenset()
    storage.delete("k")


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
    until(lambda: not storage._hanging)
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
