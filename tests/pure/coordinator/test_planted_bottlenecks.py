"""A bottleneck of each kind, planted: the loop removes it within three decisions.

Steps take what the cost model makes of a machine whose rates are not those that the planner assumes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.settings import with_settings
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.policies.bottleneck import ANSWERS, bottlenecks, memory_share
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.device_profile import CPU, DeviceProfile
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.rebalance import step_s_by_speed
from picotron_ray.planner.search import layouts
from tests.support.runs.adaptive_world import (
    AdaptiveWorld,
    adaptive_job,
    decisions,
    even_rows,
    plain_figures,
)

LOSSLESS = ("micro-batch", "recompute", "schedule", "layout", "rows", "stages", "bucket")
MODEL: dict[str, Any] = {
    "model__hidden_size": 256,
    "model__intermediate_size": 512,
    "model__layers": 8,
    "data__sequence_length": 128,
    "data__global_batch": 32,
}
REPLICAS = {"layout__dp": 4, "layout__tp": 1, "layout__pp": 1, "layout__zero": 0}
STAGES = {"layout__dp": 1, "layout__tp": 1, "layout__pp": 4, "layout__zero": 0}


@dataclass(frozen=True)
class Machine:
    """Four workers with rates of their own.

    Fields:
        profile: its rates.
        row_speed, stage_speed: of a replica or a stage, as a share of the others'.
    """

    profile: DeviceProfile = CPU
    device_bytes: int = 0
    row_speed: dict[int, float] = field(default_factory=dict)
    stage_speed: dict[int, float] = field(default_factory=dict)

    def figures(self, job: JobConfig, spec: m.GenerationSpec) -> m.RunFigures:
        """What the telemetry would tell."""
        job, layout = with_settings(job, spec.settings), spec.layout
        cost = step_cost(job, layout, self.profile)
        arithmetic = step_cost(job, layout, replace(self.profile, kernel_s=0.0)).compute_s
        computing = cost.compute_s + cost.again_s + cost.tensor_s
        found = plain_figures(
            cost.total_s,
            forward=computing / 3,
            backward=2 * computing / 3,
            bubble=cost.bubble_s,
            reduce=cost.data_s,
            optimizer=cost.optimizer_s,
        )
        found = replace(found, utilization=arithmetic / cost.total_s, device_bytes=self.device_bytes)
        found = replace(found, peak_bytes=int(memory_estimate(job, layout).total_bytes))
        batch = job.data.global_batch
        even = replace(layout, replica_rows=(), stage_blocks=())
        even_s = step_cost(job, even, self.profile).compute_s
        row_s = [even_s / even.micro_batches(batch) / layout.micro_batch] * layout.dp
        each = tuple(s / self.row_speed.get(at, 1.0) for at, s in enumerate(row_s))
        if self.row_speed:
            seconds = step_s_by_speed(layout, each, batch)
            found = replace(found, step_s=seconds, phase_s={"forward": seconds})
        if self.stage_speed and layout.pp > 1:
            found = self._by_stage(found, layout, batch, even_s)
        return replace(found, replica_row_s=each, replica_rows=even_rows(layout, batch))

    def _by_stage(self, found: m.RunFigures, layout: Layout, batch: int, computing: float) -> m.RunFigures:
        each = computing / layout.micro_batches(batch) / 2  # of the two blocks that an even stage has
        blocks = layout.stage_blocks or (2,) * layout.pp
        stage_s = tuple(each * n / self.stage_speed.get(at, 1.0) for at, n in enumerate(blocks))
        passes = layout.micro_batches(batch) + layout.pp - 1
        seconds = passes * max(stage_s)
        computed = layout.micro_batches(batch) * sum(stage_s) / layout.pp
        phases = {"forward": computed, "bubble": seconds - computed}
        return replace(found, step_s=seconds, phase_s=phases, stage_s=stage_s)


@dataclass(frozen=True)
class Plant:
    """A bottleneck: how the run is launched, on which machine, and the best that it can come to.

    Fields:
        best_s: seconds per step, by machine and job; None: of the best layout.
    """

    machine: Machine
    held: dict[str, Any]
    kinds: tuple[str, ...] = LOSSLESS
    best_s: Callable[[Machine, JobConfig], float] | None = None

    def best(self, job: JobConfig) -> float:
        if self.best_s is not None:
            return self.best_s(self.machine, job)
        names = ("dp", "tp", "pp", "zero", "micro_batch", "recompute", "schedule")
        free = with_settings(job, tuple((f"layout.{name}", "auto") for name in names))
        free = with_settings(free, (("comm.bucket_mib", "25.0"),))
        if "compression" in self.kinds:
            free = with_settings(free, (("comm.gradients", "int8"),))
        best = layouts(free, 4, self.machine.profile)[0]
        return step_cost(free, best, self.machine.profile).total_s


def whole_rows(machine: Machine, job: JobConfig) -> float:
    """One worker at a third of the speed, eight rows each of the others."""
    row_s = step_cost(job, Layout(dp=4, micro_batch=8), machine.profile).compute_s / 8
    return 32 * row_s / (3 + 1 / 3)


SMALL = {"model__hidden_size": 32, "model__intermediate_size": 64, "data__sequence_length": 4}
PLANTED: dict[str, Plant] = {
    "memory": Plant(Machine(), {**REPLICAS, "layout__micro_batch": 8, "layout__recompute": "none"}),
    "replica": Plant(
        Machine(row_speed={1: 1 / 3}), {**REPLICAS, "layout__micro_batch": 8}, ("rows",), whole_rows
    ),
    "stage": Plant(Machine(stage_speed={2: 0.5}), {**STAGES, "layout__micro_batch": 2}),
    "communication": Plant(
        Machine(replace(CPU, latency_s=2e-3)),
        {**REPLICAS, "layout__micro_batch": 8, "comm__bucket_mib": 0.01},
    ),
    "communication: links": Plant(
        Machine(replace(CPU, link_bytes_s=4e6)),
        {**REPLICAS, "layout__micro_batch": 8},
        (*LOSSLESS, "compression"),
    ),
    "bubble": Plant(Machine(), {**STAGES, "layout__micro_batch": 8}),
    "compute": Plant(Machine(), {**REPLICAS, "layout__micro_batch": 8, "layout__recompute": "full"}),
    "idle": Plant(
        Machine(replace(CPU, kernel_s=1e-4), device_bytes=10**12),
        {**REPLICAS, **SMALL, "layout__micro_batch": 1},
    ),
}


def test_every_kind_is_planted() -> None:
    assert {kind.partition(":")[0] for kind in PLANTED} == ANSWERS.keys()


@pytest.mark.parametrize("name", list(PLANTED))
def test_a_planted_bottleneck_is_removed_within_three_decisions(name: str) -> None:
    plant, kind = PLANTED[name], name.partition(":")[0]
    job = adaptive_job(*plant.kinds, **{**MODEL, **plant.held})
    machine = plant.machine
    if kind == "memory":
        held = Layout(dp=4, micro_batch=8)
        machine = replace(machine, device_bytes=int(memory_estimate(job, held).total_bytes / 0.95))
    there = AdaptiveWorld(job, lambda spec, step: machine.figures(job, spec))
    first = there.start()
    before = machine.figures(job, first)
    slow = machine.row_speed
    assert kind in [found.bottleneck for found in bottlenecks(before, slow)], before
    out = [command for _ in range(12) for command in there.report()]
    after = machine.figures(job, there.spec)
    assert 1 <= sum(action == "apply" for action, _ in decisions(out)) <= 3
    if kind == "memory":
        assert memory_share(after) <= 0.9 < memory_share(before)
    else:
        assert after.step_s <= 1.15 * plant.best(job) < 0.9 * before.step_s
