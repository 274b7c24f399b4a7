"""The standing store: what it prints, for how long it serves, and how it sees the end of a process."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import threading
import time

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from picotron_ray.comm import rendezvous_store
from picotron_ray.comm.rendezvous_store import main, wait_for_exit
from picotron_ray.comm.sockets import tcp_sockets


def test_it_serves_at_the_address_that_it_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def use(pid: int) -> None:
        address = json.loads(capsys.readouterr().out)
        assert address["host"] == "127.0.0.1"
        assert address["port"] > 1023, "any free one"
        local = {info.local for info in tcp_sockets() if info.listening and info.local[1] == address["port"]}
        assert local == {("127.0.0.1", address["port"])}, "torch's own would listen at all addresses"
        TCPStore(address["host"], address["port"], is_master=False).set("key", "value")
        assert TCPStore(address["host"], address["port"], is_master=False).get("key") == b"value"
        asked.append(pid)

    monkeypatch.setattr(rendezvous_store, "wait_for_exit", use)
    assert main(["--parent-pid", "7"]) == 0
    assert asked == [7]


def test_it_ends_with_the_process_that_it_was_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as gone:
        gone.wait()
    monkeypatch.setattr(sys, "argv", ["rendezvous_store", "--parent-pid", str(gone.pid)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(rendezvous_store.__file__, run_name="__main__")
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out).keys() == {"host", "port"}


def test_it_is_told_whose_end_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--parent-pid" in capsys.readouterr().err


@pytest.mark.parametrize("known", [True, False], ids=["pidfd", "no pidfd"])
def test_the_end_of_a_process_is_awaited(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    def refuse(pid: int) -> int:
        raise OSError("not here")

    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        threading.Event().wait(0.01)

    monkeypatch.setattr(rendezvous_store.time, "sleep", nap)
    if not known:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        waiting = threading.Thread(target=wait_for_exit, args=(process.pid,), daemon=True)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        process.stdin.close()
        process.wait()
        waiting.join(5)
        assert not waiting.is_alive()
    assert len(os.listdir("/proc/self/fd")) == before
    assert set(naps) == (set() if known else {rendezvous_store.POLL_S})
    began = time.monotonic()
    wait_for_exit(process.pid)  # gone already
    assert time.monotonic() - began < 1
