"""Settings of ``bench mfu``: the base, and each optimisation switched in turn. Torch-free.

The base is what the config comes to on the workers at hand: its layout is chosen as the coordinator would,
and then written back, so that a switch changes what it names and nothing else. A switch that the config or
the planner refuses is kept as a `Refusal` with their reason; one that changes nothing is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from picotron_ray.checkpoint.snapshot.slot_pool import choose_folder
from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import InitFromConfig
from picotron_ray.config.support.fast_path import settled
from picotron_ray.config.support.kernels import attention_backends, norm_kernel
from picotron_ray.errors import ConfigError, SlotError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.planner.search import choose_layout
from picotron_ray.planner.snapshot_room import slot_estimate
from picotron_ray.runtime.driver.resolve_job import OWN_MODEL, resolve_words

Kind = Literal["engine", "loop", "plain", "picotron", "torchtitan"]

SWITCHES = (
    "precision=fp32",
    "precision=tf32",
    "precision=bf16",
    "precision=fp16",
    "precision=fp8",
    "kernels.attention=math",
    "kernels.attention=flash",
    "kernels.attention=efficient",
    "kernels.attention=cudnn",
    "kernels.compile=true",
    "kernels.compile=false",
    "kernels.cuda_graphs=true",
    "kernels.experts=grouped",
    "kernels.projections=fused",
    "kernels.projections=separate",
    "kernels.tp_overlap=ring",
    "kernels.tp_overlap=symmetric-memory",
    "kernels.loss=linear",
    "kernels.loss=logits",
    "kernels.norm=eager",
    "kernels.norm=closed-form",
    "kernels.norm=compiled",
    "kernels.activation=compiled",
    "kernels.optimizer=foreach",
    "layout.recompute=none",
    "layout.recompute=selective",
    "layout.recompute=full",
    "layout.recompute=int8",
    "layout.micro_batch=4",
    "layout.micro_batch=8",
    "layout.micro_batch=16",
    "layout.offload_activations=true",
    "layout.recompute=full layout.offload_activations=true",
    "optimizer.offload=true",
    "optimizer.moments=8bit",
    "layout.zero=0",
    "layout.zero=1",
    "layout.zero=2",
    "layout.zero=3",
    "comm.gradients=flat",
    "comm.gradients=bucketed",
    "comm.gradients=reduce-scatter",
    "comm.gradients=hierarchical comm.inner_ranks=2",
    "comm.topology=ring",
    "comm.parameters=mesh",
    "comm.activations=mesh",
    "comm.experts=pairwise",
    "comm.gradients=bf16",
    "comm.gradients=int8",
    "comm.gradients=int8 comm.bits=4",
    "comm.gradients=topk",
    "comm.gradients=powersgd",
    "layout.tp=2 layout.dp=auto kernels.tp_overlap=ring",
    "layout.tp=2 layout.dp=auto",
)
"""Dotted overrides, several with spaces between; each is tried alone on top of the base."""

NEVER = 1_000_000  # steps: the end of a learning-rate schedule is not reached
EXCHANGE, SNAPSHOTS = "loop, no snapshots", "loop, snapshots"
"""Base by the training loop of workers: with a step's exchange alone, and with snapshots besides."""
PINNED = ("dp", "tp", "pp", "cp", "ep", "zero", "replicate", "virtual_stages", "micro_batch", "recompute")


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting that is measured."""

    name: str
    kind: Kind
    job: JobConfig
    layout: Layout

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "job": self.job.model_dump(mode="json"),
            "layout": self.layout.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Setting:
        job, layout = JobConfig.model_validate(data["job"]), Layout.from_dict(data["layout"])
        return cls(data["name"], data["kind"], job, layout)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Setting that cannot be measured here, and the reason."""

    name: str
    reason: str


def alone(workers: int) -> list[str]:
    """Make overrides that leave nothing of a run but its steps on exactly ``workers`` workers."""
    fixed = ["chaos=[]", f"steps={NEVER}"]
    return [*fixed, f"cluster.max_workers={workers}", f"cluster.min_workers={workers}"]


