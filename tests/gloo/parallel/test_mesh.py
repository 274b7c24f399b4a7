"""The mesh of a layout by hand: ranks of every axis, groups that are made, layouts that are refused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedules import SCHEDULES
from picotron_ray.parallel import mesh as module
from picotron_ray.parallel.mesh import (
    Mesh,
    axis_parts,
    axis_ranks,
    check_schedule,
    check_supported,
    group_name,
    make_mesh,
)

LIMIT = timedelta(seconds=9)
# Two copies of four shards each, two kinds of experts: replica = 2 dp + cp, rank = 2 replica + tp in a stage.
WIDE = Layout(dp=4, cp=2, tp=2, pp=2, ep=2, zero=2, replicate=2)


def test_ranks_of_every_axis_by_hand() -> None:
    rank = 16 + 2 * 5 + 1  # stage 1, replica 5 (dp 2, cp 1), tp 1
    expected = {
        "pp": [11, 27],
        "data": [17, 19, 21, 23, 25, 27, 29, 31],
        "tp": [26, 27],
        "cp": [25, 27],
        "ep": [25, 27],
        "edp": [27, 31],
        "shard": [25, 27, 29, 31],
        "copy": [19, 27],
    }
    assert {axis: axis_ranks(WIDE, rank, axis) for axis in expected} == expected
    plain = replace(WIDE, zero=0, replicate=1)
    assert axis_ranks(plain, rank, "edp") == [19, 23, 27, 31]
    assert axis_ranks(plain, rank, "shard") == expected["data"]


class Groups:
    """Makes groups by name, and remembers what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[list[int]] = []
        self.split: list[tuple[str, list[list[int]]]] = []
        self.registered: list[tuple[str, str]] = []
        self.meshes: list[tuple[Any, ...]] = []
        self.served: list[tuple[str, str]] = []
        noted = SimpleNamespace(serves=lambda group, axis: self.served.append((axis, group)))
        monkeypatch.setattr(module, "OPERATIONS", noted)
        self.warmed: list[str] = []
        self.backend = "gloo"
        monkeypatch.setattr(module.dist, "new_group", self._new)
        monkeypatch.setattr(module.dist, "split_group", self._split)
        monkeypatch.setattr(module.dist, "get_backend", lambda: self.backend)
        monkeypatch.setattr(module.dist, "all_reduce", self._sum)
        monkeypatch.setattr(type(module.dist.group), "WORLD", "world")
        monkeypatch.setattr(
            module.torch_groups, "register", lambda name, group: self.registered.append((name, group))
        )
        monkeypatch.setattr(module.DeviceMesh, "from_group", self._mesh)

    def _new(self, ranks: list[int], *, timeout: timedelta, use_local_synchronization: bool) -> str:
        assert timeout == LIMIT
        assert use_local_synchronization
        self.made.append(ranks)
        return f"of {ranks}"

    def _split(self, parent: None, parts: list[list[int]], timeout: timedelta, *, group_desc: str) -> str:
        assert timeout == LIMIT
        self.split.append((group_desc, parts))
        return f"of {group_desc}"

    def _sum(self, one: torch.Tensor, *, group: str) -> None:
        assert one.tolist() == [0.0]
        self.warmed.append(group)

    def _mesh(self, groups: Any, device: str, *, mesh: Any, mesh_dim_names: tuple[str, ...]) -> Any:
        assert isinstance(mesh, list) is isinstance(groups, str)
        numbers = mesh.tolist() if isinstance(mesh, torch.Tensor) else mesh
        self.meshes.append((groups, device, numbers, mesh_dim_names))
        found = FakeMesh(mesh_dim_names)
        self.meshes[-1] = (*self.meshes[-1], found)
        return found


class FakeAxis(str):
    def get_group(self) -> str:
        return f"group of {self}"


class FakeMesh:
    def __init__(self, names: tuple[str, ...]) -> None:
        self.mesh_dim_names, self._pg_registry = names, {"x": 1}
        self._dim_group_names: Sequence[str] = ()

    def __getitem__(self, name: str) -> Any:
        return FakeAxis(f"axis {name}")


