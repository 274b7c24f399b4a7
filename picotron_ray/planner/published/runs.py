"""Published training runs as jobs and layouts of ours, so that the planner's own model predicts them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout, Zero
from picotron_ray.layout.schedules import INTERLEAVED, PLAIN
from picotron_ray.planner.cost import StepCost, step_cost
from picotron_ray.planner.datasheet import DATA_SHEETS, device_profile
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.model_sizes import flops_per_token
from picotron_ray.planner.published.sources import SOURCES, SourceNotes
from picotron_ray.planner.software_profile import SoftwareProfile

ALIASES = {"h200": "h200-141g", "a100": "a100-80g"}
NODE = 8


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One published figure and the run behind it.

    Fields:
        source, where: who published it, and in which table.
        job, layout: the run in our words; None: the source states too little to predict anything.
        hardware: name of a data sheet.
        gpus: devices; 0: not stated.
        unit, figure: what was published: ``step_s``, ``tokens_per_s_per_gpu``, ``mfu`` or ``tflops_per_gpu``.
        complete: whether source and row state the whole layout.
        doubt: why to be wary of it, in the notes' words; empty: nothing.
    """

    source: str
    where: str
    name: str
    job: JobConfig | None
    layout: Layout | None
    hardware: str
    gpus: int
    unit: str
    figure: float
    complete: bool
    doubt: str
    facts: Mapping[str, Any]

    @property
    def notes(self) -> SourceNotes:
        return SOURCES[self.source]

    def profile(self, efficiency: float = 1.0) -> DeviceProfile:
        """The profile of its devices and program."""
        notes = self.notes
        card = _card_bytes_s(self.facts.get("interconnect", "")) or notes.node_link_bytes_s
        sheet = DATA_SHEETS[self.hardware]
        sheet = replace(sheet, node_link_bytes_s=card) if card else sheet
        profile = device_profile(sheet, efficiency=efficiency)
        kernel_s = notes.kernel_s / efficiency if notes.kernel_s else profile.kernel_s
        return replace(profile, software=self._software(), kernel_s=kernel_s)

    def _software(self) -> SoftwareProfile:
        precision = self.facts["layout"]["precision"] or ""
        software = self.notes.software
        if self.facts["layout"]["sequence_parallel"] is not None:
            software = replace(software, sequence_parallel=self.facts["layout"]["sequence_parallel"])
        if "fp32 gradients" in precision:
            return replace(software, gradient_bytes=4)
        return replace(software, gradient_bytes=2) if "pure" in precision else software

    def predict(self, efficiency: float = 1.0) -> StepCost:
        """The step by the planner's model. Only where ``job`` and ``layout`` are known."""
        if self.job is None or self.layout is None:
            raise ValueError(f"{self.source}, {self.name}: the source states no layout")
        nodes = (NODE,) * (self.layout.world_size // NODE) or (self.layout.world_size,)
        return step_cost(self.job, self.layout, self.profile(efficiency), nodes)

    def published_s(self) -> float:
        """Seconds per step by the published figure, counted as its source does."""
        if self.unit == "step_s" or self.job is None:
            return self.figure
        tokens = self.job.data.global_batch * self.job.data.sequence_length / self.gpus
        if self.unit == "tokens_per_s_per_gpu":
            return tokens / self.figure
        peak = DATA_SHEETS[self.hardware].flops
        rate = self.figure * peak if self.unit == "mfu" else self.figure * 1e12
        return tokens * self._counted_flops() / rate

    def _counted_flops(self) -> float:
        """Model FLOPs per token with full attention and the head, without the input embedding."""
        assert self.job is not None
        model = self.job.model
        counted = flops_per_token(model, self.job.data.sequence_length)
        return counted - (0 if model.tie_embeddings else 6 * model.vocab_size * model.hidden_size)

    def as_published(self, seconds: float) -> float:
        """A prediction in the unit of the figure."""
        return seconds if self.unit == "step_s" else self.figure * self.published_s() / seconds


def _card_bytes_s(interconnect: str) -> float:
    """Bytes per second of one device's share of a node's network, as the row states it; 0: it does not."""
    return float(interconnect.split()[0]) * 1e9 / 8 / NODE if "per node" in interconnect else 0.0


@lru_cache(maxsize=1)
def published_runs() -> tuple[PublishedRun, ...]:
    """All published runs that the package carries, in their file's order."""
    rows = json.loads(files(__package__).joinpath("runs.json").read_text(encoding="utf-8"))
    return tuple(run_of(row) for row in rows)


def run_of(row: Mapping[str, Any]) -> PublishedRun:
    """One row of the file as a run."""
    notes, hardware = SOURCES[row["source"]], row["hardware"]
    unit, figure = next(iter(row["measured"].items()))
    job, layout = _job(row, notes), _layout(row)
    return PublishedRun(
        source=row["source"],
        where=row["where"],
        name=row["model"]["name"],
        job=job,
        layout=layout if job else None,
        hardware=ALIASES.get(hardware, hardware),
        gpus=row["gpus"] or 0,
        unit=unit,
        figure=figure,
        complete=notes.complete and job is not None and layout is not None and bool(row["gpus"]),
        doubt=row.get("doubt", ""),
        facts=row,
    )


def _layout(row: Mapping[str, Any]) -> Layout | None:
    """The layout; what the source leaves out is taken as the plainest (one row, one stage a rank)."""
    asked = row["layout"]
    if any(asked[axis] is None for axis in ("tp", "pp", "cp", "dp")):
        return None
    virtual = asked["virtual_stages"] or 1
    zero: Zero = 1 if asked["zero"] is None and asked["dp"] > 1 else asked["zero"] or 0
    return Layout(
        dp=asked["dp"], tp=asked["tp"], pp=asked["pp"], cp=asked["cp"], zero=zero,
        replicate=asked["dp"] // NODE if row.get("sharding", "").startswith("HSDP") else 1,
        schedule=INTERLEAVED if virtual > 1 else PLAIN, virtual_stages=virtual,
        micro_batch=asked["micro_batch"] or 1, recompute=_recompute(asked["recompute"], row),
        context="all-gather",
    )  # fmt: skip


def _recompute(asked: str | None, row: Mapping[str, Any]) -> str:
    if asked in (None, "none"):
        return "none"
    if asked in ("selective (layer)", "selective (blocks)"):  # every second block in full
        return f"blocks-{row['model']['layers'] // 2}-0"
    return "full" if asked == "full" else "selective"


def _job(row: Mapping[str, Any], notes: SourceNotes) -> JobConfig | None:
    model, asked = row["model"], row["layout"]
    if model["seq"] is None or asked["global_batch_samples"] is None:
        return None
    gpt = notes.gpt or "GPT" in model["name"]
    # squared ReLU: two products, as many FLOPs as three of a narrower SwiGLU
    inner = model["ffn"] * 2 // 48 * 16 if "Nemotron" in model["name"] else model["ffn"]
    shape = {
        "family": "gpt2" if gpt else "llama",
        "vocab_size": model["vocab"],
        "hidden_size": model["hidden"],
        "intermediate_size": inner,
        "layers": model["layers"],
        "heads": model["heads"],
        "kv_heads": model["heads"] if gpt else model["kv_heads"],
        **({"max_positions": model["seq"]} if gpt else {}),
    }
    job = parse_job(
        {
            "model": shape,
            "data": {"sequence_length": model["seq"], "global_batch": asked["global_batch_samples"]},
            "precision": _precision(asked["precision"]),
        }
    )
    compiled = {"compile": bool(row.get("compile"))}  # others compute fp8 without a compiler too
    return job.model_copy(update={"kernels": job.kernels.model_copy(update=compiled)})


def _precision(asked: str | None) -> str:
    words = asked or "bf16"
    return "fp8" if "fp8" in words or "float8" in words else "fp16" if "fp16" in words else "bf16"
