"""The device mesh of a layout: one axis per degree above 1, ranks in the layout's own order.

Data and context parallelism are one axis, ``data``: gradients are summed over both, and ZeRO shards over
both. Inside it lie further groups:

- ``cp``: the ranks that share rows, among which attention exchanges keys,
- ``ep``: neighbours with different experts,
- ``edp``: ranks with the same experts,
- ``shard``: the ranks among which ZeRO cuts one of several copies of the state,
- ``copy``: the ranks that hold the same part of every copy.

Axes of degree 1 are left out, and an axis that spans the world uses the default group: every group costs
connections and milliseconds at each re-mesh. Code asks for an axis by name, and gets None if there is nothing
to communicate.

DTensor's caches outlive a generation. A cached operation holds the first DeviceMesh that it saw, meshes are
equal if their ranks and axis names are, and collectives find their group *by name*. torch numbers its groups.
So after a re-mesh a cached mesh would name a group of another axis: at best "could not resolve", at worst a
silent sum over the wrong ranks. Here the name of a group is a function of its axis and ranks. Then equal
meshes have equal groups, a cached mesh finds the living group, and the caches stay warm for the first step of
the next generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from picotron_ray.comm import torch_groups
from picotron_ray.comm.collectives.assigned import assign, withdraw
from picotron_ray.comm.collectives.collectives import CollectivePlan, Collectives
from picotron_ray.comm.collectives.world_gather import (
    MANY_RANKS,
    TwoLevelGather,
    assign_world,
    withdraw_world,
)
from picotron_ray.comm.communicators import Communicators
from picotron_ray.comm.operation_record import OPERATIONS
from picotron_ray.comm.wire_bytes import ACTIVATIONS, CONTEXT
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Coordinates, Layout
from picotron_ray.layout.recompute_policy import stage_words
from picotron_ray.layout.schedules import SCHEDULES, PipelineSchedule
from picotron_ray.parallel.tensor.overlap import Overlap

AXES = ("pp", "data", "tp")
INSIDE = ("cp", "ep", "edp", "shard", "copy")  # within the data axis


@dataclass(slots=True)
class Mesh:
    """A layout, this rank's place in it, and the groups of its axes.

    Fields:
        inside: groups within the data axis, by name. A group that spans the axis is the axis's own.
        sharded: the mesh over which ZeRO cuts: one axis, after one of copies if there are several. None
            without ZeRO.
        experts: the same for experts under expert parallelism. None if no other rank has the same experts.
        names: the names under which collectives find the groups.
        overlap: hides tensor parallelism's communication on this rank, in all its stages.
        on_close: called by `close`, before the groups go.
        nodes: of all ranks, by rank; empty where they are not known.
        by_purpose: see `collectives`.
        communicators: what those of this rank serve, one for each.
    """

    layout: Layout
    rank: int
    devices: DeviceMesh | None
    inside: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    sharded: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    names: list[str] = field(default_factory=list)
    overlap: Overlap | None = None
    on_close: list[Callable[[], None]] = field(default_factory=list)
    nodes: tuple[str, ...] = ()
    by_purpose: dict[str, Collectives] = field(default_factory=dict)
    communicators: tuple[str, ...] = ()

    @property
    def at(self) -> Coordinates:
        """Coordinates of this rank in the layout."""
        return self.layout.coordinates(self.rank)

    def axis(self, name: str) -> DeviceMesh | None:
        """Return the one-dimensional mesh of ``pp``, ``data`` or ``tp`` of this rank; None for degree 1."""
        if self.devices is None or name not in (self.devices.mesh_dim_names or ()):
            return None
        return self.devices[name]

    @property
    def sharing(self) -> dist.ProcessGroup | None:
        """The ranks over which ZeRO cuts; None: nothing is cut."""
        return None if self.sharded is None else self.sharded.get_group(self.sharded.ndim - 1)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return the process group of an axis, or of one inside the data axis; None for degree 1."""
        if name in INSIDE:
            return self.inside.get(name)
        axis = self.axis(name)
        return None if axis is None else axis.get_group()

    def collectives(self, purpose: str) -> Collectives:
        """Collectives of a purpose (`comm.wire_bytes`), the same for this rank's whole generation.

        They are the backend's until `choose_collectives` is called before.
        """
        return self.by_purpose.setdefault(purpose, Collectives(purpose))

    def choose_collectives(self, plans: Mapping[str, CollectivePlan]) -> None:
        """Choose algorithms by purpose; before modules are parallelized, the same on all ranks."""

        def inner(group: dist.ProcessGroup) -> int:
            ranks = dist.get_process_group_ranks(group)
            return neighbours([self.nodes[rank] for rank in ranks] if self.nodes else [])

        for purpose, plan in plans.items():
            self.by_purpose[purpose] = Collectives(purpose, plan, inner)
        for axis, purpose in (("tp", ACTIVATIONS), ("cp", CONTEXT)):
            if (group := self.group(axis)) is not None:
                assign(group, self.collectives(purpose))

    def begin_step(self) -> None:
        """Let collectives count what a step costs from here on."""
        for collectives in self.by_purpose.values():
            collectives.begin()

    def close(self) -> None:
        """Drop the groups. DTensor's caches may hold the mesh itself for as long as the process lives."""
        for axis in ("tp", "cp"):
            withdraw(self.group(axis))
        for collectives in self.by_purpose.values():
            collectives.close()
        self.by_purpose.clear()
        withdraw_world()
        self.overlap = None
        while self.on_close:
            self.on_close.pop()()
        for name in self.names:
            torch_groups.unregister(name)
        for devices in (self.devices, self.sharded, self.experts):
            if devices is not None:
                devices._pg_registry.clear()
        self.devices = self.sharded = self.experts = None
        self.names.clear()
        self.inside.clear()


