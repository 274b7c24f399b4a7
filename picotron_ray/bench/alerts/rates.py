"""False alarms: what each detector finds in windows of runs in which nothing was wrong.

A window counts as flagged while any finding of the detector fires, however long ago it began. So one alarm
that lasts weighs as much as it would bother.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from picotron_ray.config.schema.alerts import AlertsConfig, Detector
from picotron_ray.observability.alerts.book import AlertBook
from picotron_ray.observability.alerts.detectors import open_detectors
from picotron_ray.observability.windows import TelemetryWindow

DETECTORS: tuple[Detector, ...] = ("thresholds", "robust", "learned")
CHECKPOINT_STEPS = 500


def rates(recordings: Mapping[str, Sequence[TelemetryWindow]]) -> dict[str, Any]:
    """Return windows, flagged ones and findings, by detector and recording."""
    return {
        "windows": sum(map(len, recordings.values())),
        "recordings": {name: len(windows) for name, windows in recordings.items()},
        "detectors": {each: _rate(each, recordings) for each in DETECTORS},
    }


def _rate(detector: Detector, recordings: Mapping[str, Sequence[TelemetryWindow]]) -> dict[str, Any]:
    rules: Counter[str] = Counter()
    by_run: dict[str, int] = {}
    for name, windows in recordings.items():
        config = AlertsConfig(detectors=(detector,))
        detectors, known = open_detectors(config, gpu=False)
        book = AlertBook(detectors, known, acts={}, checkpoint_steps=CHECKPOINT_STEPS)
        flagged = 0
        for window in windows:
            book.observe(window)
            firing = book.firing
            flagged += bool(firing)
            rules.update({finding.rule for finding in firing})
        by_run[name] = flagged
    flagged, total = sum(by_run.values()), sum(map(len, recordings.values()))
    return {
        "flagged": flagged,
        "ratio": flagged / total if total else 0.0,
        "flagged_by_rule": dict(rules.most_common()),
        "flagged_by_recording": by_run,
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the result for people."""
    yield f"{found['windows']} windows of clean runs: " + ", ".join(
        f"{name} {count}" for name, count in found["recordings"].items()
    )
    for name, rate in found["detectors"].items():
        rules = ", ".join(f"{rule} {count}" for rule, count in rate["flagged_by_rule"].items())
        yield f"{name}: {rate['flagged']} flagged, {100 * rate['ratio']:.2f} %" + (
            f" ({rules})" if rules else ""
        )
