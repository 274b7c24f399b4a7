"""Hardware as a probe measured it: rates by shape, links as latency and bandwidth, and the nodes' own facts.

A profile is a JSON file that ``picotron-ray probe`` writes and ``plan --hardware FILE`` reads. What the cost
model takes of it is a `DeviceProfile`, by least squares over the points:

    matrix products   1 / rate = 1 / flops · (1 + half / smallest dimension)
    reduce-scatter    seconds = bytes · (ranks - 1) / ranks / bandwidth + log2(ranks) · latency
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from picotron_ray.errors import ConfigError
from picotron_ray.planner.device_profile import HALF_A_SUM, DeviceProfile, PassCost
from picotron_ray.planner.software_profile import OURS, SoftwareProfile

LinkClass = Literal["loopback", "nvlink", "pcie", "cross_node"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]
LEAST_LATENCY_S = 1e-7
"""Below it a fitted latency is none."""
CPU_SOFTWARE = SoftwareProfile(
    pointwise=OURS.pointwise, compiled_pointwise=OURS.compiled_pointwise, stops_early=True, update_bytes=28.0
)
"""This engine on CPUs: gloo shares the cores that compute, so nothing is hidden."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class MatmulPoint(_Frozen):
    """Rate of an ``m`` x ``k`` by ``k`` x ``n`` product, operations per second."""

    dtype: str
    m: int = Field(gt=0)
    n: int = Field(gt=0)
    k: int = Field(gt=0)
    flops_s: float = Field(gt=0)


class AttentionPoint(_Frozen):
    """Rates of causal attention over the half of the square that it computes, operations per second."""

    dtype: str
    rows: int = Field(gt=0)
    heads: int = Field(gt=0)
    sequence: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    forward_flops_s: float = Field(gt=0)
    backward_flops_s: float = Field(gt=0)


class CollectivePoint(_Frozen):
    """Seconds of one collective over so many ranks; ``size`` is of the whole tensor, not of a rank's part."""

    kind: CollectiveKind = "all_reduce"
    link: LinkClass
    ranks: int = Field(ge=2)
    size: int = Field(gt=0)
    seconds: float = Field(gt=0)


class MessagePoint(_Frozen):
    """Seconds of one message of so many bytes from a worker to another one."""

    link: LinkClass
    size: int = Field(gt=0)
    seconds: float = Field(gt=0)


class LinkFit(NamedTuple):
    """A message's seconds: ``alpha_s`` + bytes / ``bytes_s``."""

    alpha_s: float
    bytes_s: float

    def __str__(self) -> str:
        return f"{1e6 * self.alpha_s:.0f} us and {self.bytes_s / 1e9:.3g} GB/s"


class NodeFigures(_Frozen):
    """One node: cores, memory in bytes, and rates in bytes per second (0: not measured).

    ``nvlink`` and ``pcie`` are the UUIDs of GPUs that share such links, as NVML groups them. ``domain`` is
    the failure domain that a label of its Ray node names, ``nic_bytes_s`` the speed that the kernel tells of
    its network card.
    """

    host: str
    workers: int = Field(ge=1)
    cores: int = Field(ge=1)
    numa_nodes: int = Field(ge=1)
    ram_bytes: int = Field(ge=0)
    shm_bytes: int = Field(ge=0)
    disk_bytes_s: float = Field(ge=0)
    nic_bytes_s: float = Field(default=0.0, ge=0)
    domain: str = ""
    nvlink: tuple[tuple[str, ...], ...] = ()
    pcie: tuple[tuple[str, ...], ...] = ()