def base_setting(config: str, overrides: Sequence[str], workers: int, device: str) -> Setting:
    """Make the base: the config on ``workers`` workers of ``device`` (``cpu`` or ``cuda``), autos settled.

    Raises ConfigError for a bad config, LayoutError where no layout uses all the workers.
    """
    fixed = [*overrides, *alone(workers), f"cluster.device={device}"]
    job = resolve_words(config, fixed, (OWN_MODEL,)).job
    layout = _layout(job, workers, device)
    pins = [f"layout.{key}={getattr(layout, key)}" for key in PINNED]
    if job.model.builder is None and job.kernels.attention == "auto" and device == "cpu":
        pins.append(f"kernels.attention={attention_backends(job, device)[0]}")  # a GPU's own says which
    kernels = settled(job, device, layout).kernels
    pins += [
        f"kernels.{key}={json.dumps(getattr(kernels, key))}"
        for key in ("compile", "projections", "tp_overlap", "loss")
    ]
    return Setting("base", "engine", changed(job, pins), layout)


def by_the_loop(base: Setting) -> list[Setting | Refusal]:
    """Make the base as workers train it, without snapshots and with them at the interval that it has.

    Refused by the reason where the slots have no room (`slots_base`).
    """
    try:
        slots_base(base)
    except SlotError as error:
        return [Refusal(name, str(error)) for name in (EXCHANGE, SNAPSHOTS)]
    job = base.job.model_copy(update={"init_from": InitFromConfig()})
    never = [f"evaluate.interval_steps={NEVER}", f"checkpoint.interval_steps={NEVER}"]
    ways = {EXCHANGE: [*never, f"snapshot.interval_steps={NEVER}"], SNAPSHOTS: never}
    return [Setting(name, "loop", changed(job, words), base.layout) for name, words in ways.items()]


def slots_base(base: Setting) -> str:
    """Return the folder with room for all slots of the base: ``snapshot.folder``, or the overflow folder.

    Raises:
        SlotError: neither has room.
    """
    snapshot = base.job.snapshot
    need = snapshot.slots * slot_estimate(base.job, base.layout) * base.layout.world_size
    return choose_folder(snapshot.folder, snapshot.overflow_folder, need)[0]


def changed(job: JobConfig, overrides: Sequence[str]) -> JobConfig:
    """Change ``job`` by dotted overrides outside its model section; ConfigError as from `load_job`."""
    raw = job.model_dump(mode="json")
    raw["model"].pop("built")
    return parse_job(raw, overrides).model_copy(update={"model": job.model})


def _layout(job: JobConfig, workers: int, device: str) -> Layout:
    layout = choose_layout(job, workers, profile_of(device)).layout
    if layout.world_size != workers:
        raise ConfigError(
            f"--workers: saw {workers}, but {layout}, the cheapest layout, uses {layout.world_size} of them;"
            f" give --workers {layout.world_size}, or the layout's degrees"
        )
    if layout.zero and layout.replicas == 1:
        raise ConfigError(f"layout.zero: saw {layout.zero}, but one replica has nobody to shard with")
    return layout


def switched(base: Setting, switches: Sequence[str] = SWITCHES) -> list[Setting | Refusal]:
    """Make the base with each switch in turn, without those that change nothing."""
    found: list[Setting | Refusal] = []
    for switch in switches:
        try:
            setting = _switch(base, switch)
        except ConfigError as error:
            found.append(Refusal(switch, "; ".join(error.problems)))
        else:
            if _what_runs(setting) != _what_runs(base):
                found.append(setting)
    return found


def _what_runs(setting: Setting) -> tuple[JobConfig, Layout]:
    """With the norm that ``auto`` comes to: where it is pinned, other switches would contradict it."""
    job = setting.job
    kernels = job.kernels.model_copy(update={"norm": norm_kernel(job, job.cluster.device)})
    return job.model_copy(update={"kernels": kernels}), setting.layout


def _switch(base: Setting, switch: str) -> Setting:
    job = changed(base.job, switch.split())
    layout = _layout(job, base.layout.world_size, job.cluster.device)
    return Setting(switch, "engine", job, layout)
