"""A probe's profile as text for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from picotron_ray.planner.hardware_profile import HardwareProfile, matmul_fit


def profile_lines(found: HardwareProfile, path: str) -> Iterator[str]:
    """Lines on a profile that was written: rates, links, what the probe left out, and what to type next."""
    yield f"matrix products of large shapes: {', '.join(_rates(found))} a worker"
    device = f"{found.memory_bytes_s / 1e9:.3g} GB/s a worker"
    yield f"memory: {device}, {found.host_bytes_s / 1e9:.3g} GB/s one thread of the host"
    if found.host_link_bytes_s:
        yield f"copies between device and host: {found.host_link_bytes_s / 1e9:.3g} GB/s"
    for link, fit in found.links().items():
        yield f"a message over {link}: {fit}"
    yield from found.outliers
    yield from found.cuts
    workers = sum(node.workers for node in found.nodes)
    name = shlex.quote(path)
    renamed = "" if path.endswith(".json") else ", once its name ends in .json"
    yield f"written to {path}; next: picotron-ray plan CONFIG --gpus {workers} --hardware {name}{renamed}"


def _rates(found: HardwareProfile) -> Iterator[str]:
    for dtype in found.dtypes():
        flops, _ = matmul_fit([point for point in found.matmuls if point.dtype == dtype])
        yield f"{dtype} {flops / 1e12:.3g} TFLOP/s"