class HardwareProfile(_Frozen):
    """Everything that a probe found.

    Fields:
        memory_bytes: of one worker: its device's, or its share of the host's.
        memory_bytes_s, host_bytes_s: read and written per second by one worker's device, and by one thread.
        host_link_bytes_s: between device and host; 0 on CPUs.
        block_s: launches and framework of one decoder block, forward and backward.
        outliers, cuts: workers well below the others, and what the budget left out, a line each.
    """

    version: Literal[1] = 1
    name: str
    device: Literal["cuda", "cpu"]
    device_name: str
    peak_flops: float = Field(ge=0)
    memory_bytes: float = Field(gt=0)
    memory_bytes_s: float = Field(gt=0)
    host_bytes_s: float = Field(gt=0)
    host_link_bytes_s: float = Field(ge=0)
    block_s: float = Field(ge=0)
    matmuls: tuple[MatmulPoint, ...] = Field(min_length=2)
    attention: tuple[AttentionPoint, ...]
    collectives: tuple[CollectivePoint, ...]
    messages: tuple[MessagePoint, ...] = ()
    nodes: tuple[NodeFigures, ...] = Field(min_length=1)
    outliers: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()

    def dtypes(self) -> list[str]:
        """Dtypes of matrix products that were measured."""
        return sorted({point.dtype for point in self.matmuls})

    def links(self) -> dict[LinkClass, LinkFit]:
        """Latency and bandwidth of messages, by kind of link."""
        found: dict[LinkClass, LinkFit] = {}
        for link in dict.fromkeys(point.link for point in self.messages):
            found[link] = message_fit([point for point in self.messages if point.link == link])
        return found

    def inside_link(self) -> LinkClass:
        """Kind of link between the workers of a node."""
        inside = [point.link for point in self.collectives if point.link != "cross_node"]
        return inside[0] if inside else "loopback"

    def device_profile(self, dtype: str) -> DeviceProfile:
        """One worker as the cost model takes it. Raises ConfigError for a dtype that was not measured."""
        flops, half = matmul_fit([point for point in self.matmuls if point.dtype == dtype])
        if not flops:
            raise ConfigError(
                f"--hardware: saw no matrix products in {dtype} in the profile, expected {self.dtypes()};"
                " choose that precision, or probe again"
            )
        inside = link_fit(self._timed("all_reduce", inside=True))
        between = link_fit(self._timed("all_reduce", inside=False))
        attention = [point for point in self.attention if point.dtype == dtype]
        bandwidth, latency = inside or between or (self.memory_bytes_s, 1e-6)
        return DeviceProfile(
            flops=flops,
            memory_bytes=self.memory_bytes,
            link_bytes_s=bandwidth,
            latency_s=latency,
            node_link_bytes_s=between[0] if between else 0.0,
            kernel_s=self.block_s,
            host_link_bytes_s=self.host_link_bytes_s or self.memory_bytes_s,
            host_bytes_s=self.host_bytes_s,
            memory_bytes_s=self.memory_bytes_s,
            matmul_half=max(half, 1e-9),
            attention_flops=median(point.forward_flops_s for point in attention) if attention else 0.0,
            attention_backward_flops=median(p.backward_flops_s for p in attention) if attention else 0.0,
            gather=self._against_sums("all_gather", inside is not None),
            scatter=self._against_sums("reduce_scatter", inside is not None),
            software=OURS if self.device == "cuda" else CPU_SOFTWARE,
        )

    def _timed(self, kind: CollectiveKind, inside: bool) -> list[CollectivePoint]:
        """Collectives of a kind inside a node, or between nodes."""
        return [
            point
            for point in self.collectives
            if point.kind == kind and (point.link != "cross_node") is inside
        ]

    def _against_sums(self, kind: CollectiveKind, inside: bool) -> PassCost:
        """Cost of a kind against half an all-reduce's; as much where it was not timed."""
        sums, found = (link_fit(self._timed(each, inside)) for each in ("all_reduce", kind))
        if sums is None or found is None:
            return HALF_A_SUM
        latency = found[1] / sums[1] if sums[1] > LEAST_LATENCY_S else 1.0
        return PassCost(sums[0] / found[0], latency)


def matmul_fit(points: Sequence[MatmulPoint]) -> tuple[float, float]:
    """Rate of large products, and the smallest dimension at which it is halved; zeros for no points."""
    if not points:
        return 0.0, 0.0
    line = _line([(1 / min(p.m, p.n, p.k), 1 / p.flops_s) for p in points])
    if line is None or line[0] <= 0 or line[1] < 0:
        return median(point.flops_s for point in points), 0.0
    intercept, slope = line
    return 1 / intercept, slope / intercept


