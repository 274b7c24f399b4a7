"""Every fault of a network before a real S3 server, amid a save, a restore, a collection and an end.

A few such faults change nothing but the time it takes. While one lasts, every call ends within its limit, and
what was going on is done again afterwards; nothing is committed twice or by halves.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.gc import collect
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import latest_good, read_ledger, verify_all
from picotron_ray.config.schema.service import CheckpointConfig, StorageConfig
from picotron_ray.errors import StorageUnavailableError
from tests.support.checkpoint.checkpoint_kit import load, make_state, same, save
from tests.support.checkpoint.s3_kit import Settings, environment, new_bucket
from tests.support.checkpoint.tcp_proxy import TcpProxy, tcp_proxy

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(300),
    # connections that the proxy resets are closed by the garbage collector, with a warning
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
FAULTS = ["delay", "cut", "truncate", "lost-reply", "500", "503", "drip"]
KEEP_ONE = CheckpointConfig(keep_last=1, gc_grace_s=0)


@pytest.fixture(scope="module")
def direct(s3_server: Settings) -> Iterator[StorageConfig]:
    with environment(s3_server):
        yield new_bucket(s3_server)


@pytest.fixture
def proxy(s3_server: Settings) -> Iterator[TcpProxy]:
    host, port = s3_server["S3_ENDPOINT"].removeprefix("http://").split(":")
    with tcp_proxy((host, int(port))) as proxy:
        yield proxy


class Behind:
    """A run's storage behind the proxy, and beside it the way around."""

    def __init__(self, direct: StorageConfig, proxy: TcpProxy, **limits: float) -> None:
        run = uuid.uuid4().hex
        values = {"endpoint_url": proxy.url, "retry_deadline_s": 20.0, "call_timeout_s": 40.0, **limits}
        self.storage: Storage = open_storage(direct.model_copy(update=values), run)
        self.around: Storage = open_storage(direct, run)
        self.log = RunLog(self.storage)
        self.log.claim_term("test")

    def check(self, steps: list[int]) -> None:
        """The log holds these commits once each, all whole, the newest with its state and ledger."""
        log = RunLog(self.around)
        log.refresh()
        assert [entry.body["step"] for entry in log.commits()] == steps
        assert [report.problems for report in verify_all(self.around, log)] == [()] * len(steps)
        good = latest_good(self.around, log)
        assert good is not None
        assert same(load(self.around, good.manifest), make_state(steps[-1]))
        assert [json.loads(line)["step"] for line in read_ledger(self.around, good.manifest)] == [
            *range(1, steps[-1] + 1)
        ]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_few_faults_change_nothing_but_the_time(
    direct: StorageConfig, proxy: TcpProxy, tmp_path: Path, fault: str
) -> None:
    """One after the other: in a save, its commit, a restore, a collection, and the summary of the end."""
    run = Behind(direct, proxy)
    proxy.drip_s = 0.001
    save(run.storage, run.log, tmp_path / "a", make_state(5), (1, 1, 5))
    for skip in (0, 3, 7, 10):  # the fault strikes later and later in a save
        step = 10 + skip
        spoil_later(proxy, fault, skip)
        save(run.storage, run.log, tmp_path / str(step), make_state(step), (1, 1, step))
        assert proxy.spoiled, "the fault did not strike"
    run.check([5, 10, 13, 17, 20])

    proxy.fail(fault, 2)
    good = latest_good(run.storage, run.log)
    assert good is not None
    assert same(load(run.storage, good.manifest), make_state(20))
    time.sleep(1.1)  # the store's times may have whole seconds only
    proxy.fail(fault, 2)
    report = collect(run.storage, run.log, KEEP_ONE)
    assert report.deleted, "collected through the fault"
    run.check([20])
    proxy.fail(fault, 1)
    run.storage.put("summary.json", b"{}")
    assert run.around.get("summary.json") == b"{}"


def spoil_later(proxy: TcpProxy, fault: str, skip: int) -> None:
    """Let ``skip`` answers pass before one is spoiled."""
    real, seen = proxy._strikes, SimpleNamespace(answers=0)

    def strikes(*modes: str) -> str:
        mine = fault in modes
        seen.answers += mine
        return real(*modes) if mine and seen.answers > skip else ""

    proxy._strikes = strikes  # type: ignore[method-assign]
    proxy.fail(fault, 1)


@pytest.mark.parametrize("fault", ["cut", "swallow", "truncate", "lost-reply", "500", "503", "drip"])
def test_a_fault_that_lasts_ends_every_call_in_time_and_all_goes_on_afterwards(
    direct: StorageConfig, proxy: TcpProxy, tmp_path: Path, fault: str
) -> None:
    run = Behind(direct, proxy, retry_deadline_s=0.7, call_timeout_s=2.0)
    save(run.storage, run.log, tmp_path / "a", make_state(5), (1, 1, 5))
    save(run.storage, run.log, tmp_path / "b", make_state(10), (1, 1, 10))
    good = latest_good(run.storage, run.log)
    assert good is not None

    def restore() -> Any:
        return load(run.storage, good.manifest)

    def end() -> Any:
        run.storage.put("summary.json", b"{}")

    def commit() -> Any:
        return save(run.storage, run.log, tmp_path / uuid.uuid4().hex, make_state(15), (1, 1, 15))

    works = [commit, restore, end, lambda: collect(run.storage, run.log, KEEP_ONE)]
    proxy.fail(fault)
    for work in works if fault != "truncate" else [restore]:  # the status of a put's answer arrives
        began = time.monotonic()
        with pytest.raises(StorageUnavailableError) as error:
            work()
        assert "\n" not in str(error.value)
        assert time.monotonic() - began < 30
    proxy.fail("pass")
    commit()
    assert restore()
    end()
    run.check([5, 10, 15])
    time.sleep(1.1)
    collect(run.storage, run.log, KEEP_ONE)
    run.check([15])
