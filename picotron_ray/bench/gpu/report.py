"""Report of ``bench gpu``, as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from picotron_ray.bench.common.report import machine_line


def lines(found: Mapping[str, Any]) -> list[str]:
    """One line for the devices, and one or a few for each part."""
    device = found["device"]
    what = "rehearsal over gloo, no figure of a GPU, " if found["rehearsal"] else ""
    head = f"{what}{device['count']} x {device['name']} {machine_line(found)}"
    return [head, *(line for name, part in found["parts"].items() for line in _part(name, part))]


def _part(name: str, part: Mapping[str, Any]) -> Iterator[str]:
    why = f": {part['why']}" if "why" in part else ""
    figures = "".join(f", {words}" for words in WORDS[name](part["found"])) if "found" in part else ""
    yield f"{name:10} {part['status']}{why}{figures}"


def _tests(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{found['passed']} passed, {sum(found['skipped'].values())} skipped"


def _mfu(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"MFU {100 * found['mfu']:.1f} %"
    yield f"{found['tokens_per_s']['median']:,.0f} tokens/s"
    for name, way in found["loop"].items():
        yield f"{name}: steps x {way['over_base']['median']:.3f}"


def _snapshots(found: Mapping[str, Any]) -> Iterator[str]:
    for name, ratio in found["over_none"].items():
        if name != "none":
            yield f"{name}: steps x {ratio:.3f}"


def _kill(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{found['total_s']['median']:.3f} s to the next new step, {len(found['kills'])} kills"


def _service(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{found['steps']} steps, {len(found['failures'])} failure"


WORDS = {"tests": _tests, "mfu": _mfu, "snapshots": _snapshots, "kill": _kill, "service": _service}
