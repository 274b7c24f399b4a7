"""Links of a run by axis of its layout: of the slowest rank, and against the best that the run has seen."""

from __future__ import annotations

from typing import Any

from picotron_ray.config.schema.telemetry import AXES


class RoundLinks:
    """Largest latency and smallest bandwidth over the ranks of a round."""

    def __init__(self) -> None:
        self._latency_s: dict[str, float] = {}
        self._bytes_per_s: dict[str, float] = {}

    def add(self, links: tuple[float, ...]) -> None:
        """Add a rank's, as of `telemetry_page.StepRow`; what it did not measure is left out."""
        latencies, bandwidths = links[: len(AXES)], links[len(AXES) :]
        for axis, latency_s, bytes_per_s in zip(AXES, latencies, bandwidths, strict=False):
            if latency_s > 0:
                self._latency_s[axis] = max(self._latency_s.get(axis, 0.0), latency_s)
            if bytes_per_s > 0:
                self._bytes_per_s[axis] = min(self._bytes_per_s.get(axis, bytes_per_s), bytes_per_s)

    def told(self, best: dict[str, float]) -> dict[str, Any]:
        """Figures by axis; ``best`` bandwidths of the run are brought up to date."""
        found = {}
        for axis, bytes_per_s in self._bytes_per_s.items():
            best[axis] = max(best.get(axis, 0.0), bytes_per_s)
            found[axis] = {
                "latency_s": self._latency_s[axis],
                "bandwidth_bytes_per_s": bytes_per_s,
                "efficiency_ratio": bytes_per_s / best[axis],
            }
        return found
