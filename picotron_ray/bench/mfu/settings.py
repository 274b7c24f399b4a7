"""What ``bench mfu`` compares: the base setting, each optimisation switched in turn, and peers. Torch-free.

The base is what the config comes to on the workers at hand: its layout is chosen as the coordinator would,
and then written back, so that a switch changes what it names and nothing else. A switch that the config or
the planner refuses is kept as a `Refusal` with their reason; one that changes nothing is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from picotron_ray.config.job import JobConfig
from picotron_ray.config.kernels import attention_backends
from picotron_ray.config.layout import Layout
from picotron_ray.config.load import load_job, parse_job
from picotron_ray.config.source import apply_overrides
from picotron_ray.errors import ConfigError
from picotron_ray.planner.choose import choose_layout
from picotron_ray.planner.profile import profile_of
from picotron_ray.runtime.own_model import with_built_model

Kind = Literal["engine", "plain", "picotron"]

SWITCHES = (
    "precision=fp32",
    "precision=tf32",
    "precision=bf16",
    "precision=fp16",
    "precision=fp8",
    "kernels.attention=math",
    "kernels.attention=flash",
    "kernels.compile=true",
    "kernels.experts=grouped",
    "kernels.projections=fused",
    "kernels.loss=linear",
    "kernels.norm=compiled",
    "kernels.activation=compiled",
    "kernels.optimizer=foreach",
    "layout.recompute=none",
    "layout.recompute=selective",
    "layout.recompute=full",
    "layout.offload_activations=true",
    "layout.recompute=full layout.offload_activations=true",
    "optimizer.offload=true",
    "layout.zero=0",
    "layout.zero=1",
    "layout.zero=2",
    "layout.zero=3",
    "layout.tp=2 layout.dp=auto",
)
"""Dotted overrides, several with spaces between; each is tried alone on top of the base."""

NEVER = 1_000_000  # steps: the end of a learning-rate schedule is not reached
PEERS = ("plain", "picotron")
PINNED = ("dp", "tp", "pp", "cp", "ep", "zero", "replicate", "virtual_stages", "micro_batch", "recompute")


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that is measured."""

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
    """One thing that cannot be measured here, and why."""

    name: str
    reason: str


def alone(workers: int) -> list[str]:
    """Overrides that leave nothing of a run but its steps on exactly ``workers`` workers."""
    fixed = ["chaos=[]", f"steps={NEVER}"]
    return [*fixed, f"cluster.max_workers={workers}", f"cluster.min_workers={workers}"]


def base_setting(config: str, overrides: Sequence[str], workers: int, device: str) -> Setting:
    """The config on ``workers`` workers of ``device`` (``cpu`` or ``cuda``), with what auto came to.

    Raises ConfigError for a bad config, LayoutError where no layout uses all the workers.
    """
    fixed = [*overrides, *alone(workers), f"cluster.device={device}"]
    job = with_built_model(load_job(config, fixed))
    layout = _layout(job, workers, device)
    pins = [f"layout.{key}={getattr(layout, key)}" for key in PINNED]
    if job.model.builder is None and job.kernels.attention == "auto":
        pins.append(f"kernels.attention={attention_backends(job, device, layout.cp)[0]}")
    return Setting("base", "engine", changed(job, pins), layout)


def changed(job: JobConfig, overrides: Sequence[str]) -> JobConfig:
    """``job`` with dotted overrides outside its model section; raises ConfigError as `load_job` does."""
    raw = job.model_dump(mode="json")
    raw["model"].pop("built")
    problems = apply_overrides(raw, overrides)
    if problems:
        raise ConfigError(*problems)
    return parse_job(raw).model_copy(update={"model": job.model})


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
    """The base with each switch in turn; without those that change nothing."""
    found: list[Setting | Refusal] = []
    for switch in switches:
        try:
            setting = _switch(base, switch)
        except ConfigError as error:
            found.append(Refusal(switch, "; ".join(error.problems)))
        else:
            if (setting.job, setting.layout) != (base.job, base.layout):
                found.append(setting)
    return found


def _switch(base: Setting, switch: str) -> Setting:
    job = changed(base.job, switch.split())
    layout = _layout(job, base.layout.world_size, job.cluster.device)
    return Setting(switch, "engine", job, layout)


def chosen_peers(names: str, picotron: Path | None) -> list[str]:
    """From ``--peers``; raises ConfigError for an unknown one, or picotron without its checkout."""
    chosen = [] if names == "none" else [name.strip() for name in names.split(",")]
    unknown = [name for name in chosen if name not in PEERS]
    if unknown:
        raise ConfigError(f"--peers: saw {unknown[0]!r}, expected some of {', '.join(PEERS)}, or none")
    if "picotron" in chosen and (picotron is None or not (picotron / "picotron" / "model.py").is_file()):
        saw = "none" if picotron is None else f"{picotron}, without picotron/model.py"
        raise ConfigError(f"--picotron: saw {saw}, expected a checkout of github.com/huggingface/picotron")
    return chosen


def peer(base: Setting, name: str) -> Setting | Refusal:
    """A peer that trains the same model on the same batches."""
    kind: Kind = "plain" if name == "plain" else "picotron"
    problem = _plain_problem(base) if kind == "plain" else _picotron_problem(base)
    return Refusal(name, problem) if problem else Setting(name, kind, base.job, base.layout)


def _plain_problem(base: Setting) -> str:
    job, layout = base.job, base.layout
    if layout.world_size != layout.dp or job.data.global_batch % layout.dp:
        return f"the plain loop is data-parallel over equal shares, saw {layout}"
    return _other_model(job)


def _other_model(job: JobConfig) -> str:
    if job.model.builder is not None or job.model.moe.experts:
        return "written for the dense built-in decoder alone"
    if job.optimizer.name != "adamw":
        return f"written for AdamW, saw optimizer.name={job.optimizer.name}"
    if job.data.document_masks:
        return "its attention sees whole rows, saw data.document_masks=true"
    if job.adaptive_precision.error_bound is not None:
        return "it computes in one precision, saw adaptive_precision.error_bound"
    if job.precision == "fp16":
        return "it has no loss scale, saw precision=fp16"
    if job.precision == "fp8":
        return "it has no fp8 layers, saw precision=fp8"
    return ""


def _picotron_problem(base: Setting) -> str:
    job, layout, model = base.job, base.layout, base.job.model
    wanted = "bf16" if job.cluster.device == "cuda" else "fp32"
    if job.precision != wanted:
        return f"it trains in {wanted} on {job.cluster.device}, saw precision={job.precision}"
    if layout.world_size != layout.dp * layout.tp or job.data.global_batch % (layout.dp * layout.micro_batch):
        return f"compared under dp and tp with equal micro-batches, saw {layout}"
    own = (model.head_size * model.heads != model.hidden_size, model.qkv_bias, model.qk_norm)
    if any(own) or model.sliding_window or model.rope_scaling.factor != 1.0 or model.tie_embeddings:
        return "its model has no such heads, biases, norms, window, stretched positions or tied embeddings"
    return _other_model(job)