def test_the_groups_of_a_rank_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, rank = Groups(monkeypatch), 27
    mesh = make_mesh(WIDE, rank, "cpu", LIMIT)
    ranks = {
        axis: axis_ranks(WIDE, rank, axis)
        for axis in ("pp", "data", "tp", "cp", "ep", "edp", "shard", "copy")
    }
    assert groups.made == list(ranks.values())
    assert groups.warmed == ["world", *(f"of {found}" for found in ranks.values())], "each, in this order"
    assert mesh.communicators == ("world", *ranks)
    names = [group_name(axis, found) for axis, found in ranks.items()]
    assert names[:2] == ["picotron-pp-11-27", "picotron-data-17-19-21-23-25-27-29-31"]
    assert groups.registered == list(zip(names, (f"of {found}" for found in ranks.values()), strict=True))
    assert groups.served == [(axis, f"of {found}") for axis, found in ranks.items()]
    assert mesh.names == names
    assert mesh.inside == {axis: f"of {ranks[axis]}" for axis in ("cp", "ep", "edp", "shard", "copy")}
    whole, shards, experts = groups.meshes
    outer = [f"of {ranks[axis]}" for axis in ("pp", "data", "tp")]
    assert whole[:4] == (outer, "cpu", torch.arange(32).view(2, 8, 2).tolist(), ("pp", "data", "tp"))
    copies = [f"of {ranks['copy']}", f"of {ranks['shard']}"]
    assert shards[:4] == (copies, "cpu", [[17, 19, 21, 23], [25, 27, 29, 31]], ("copy", "shard"))
    assert experts[:4] == ([copies[0], f"of {ranks['edp']}"], "cpu", [[19, 23], [27, 31]], ("copy", "edp"))
    assert [list(found[4]._dim_group_names) for found in groups.meshes] == [
        names[:3], [names[7], names[6]], [names[7], names[5]]
    ]  # fmt: skip
    assert (mesh.devices, mesh.sharded, mesh.experts) == (whole[4], shards[4], experts[4])
    assert mesh.group("copy") == f"of {ranks['copy']}"
    assert mesh.axis("pp") == "axis pp"
    _closes(mesh, monkeypatch, names)


