"""The machine that a figure belongs to, on one that is made up."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from picotron_ray.bench.common.machine import machine, versions
from picotron_ray.bench.common.signals import sigterm_exits


@pytest.mark.parametrize(
    ("processors", "processor"),
    [("model name\t: Z80 A\nflags\t: x\nmodel name\t: Z80 B\n", "Z80 A"), ("flags\t: x\n", "z80")],
)
def test_machine(processors: str, processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1_000_000}  # 3.8147 GiB
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0: {1, 3}}[pid])
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(sysname="CP/M", release="2.2", machine="z80"))
    monkeypatch.setattr(Path, "read_text", lambda path: {"/proc/cpuinfo": processors}[str(path)])
    assert machine() == {"processor": processor, "cores": 2, "memory_gib": 3.8, "system": "CP/M 2.2"}


def test_versions_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def version(package: str) -> str:
        if package == "torchft":
            raise metadata.PackageNotFoundError
        return f"{package} 1"

    monkeypatch.setattr(metadata, "version", version)
    assert versions() == {name: f"{name} 1" for name in ("picotron-ray", "torch", "ray")}


def test_sigterm_ends_it_with_143_and_means_what_it_did_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end, sigterm_exits():
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