def check_supported(layout: Layout) -> None:
    """Refuse layouts that cannot be applied, or would train wrong.

    The pipeline checks a schedule of the job's own once it knows its order (`check_schedule`).

    Raises:
        LayoutError: with the key, the value and a remedy.
    """
    schedule = SCHEDULES[layout.schedule]
    least, most = schedule.stages_per_rank if layout.pp > 1 else (1, 1)
    if schedule.with_actions:
        _check_placement(layout)
    elif not least <= layout.virtual_stages <= most:
        raise LayoutError(
            f"layout.virtual_stages: saw {layout.virtual_stages} with schedule {layout.schedule}, pp="
            f"{layout.pp}, expected {least}"
        )
    if layout.pp > 1:
        check_schedule(layout, schedule)
    if len(stage_words(layout.recompute)) not in (1, layout.stages):
        raise LayoutError(
            f"layout.recompute: saw {layout.recompute}, expected one word, or one for each of {layout.stages}"
            " stages"
        )
    if layout.replicas % layout.ep:
        raise LayoutError(f"layout.ep: saw {layout.ep}, which does not divide dp x cp = {layout.replicas}")
    if layout.replicate > 1:
        parts, rest = divmod(layout.replicas, layout.replicate)
        if not layout.zero or rest or parts == 1 or parts % layout.ep:
            raise LayoutError(
                f"layout.replicate: saw {layout.replicate} with zero={layout.zero}, ep={layout.ep}, expected"
                f" 1, or with ZeRO a number that leaves several parts of dp x cp = {layout.replicas}"
            )


def check_schedule(layout: Layout, schedule: PipelineSchedule) -> None:
    """Refuse layouts under which a split backward pass would be wrong. Raises LayoutError."""
    if schedule.splits_backward and layout.zero == 3:
        raise LayoutError(
            f"layout.zero: saw 3 with schedule {layout.schedule}, under which it gives wrong gradients; use 2"
        )
    if schedule.splits_backward and layout.recompute != "none":
        raise LayoutError(
            f"layout.recompute: saw {layout.recompute} with schedule {layout.schedule}, expected none"
        )


def _check_placement(layout: Layout) -> None:
    held = sorted(stage for stages in layout.placement for stage in stages)
    sizes = [len(stages) for stages in layout.placement]
    if sizes != [layout.virtual_stages] * layout.pp or held != list(range(layout.stages)) or layout.pp == 1:
        raise LayoutError(
            f"layout.placement: saw {layout.placement} with schedule {layout.schedule}, expected"
            f" {layout.virtual_stages} stages of {layout.stages} for each of {layout.pp} pipeline ranks,"
            " two or more"
        )


def axis_ranks(layout: Layout, rank: int, axis: str) -> list[int]:
    """List the ranks of the layout's axis that goes through ``rank``, in order."""
    at = layout.coordinates(rank)
    data = [layout.rank(at._replace(dp=dp, cp=cp)) for dp in range(layout.dp) for cp in range(layout.cp)]
    if axis == "data":
        return data
    if axis == "ep":
        return [other for other in data if layout.expert_replica(other) == layout.expert_replica(rank)]
    if axis == "copy":
        return [other for other in data if layout.shard(other) == layout.shard(rank)]
    shared = [other for other in data if _copy(layout, other) == _copy(layout, rank)]
    if axis == "shard":
        return shared
    if axis == "edp":
        return [other for other in shared if layout.expert_index(other) == layout.expert_index(rank)]
    return [layout.rank(at._replace(**{axis: index})) for index in range(getattr(layout, axis))]


def _copy(layout: Layout, rank: int) -> int | None:
    """Return the number of the copy of the state that ``rank`` holds part of; None without ZeRO."""
    return layout.replica(rank) // layout.shards if layout.zero else None


def neighbours(nodes: Sequence[str]) -> int:
    """Size of equal neighbourhoods of consecutive ranks, each on one node; 1: there are none.

    >>> neighbours(["a", "a", "b", "b"]), neighbours(["a", "a", "b"]), neighbours([])
    (2, 1, 1)
    """

    def fits(size: int) -> bool:
        return all(len(set(nodes[at : at + size])) == 1 for at in range(0, len(nodes), size))

    sizes = (size for size in range(len(nodes), 1, -1) if len(nodes) % size == 0)
    return next((size for size in sizes if fits(size)), 1)