def _closes(mesh: Mesh, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    gone: list[str] = []
    monkeypatch.setattr(torch._C._distributed_c10d, "_unregister_process_group", gone.append)
    held: list[Any] = [mesh.devices, mesh.sharded, mesh.experts]
    mesh.on_close = [lambda: gone.append("first"), lambda: gone.append("last")]
    mesh.overlap = "some"  # type: ignore[assignment]
    mesh.close()
    assert gone == ["last", "first", *names]
    assert [devices._pg_registry for devices in held] == [{}, {}, {}]
    assert (mesh.devices, mesh.sharded, mesh.experts, mesh.overlap) == (None,) * 4
    assert (mesh.names, mesh.inside, mesh.on_close) == ([], {}, [])
    assert mesh.group("tp") is None
    assert mesh.group("cp") is None


@pytest.mark.parametrize("rank", [0, 27, 31])
def test_nccl_splits_every_axis_by_one_call_of_all_ranks(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    groups = Groups(monkeypatch)
    groups.backend = "nccl"
    mesh = make_mesh(WIDE, rank, "cpu", LIMIT)
    assert not groups.made
    axes = ["pp", "data", "tp", "cp", "ep", "edp", "shard", "copy"]
    assert groups.split == [(axis, axis_parts(WIDE, axis)) for axis in axes], "the same on all ranks"
    for axis, parts in groups.split:
        assert sorted(itertools.chain.from_iterable(parts)) == list(range(32))
        assert axis_ranks(WIDE, rank, axis) in parts
    assert groups.warmed == ["world", *(f"of {axis}" for axis in axes)]
    assert mesh.communicators == ("world", *axes)


def test_an_axis_that_spans_the_world_is_the_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    mesh = make_mesh(Layout(dp=2, cp=2, ep=2, zero=3), 3, "cuda", LIMIT, torch.device("cpu"))
    assert groups.made == [[2, 3], [2, 3], [1, 3]]
    data, experts = groups.meshes
    assert data[:4] == ("world", "cuda", [0, 1, 2, 3], ("data",))
    assert experts[:4] == ("of [1, 3]", "cuda", [1, 3], ("edp",))
    assert mesh.sharded == "axis data"
    assert mesh.experts is experts[4]
    assert mesh.inside == {"cp": "of [2, 3]", "ep": "of [2, 3]", "edp": "of [1, 3]"}
    assert mesh.group("copy") is None
    assert mesh.axis("tp") is None


def test_an_axis_inside_that_spans_data_is_datas_group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    mesh = make_mesh(Layout(cp=2, tp=2, ep=2, zero=1), 1, "cpu", LIMIT)
    assert groups.made == [[1, 3], [0, 1]]
    assert mesh.inside == {"cp": "of [1, 3]", "ep": "of [1, 3]"}
    assert mesh.experts is None, "no other rank has the same experts"
    assert make_mesh(Layout(tp=2, zero=2), 1, "cpu", LIMIT).sharded is None
    assert make_mesh(Layout(dp=2), 1, "cpu", LIMIT).sharded is None
    assert make_mesh(Layout(dp=2, zero=1), 1, "cpu", LIMIT).experts is None
    alone = make_mesh(Layout(), 0, "cpu", LIMIT)
    assert (alone.devices, alone.names, alone.group("data"), alone.at) == (None, [], None, (0, 0, 0, 0))


SPLIT = next(name for name, entry in SCHEDULES.items() if entry.splits_backward and not entry.with_actions)
BORDERS = next(
    (name, entry.stages_per_rank)
    for name, entry in SCHEDULES.items()
    if not entry.with_actions and entry.stages_per_rank[0] > 1
)
CUSTOM = next(name for name, entry in SCHEDULES.items() if entry.with_actions)
ZIGZAG = Layout(pp=2, schedule=CUSTOM, virtual_stages=2, placement=((0, 3), (1, 2)))
SUPPORTED = [
    Layout(),
    Layout(dp=4, cp=2, ep=8),
    Layout(dp=8, zero=1, replicate=4),
    Layout(dp=8, ep=2, zero=3, replicate=2),
    Layout(pp=2, schedule=SPLIT, virtual_stages=SCHEDULES[SPLIT].stages_per_rank[0], zero=2),
    Layout(pp=2, schedule=BORDERS[0], virtual_stages=BORDERS[1][0], zero=3),
    ZIGZAG,
    Layout(schedule=BORDERS[0]),
    Layout(schedule=SPLIT, zero=3, recompute="full"),
    Layout(pp=2, recompute="full,none"),
    WIDE,
]
REFUSED = [
    (Layout(dp=4, ep=3), "layout.ep: saw 3, which does not divide dp x cp = 4"),
    (Layout(dp=4, replicate=2), "layout.replicate: saw 2 with zero=0, ep=1"),
    (Layout(dp=4, zero=1, replicate=3), "layout.replicate: saw 3 with zero=1"),
    (Layout(dp=4, zero=1, replicate=4), "layout.replicate: saw 4 with zero=1"),
    (Layout(dp=8, ep=4, zero=1, replicate=4), "layout.replicate: saw 4 with zero=1, ep=4"),
    (Layout(virtual_stages=2), "layout.virtual_stages: saw 2 with schedule 1f1b, pp=1, expected 1"),
    (Layout(pp=2, virtual_stages=2), "layout.virtual_stages: saw 2 with schedule 1f1b, pp=2, expected 1"),
    (Layout(pp=2, schedule=BORDERS[0], virtual_stages=BORDERS[1][0] - 1), "layout.virtual_stages: saw"),
    (replace(SUPPORTED[4], zero=3), "layout.zero: saw 3 with schedule"),
    (replace(SUPPORTED[4], recompute="full"), "layout.recompute: saw full with schedule"),
    (Layout(pp=2, recompute="full,none,full"), "layout.recompute: saw full,none,full, expected one word"),
    (replace(ZIGZAG, placement=((0, 3), (1, 1))), "layout.placement: saw"),
    (replace(ZIGZAG, placement=((0, 1, 2), (3,))), "layout.placement: saw"),
    (replace(ZIGZAG, placement=((0, 3), (1, 4))), "layout.placement: saw"),
    (Layout(schedule=CUSTOM, placement=((0,),)), "layout.placement: saw"),
]


@pytest.mark.parametrize("layout", SUPPORTED, ids=str)
def test_layouts_that_are_supported_are_not_refused(layout: Layout) -> None:
    """Not raising is the claim."""
    check_supported(layout)


@pytest.mark.parametrize(("layout", "text"), REFUSED, ids=[f"{i}" for i in range(len(REFUSED))])
def test_layouts_that_are_refused(layout: Layout, text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        check_supported(layout)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
    with pytest.raises(LayoutError):
        make_mesh(layout, 0, "cpu")


def test_a_schedule_alone() -> None:
    check_schedule(Layout(pp=2, zero=3, recompute="full"), SCHEDULES["1f1b"])
    for layout in (Layout(pp=2, zero=3), Layout(pp=2, recompute="full")):
        with pytest.raises(LayoutError):
            check_schedule(layout, SCHEDULES[SPLIT])
