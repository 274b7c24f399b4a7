"""The probe's measurements between processes, however little time there is."""

from __future__ import annotations

from typing import get_args

from picotron_ray.planner.hardware_profile import CollectiveKind, link_fit
from picotron_ray.runtime.hardware_probe.worker import LEAST_SIZES, SIZES
from tests.support.gloo.parallel_jobs.probe_jobs import timed
from tests.support.gloo.pool import Pool

LINKS = ("loopback", "cross_node")


def test_every_link_has_two_sizes_even_without_time(pool: Pool) -> None:
    """One size tells no latency from bandwidth: 3 GB/s between nodes were taken for 8 MB/s."""
    least = list(SIZES[:LEAST_SIZES])
    for sums, sent in pool.run(2, timed, [(link, (0, 1)) for link in LINKS], 0.0):
        for link in LINKS:
            for kind in get_args(CollectiveKind):
                points = [point for point in sums if (point.link, point.kind) == (link, kind)]
                assert [point.size for point in points] == least
                fit = link_fit(points)
                assert fit is not None
                assert fit[0] > 5e7
        assert [point.size for point in sent] in ([], least), "of the pair's first rank"