def group_name(axis: str, ranks: list[int]) -> str:
    """Return the name of a group: the same for equal axes and ranks, in every generation."""
    return f"picotron-{axis}-" + "-".join(map(str, ranks))


def axis_parts(layout: Layout, axis: str) -> list[list[int]]:
    """List the ranks of every group of an axis: each rank of the layout is in one."""
    seen: set[int] = set()
    parts = []
    for rank in range(layout.world_size):
        if rank not in seen:
            parts.append(axis_ranks(layout, rank, axis))
            seen.update(parts[-1])
    return parts


def make_mesh(
    layout: Layout,
    rank: int,
    device_type: str,
    timeout: timedelta | None = None,
    device: torch.device | None = None,
    nodes: Sequence[str] = (),
) -> Mesh:
    """Make the mesh and its process groups; all ranks together, inside ``ProcessGroups.forming()``.

    Args:
        device_type: of the meshes that torch is given.
        timeout: time limit of a collective on the new groups.
        device: of what is sent; None: the one of that type.
        nodes: of all ranks, by rank; empty where they are not known.

    Raises:
        LayoutError: the layout is not supported.
    """
    withdraw_world()  # of a build that failed
    check_supported(layout)
    degrees = {"pp": layout.pp, "data": layout.replicas, "tp": layout.tp}
    axes = [axis for axis in AXES if degrees[axis] > 1]
    if not axes:
        return Mesh(layout, rank, None, nodes=tuple(nodes))
    communicators = Communicators(layout.world_size, timeout, device or torch.device(device_type))
    groups: dict[str, dist.ProcessGroup] = {}
    names: dict[str, str] = {}
    inside = (INSIDE if layout.replicate > 1 else INSIDE[:3]) if "data" in axes else ()
    for axis in (*axes, *inside):
        ranks = axis_ranks(layout, rank, axis)
        if len(ranks) == 1:
            continue
        whole = axis in inside and len(ranks) == layout.replicas
        group = groups["data"] if whole else communicators.of(axis, rank, axis_parts(layout, axis))
        groups[axis], names[axis] = group, group_name(axis, ranks)
        OPERATIONS.serves(group, axis)
        torch_groups.register(names[axis], group)
    two_levels = _two_levels(communicators, rank, nodes)
    communicators.warm()
    if two_levels is not None:
        assign_world(two_levels)
    numbers = torch.arange(layout.world_size, dtype=torch.int).view([degrees[axis] for axis in axes])
    outer = [groups[axis] for axis in axes]
    devices = _device_mesh(outer, device_type, numbers, axes, [names[axis] for axis in axes])
    of_inside = {axis: groups[axis] for axis in inside if axis in groups}
    made = tuple(communicators.made)
    mesh = Mesh(layout, rank, devices, of_inside, names=list(names.values()), communicators=made)
    mesh.nodes = tuple(nodes)
    if layout.zero and "data" in axes:
        mesh.sharded = _shard_mesh(mesh, "shard", device_type) if layout.replicate > 1 else mesh.axis("data")
        if layout.ep > 1 and "edp" in of_inside:
            mesh.experts = _shard_mesh(mesh, "edp", device_type)
    return mesh


def _two_levels(communicators: Communicators, rank: int, nodes: Sequence[str]) -> TwoLevelGather | None:
    """Make groups for what is gathered from all ranks; None: there are few, or their nodes are not equal."""
    ranks, inner = len(nodes), neighbours(nodes)
    if ranks < MANY_RANKS or not 1 < inner < ranks:
        return None
    every = range(ranks)
    inside = communicators.of("node", rank, [every[at : at + inner] for at in range(0, ranks, inner)])
    across = communicators.of("nodes", rank, [every[place::inner] for place in range(inner)])
    return TwoLevelGather(inside, across)


def _shard_mesh(mesh: Mesh, axis: str, device_type: str) -> DeviceMesh:
    """Make the mesh of an axis inside the data axis, with a dimension of copies first if there are any."""
    layout, rank = mesh.layout, mesh.rank
    axes = ["copy", axis] if layout.replicate > 1 else [axis]
    numbers = [axis_ranks(layout, other, axis) for other in axis_ranks(layout, rank, "copy")]
    return _device_mesh(
        [mesh.inside[name] for name in axes],
        device_type,
        torch.tensor(numbers if len(axes) > 1 else numbers[0], dtype=torch.int),
        axes,
        [group_name(name, axis_ranks(layout, rank, name)) for name in axes],
    )


def _device_mesh(
    groups: list[dist.ProcessGroup], device_type: str, ranks: Tensor, axes: list[str], names: list[str]
) -> DeviceMesh:
    """Make a mesh of existing groups. Collectives find them by the names of their registration."""
    alone = len(groups) == 1
    devices = DeviceMesh.from_group(
        groups[0] if alone else groups,
        device_type,
        mesh=ranks.tolist() if alone else ranks,
        mesh_dim_names=tuple(axes),
    )
    devices._dim_group_names = names  # type: ignore[assignment]
    return devices
