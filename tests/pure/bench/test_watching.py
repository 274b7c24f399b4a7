"""How `bench watching` counts CPU seconds, and what it refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from picotron_ray.bench.watching import bench
from picotron_ray.bench.watching.bench import CpuSeconds, lines, shares
from picotron_ray.commands.bench import benchmarks
from picotron_ray.errors import ConfigError, PicotronError


def test_what_answering_scrapes_costs_is_what_the_service_takes_more() -> None:
    watched = CpuSeconds(wall_s=200.0, workers_s=360.0, service_s=23.0, page_s=2.0)
    plain = CpuSeconds(wall_s=100.0, workers_s=180.0, service_s=11.0, page_s=0.0)
    found = shares(watched, plain, 0.4)
    assert (found["exporter_s"], found["page_s"], found["telemetry_s"]) == (1.0, 2.0, 0.4)
    assert found["share"] == pytest.approx(3.4 / 385.0)
    assert found["small"]
    quiet = shares(watched, CpuSeconds(100.0, 180.0, 12.0, 0.0), 2.5)
    assert quiet["exporter_s"] == 0.0, "less than without is noise"
    assert not quiet["small"]


def test_figures_are_said() -> None:
    interval = {"ratio": 1.001, "low": 0.99, "high": 1.01, "half_width": 0.01, "unchanged": True, "pairs": 30}
    looked = {"lines_pushed": 90, "bytes_scraped": 2048, "endpoints": 2, "scrape_s": 5.0}
    cost = shares(CpuSeconds(200.0, 360.0, 23.0, 2.0), CpuSeconds(100.0, 180.0, 11.0, 0.0), 0.4)
    said = lines({**interval, **looked, **cost})
    assert "1.0010, 95 % interval 0.9900 to 1.0100 (half-width 1.0 %), 30 pairs: unchanged" in said[0]
    assert said[1].endswith("page 2.000, exporter 1.000, telemetry 0.400; 0.88 %, under 1 %")
    assert said[2] == "a page with one browser, 2 endpoints scraped each 5 s: 90 lines, 2 KiB"


def test_cpu_seconds_are_those_of_processes() -> None:
    own = psutil.Process(os.getpid())
    before = bench._cpu_s(own)
    for _ in range(200_000):
        pass
    assert bench._cpu_s(own) >= before > 0
    assert bench._title(own).endswith(Path(sys.executable).name) or bench._title(own)


def test_workers_of_another_run_are_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    own = psutil.Process(os.getpid())
    monkeypatch.setattr(bench, "_title", lambda each: "ray::WorkerActor" if each.pid == own.pid else "")
    assert [each.pid for each in bench.actors([own.pid])] == [own.pid]
    with pytest.raises(ConfigError, match="are workers of another run"):
        bench.actors([])


def test_a_page_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        pytest.raises(PicotronError, match=r"^`picotron-ray dashboard night` did not start \(exit 1\)$"),
        bench.watcher_of("night", (), 5.0),
    ):
        pass


def test_too_few_pairs_are_refused() -> None:
    done = CliRunner().invoke(benchmarks, ["watching", "night", "--pairs", "2"])
    assert done.exit_code == 2
