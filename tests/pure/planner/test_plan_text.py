"""A plan's lines: units, plurals, layouts that fit a line, and nothing that buys nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.planner.cluster_size import cluster_size
from picotron_ray.planner.hardware import hardware
from picotron_ray.planner.plan import PlanReport, Purchase, plan, without_zero_twins
from picotron_ray.planner.plan_text import cluster_lines, plan_lines

H100 = hardware("h100-80g")


def planned(name: str, gpus: int, *overrides: str) -> PlanReport:
    return plan(load_job(name, ["chaos=[]", f"cluster.max_workers={gpus}", *overrides]), gpus, H100)


@pytest.fixture(scope="module")
def deep() -> Any:
    return planned("llama-3-70b", 1024, "data.path=unread", "layout.pp=16", "layout.memory_budget_gib=34")


def test_a_small_models_bytes_are_in_megabytes() -> None:
    found = planned("quickstart", 8)
    lines = list(plan_lines(found))
    assert f"{found.best.memory_bytes / 1e6:6.1f} MB  {found.best.layout}" in "\n".join(lines)
    assert any(line.startswith(f"  pp rank 0: {found.by_rank[0]['total'] / 1e6:.3g} MB = ") for line in lines)
    assert any("  0.806 M parameters; " in line for line in lines)
    assert not any("0.0 GB" in line for line in lines)


def test_one_of_a_kind_is_no_plural() -> None:
    lines = "\n".join(cluster_lines(cluster_size(planned("quickstart", 1)), "cuda"))
    assert "cluster    1 node of 1 GPU, each with" in lines


def test_what_buys_nothing_is_said_once() -> None:
    found = planned("quickstart", 8)
    total, layout = found.best.cost.total_s, found.best.layout
    for share, expected in (
        ((0.99995, 1.0), ["more GPUs or memory would not help"]),
        ((0.9, 1.0), [f"a would make a step of {0.9 * total:.3g} s (+10.0 %): {layout}"]),
    ):
        bought = tuple(Purchase(what, one * total, layout) for what, one in zip("ab", share, strict=True))
        lines = list(plan_lines(replace(found, purchases=bought)))
        assert [line for line in lines if "would" in line] == expected
    assert not any("would" in line for line in plan_lines(replace(found, purchases=())))


def test_layouts_that_differ_in_their_zero_stage_alone_are_one_row(deep: PlanReport) -> None:
    first = deep.best
    assert first.layout.zero == 1
    twin = replace(first, layout=replace(first.layout, zero=2))
    smaller = replace(twin, memory_bytes=0.99 * twin.memory_bytes)
    slower = replace(twin, cost=replace(twin.cost, data_s=1.0))
    assert without_zero_twins([first, twin, smaller, slower]) == (first, smaller, slower)
    assert without_zero_twins(deep.table) == deep.table
    assert not any("as much, but later" in reason for _, reason in deep.rejected)


def test_a_deep_pipeline_has_its_first_last_and_fullest_rank(deep: PlanReport) -> None:
    lines = [line for line in plan_lines(deep) if "pp rank" in line]
    totals = [causes["total"] for causes in deep.by_rank]
    fullest = totals.index(max(totals))
    assert 0 < fullest < 15, "else it is the first or last"
    assert len(lines) == 4
    ranks = (0, fullest, 15)
    assert [line.split(":")[0] for line in lines[:3]] == [f"  pp rank {rank}" for rank in ranks]
    assert [line.endswith(" (the fullest)") for line in lines[:3]] == [False, True, False]
    others = [total for rank, total in enumerate(totals) if rank not in ranks]
    said = f"{min(others) / 1e9:.3g} to {max(others) / 1e9:.3g} GB"
    assert lines[3] == f"  {len(others)} other pp ranks between them: {said}"


def test_layouts_of_a_table_are_told_apart_in_a_line(deep: PlanReport) -> None:
    lines = list(plan_lines(deep))
    assert f"layout     {deep.best.layout}" in lines, "whole, to be copied"
    assert len(str(deep.best.layout)) > 80
    at = lines.index("the best layouts:")
    rows = [line.split("GB  ")[1].split()[0] for line in lines[at + 1 : at + 1 + len(deep.table)]]
    assert len(set(rows)) == len(rows) > 1
    assert all(row.endswith("-blocks...") for row in rows)