def link_fit(points: Sequence[CollectivePoint]) -> tuple[float, float] | None:
    """Bytes per second and latency of a link by one kind of collective; None for no points.

    An all-reduce counts as two passes, a reduce-scatter and an all-gather as one. Weighted by
    1 / seconds², so that small messages count as much as large ones. Neither is below what the fastest
    message shows.
    """
    if not points:
        return None
    rows = [
        (
            point.size * (point.ranks - 1) / point.ranks,
            math.log2(point.ranks),
            point.seconds / (2 if point.kind == "all_reduce" else 1),
        )
        for point in points
    ]
    a = sum((x / t) ** 2 for x, _, t in rows)
    b = sum(x * y / t**2 for x, y, t in rows)
    c = sum((y / t) ** 2 for _, y, t in rows)
    d, e = sum(x / t for x, _, t in rows), sum(y / t for _, y, t in rows)
    determinant = a * c - b * b
    per_byte, latency = (
        ((d * c - e * b) / determinant, (a * e - b * d) / determinant) if determinant > 0 else (d / a, 0.0)
    )
    if per_byte <= 0:
        per_byte, latency = min(t / x for x, _, t in rows), 0.0
    return 1 / per_byte, max(latency, 0.0)


def message_fit(points: Sequence[MessagePoint]) -> LinkFit:
    """Latency and bandwidth by least squares of relative errors; neither is below 0.

    >>> message_fit([MessagePoint(link="loopback", size=n, seconds=1e-5 + n / 2e9) for n in (10**3, 10**6)])
    LinkFit(alpha_s=1e-05, bytes_s=2000000000.0)
    """
    line = _line([(float(point.size), point.seconds) for point in points])
    slowest = max(points, key=lambda point: point.size)
    if line is None or line[1] <= 0:
        return LinkFit(0.0, slowest.size / slowest.seconds)
    return LinkFit(max(0.0, round(line[0], 12)), round(1 / line[1], 3))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Intercept and slope by least squares of relative errors; None where all lie at one place."""
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    x_mean = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    y_mean = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - x_mean) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    if spread <= 1e-12 * x_mean**2 * total:
        return None
    slope = sum(
        w * (x - x_mean) * (y - y_mean) for w, (x, y) in zip(weights, points, strict=True)
    ) / spread  # fmt: skip
    return y_mean - slope * x_mean, slope


def load_profile(path: Path) -> HardwareProfile:
    """The profile of a file. Raises ConfigError, one line that names the file and what is wrong in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"--hardware: cannot read {path}: {why}; give a file of `picotron-ray probe`"
        ) from None
    try:
        return HardwareProfile.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(
            f"--hardware: {path}: {_complaint(error)}; give a file of `picotron-ray probe` as it wrote it"
        ) from None


def _complaint(error: ValidationError) -> str:
    """The first mistake: its key, what was seen, what was expected."""
    first = error.errors(include_url=False)[0]
    place, seen = ".".join(map(str, first["loc"])), first["input"]
    if first["type"] == "json_invalid":
        return f"saw no JSON ({first['ctx']['error']}), expected a profile"
    if first["type"] == "missing":
        return f"{place}: saw nothing, expected that key"
    if first["type"] == "extra_forbidden":
        return f"{place}: saw an unknown key, expected none of that name"
    if isinstance(seen, list | tuple | dict):
        seen = f"{len(seen)} values"
    expected = re.sub(r"^\w+ should (be |have )?(a valid )?| after validation.*", "", first["msg"])
    return f"{place + ': ' if place else ''}saw {str(seen)[:40]}, expected {expected}"


def outliers(rates: dict[str, float], share: float = 0.8) -> tuple[str, ...]:
    """A line for each worker whose rate is below ``share`` of the median of all.

    >>> outliers({"a": 10.0, "b": 10.0, "c": 7.0})
    ('c: 70 % of the median rate of matrix products',)
    """
    middle = median(rates.values())
    return tuple(
        f"{name}: {100 * rate / middle:.0f} % of the median rate of matrix products"
        for name, rate in rates.items()
        if rate < share * middle
    )
