"""Routes of a layout's axes: what link joins the ranks of each, and its bytes per second."""

from __future__ import annotations

from typing import Literal, NamedTuple

from picotron_ray.layout.layout import Layout
from picotron_ray.planner.comm_cost import group_link
from picotron_ray.planner.device_profile import DeviceProfile

Link = Literal["nvlink", "pcie", "loopback", "inside", "cross_node"]
"""Of a node's devices, by what joins them (``inside``: not known); and between nodes."""
NAMES: dict[Link, str] = {
    "nvlink": "over NVLink",
    "pcie": "over PCIe",
    "loopback": "inside a machine",
    "inside": "inside a node",
    "cross_node": "between nodes",
}


class AxisRoute(NamedTuple):
    """An axis of a layout, whether it stays inside a node, its bytes per second and rank, and its link."""

    axis: str
    degree: int
    inside: bool
    bytes_s: float
    link: Link = "inside"

    def __str__(self) -> str:
        return f"{self.axis}={self.degree} {NAMES[self.link]}, {self.bytes_s / 1e9:.3g} GB/s"


def routes_of(
    layout: Layout, profile: DeviceProfile, node_sizes: tuple[int, ...], link: Link = "inside"
) -> list[AxisRoute]:
    """The link of each axis above degree 1; tensor parallelism is innermost, the pipeline goes last.

    Ranks are numbered so (`layout.layout`), and nodes are full, so an axis lies inside a node wherever its
    span does.

    Args:
        node_sizes: workers per node; empty or one: all on one node.
        link: what joins the devices of a node.
    """
    spans = (("tp", layout.tp, 1), ("cp", layout.cp, layout.tp), ("dp", layout.dp, layout.tp * layout.cp))
    found = []
    for axis, degree, stride in (*spans, ("pp", layout.pp, layout.world_size // layout.pp)):
        if degree == 1:
            continue
        inside = len(node_sizes) < 2 or all(size % (degree * stride) == 0 for size in node_sizes)
        speed = group_link(profile, node_sizes, degree, stride)
        found.append(AxisRoute(axis, degree, inside, speed, link if inside else "cross_node"))
    return found
