"""Links below the axes of a layout: all ranks probe them at the same steps."""

from __future__ import annotations

import time

import pytest
import torch

from picotron_ray.config.schema.telemetry import AXES
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.mesh import make_mesh
from picotron_ray.runtime.coordinator.link_figures import RoundLinks
from picotron_ray.train import link_probe
from picotron_ray.train.link_probe import EVERY, FIRST, LinkProbe
from picotron_ray.train.step_clock import NO_LINK, Link
from tests.support.gloo.pool import Job, Pool

CPU = torch.device("cpu")


def probed(job: Job, layout: Layout, slow_s: float) -> tuple[Link, ...]:
    """Links of a rank; the last one comes late to each sum."""
    groups = job.groups()
    groups.connect()
    mesh = make_mesh(layout, job.rank, "cpu")
    probe = LinkProbe(mesh.group, CPU, 40)
    assert [step for step in range(40, 40 + 2 * EVERY) if probe.due(step)] == [40 + FIRST, 40 + EVERY + FIRST]
    if job.rank == layout.world_size - 1:
        time.sleep(slow_s)
    probe.run()
    found = probe.links
    probe.close()
    mesh.close()
    groups.close()
    return found


def test_each_axis_with_neighbours_has_a_link_which_a_late_rank_does_not_slow(pool: Pool) -> None:
    for links in pool.run(4, probed, Layout(dp=2, tp=2), 0.3):
        by_axis = dict(zip(AXES, links, strict=True))
        assert {axis for axis, link in by_axis.items() if link != NO_LINK} == {"dp", "tp"}
        for axis in ("dp", "tp"):
            assert 0 < by_axis[axis].latency_s < 0.1
            assert 1e6 < by_axis[axis].bytes_per_s < 1e12


def test_a_layout_without_neighbours_is_never_probed() -> None:
    probe = LinkProbe(lambda name: None, CPU, 0)
    assert not any(probe.due(step) for step in range(2 * EVERY))


def test_bandwidth_is_that_of_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe.dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(link_probe, "_fastest", lambda buffer, group: 0.5 if buffer.numel() > 1 else 0.001)
    link = link_probe._measured(None, CPU)  # type: ignore[arg-type]
    assert link == Link(0.001, 1.5 * link_probe.NBYTES / 0.5)


def test_a_runs_link_is_its_slowest_ranks_against_the_best_that_was_seen() -> None:
    best: dict[str, float] = {}
    for latencies, bandwidths, wanted in (
        ((1e-4, 3e-4), (2e9, 1e9), (3e-4, 1e9, 1.0)),
        ((1e-4, 1e-4), (5e8, 4e9), (1e-4, 5e8, 0.5)),
    ):
        links = RoundLinks()
        for latency_s, bytes_per_s in zip(latencies, bandwidths, strict=True):
            links.add((latency_s, *[0.0] * 4, bytes_per_s, *[0.0] * 4))
        links.add(())
        assert [tuple(link.values()) for link in links.told(best).values()] == [wanted]
