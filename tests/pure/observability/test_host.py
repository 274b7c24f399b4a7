"""A host's figures are those of this machine."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from picotron_ray.observability.catalogue import CATALOGUE
from picotron_ray.observability.host import Host, _network


def test_a_host_measures_what_the_catalogue_says(tmp_path: Path) -> None:
    host = Host({"state": tmp_path, "gone": tmp_path / "no such folder"})
    time.sleep(0.15)
    found = {sample.name: sample for sample in host.samples()}
    wanted = {name for name in CATALOGUE if name.startswith("picotron_host_")}
    assert wanted - {"picotron_host_io_bytes_total"} <= found.keys() <= wanted
    for sample in found.values():
        assert set(sample.labels) == set(CATALOGUE[sample.name].labels)
    used = found["picotron_host_memory_used_bytes"].value
    assert used == pytest.approx(psutil.virtual_memory().total - psutil.virtual_memory().available, rel=0.2)
    assert found["picotron_host_disk_used_ratio"].labels == {"folder": "state"}
    time.sleep(0.15)
    health = host.health()
    assert health.keys() == {"host_cpu_ratio", "host_memory_ratio", "disk_used_ratio"}
    assert all(0.0 <= share <= 1.0 for share in health.values())


def test_too_short_a_time_tells_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host({})
    time.sleep(0.15)
    share = host.health()["host_cpu_ratio"]
    now = host._cpu
    monkeypatch.setattr(psutil, "cpu_times", lambda: now)
    assert host.health()["host_cpu_ratio"] == share
    assert "host_cpu_ratio" not in Host({}).health()


def test_a_containers_memory_is_its_limit() -> None:
    sizes = {s.name: s.value for s in Host({}, memory_bytes=1 << 20).samples() if "memory" in s.name}
    assert sizes["picotron_host_memory_size_bytes"] == 1 << 20
    assert sizes["picotron_host_memory_used_bytes"] <= 1 << 20


def test_bytes_within_the_machine_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = psutil.net_io_counters()
    cards = {"lo": counts, "veth12": counts, "eth0": counts._replace(bytes_sent=3, bytes_recv=4)}
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: cards)
    assert _network() == (3, 4)
