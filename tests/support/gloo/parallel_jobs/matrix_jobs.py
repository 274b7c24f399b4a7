"""What a process does in the layout matrix, and the reference in one process.

A full tensor is put together from the boxes that the ranks return, so the comparison also covers the
boxes: a hole or an overlap that disagrees is an error.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from picotron_ray.checkpoint.torch_state import StateTensor
from picotron_ray.comm.operation_record import OPERATIONS
from picotron_ray.config.schema.compute import LayoutConfig
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.schema.optimizer import OptimizerConfig
from picotron_ray.data.batch import StepBatch, batch_shape, make_batch
from picotron_ray.data.dataset import build_dataset
from picotron_ray.layout.layout import Layout
from picotron_ray.train.dry_run.call_order import Call
from picotron_ray.train.engine import build_engine
from tests.support.gloo.call_order import calls, keep_calls
from tests.support.gloo.devices import group_options, own_device
from tests.support.gloo.faults import planted
from tests.support.gloo.pool import Job

STEPS = 3
SEQUENCE = 8
MODEL = ModelConfig(
    vocab_size=24, hidden_size=16, intermediate_size=24, layers=4, heads=4, kv_heads=2, init_std=0.3
)
MIXTURE = ModelConfig(
    **{
        **MODEL.model_dump(),
        "moe": {
            "experts": 4,
            "intermediate_size": 12,
            "shared_intermediate_size": 8,
            "loss_coefficient": 0.5,
            "z_coefficient": 0.1,
        },
    }
)
END = MODEL.vocab_size - 1
ENDS = ((), (0, 2, 4, 6), (3,), (1, 6), (0, 1, 5))
"""Where documents end, row after row: one row of one document, one with a border in every chunk of cp=2."""
CPU = torch.device("cpu")
Piece = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, np.ndarray]


def make_job(
    optimizer: str,
    global_batch: int,
    model: ModelConfig = MODEL,
    actions: tuple[str, ...] = (),
    length: int = SEQUENCE,
    **options: Any,
) -> JobConfig:
    """Actions are of the layouts with schedule ``custom``; others take no notice."""
    if actions:
        options["layout"] = LayoutConfig(schedule="custom", actions=actions)
    return JobConfig(
        precision=options.pop("precision", "fp64"),
        model=model,
        data=options.pop("data", None) or DataConfig(sequence_length=length, global_batch=global_batch),
        optimizer=OptimizerConfig(
            name=optimizer, learning_rate=0.05 if optimizer == "sgd" else 0.01, clip_norm=0.5
        ),
        **options,
    )


def documents_job(optimizer: str, global_batch: int, model: ModelConfig = MODEL) -> JobConfig:
    """As `make_job`, with rows of several documents and masks between them."""
    data = DataConfig(
        source="memmap",
        path="made-up",
        sequence_length=SEQUENCE,
        global_batch=global_batch,
        document_masks=True,
        end_token=END,
    )
    return make_job(optimizer, global_batch, model, data=data)


def masked_job(optimizer: str, global_batch: int, model: ModelConfig = MODEL, **options: Any) -> JobConfig:
    """As `make_job`, with some tokens that do not count; of one row none does."""
    data = DataConfig(
        source="memmap", path="made-up", sequence_length=SEQUENCE, global_batch=global_batch, loss_mask=True
    )
    return make_job(optimizer, global_batch, model, data=data, **options)


def counted(size: int, length: int, step: int) -> np.ndarray:
    """Which targets of a global batch count."""
    mask = np.random.default_rng(500 + step).integers(0, 2, (size, length)).astype(bool)
    mask[1] = False
    return mask


def with_documents(rows: np.ndarray) -> np.ndarray:
    """Rows of tokens, in place, so that their documents end as ``ENDS`` says."""
    rows[rows == END] = 0
    for row, ends in zip(rows, cycle(ENDS)):
        row[list(ends)] = END
    return rows


def batch(job: JobConfig, layout: Layout, dp_index: int, step: int) -> StepBatch:
    """Rows of one replica of a made-up global batch, filled up with rows of weight 0 and random tokens.

    The tokens of fill rows are not zero here: nothing may depend on them. Of jsonl, the batch of the data.
    """
    if job.data.source == "jsonl":
        assert job.data.path is not None
        samples = build_dataset(job.data, job.model.vocab_size, job.seed, Path(job.data.path).with_suffix(""))
        return make_batch(samples.feed, layout, dp_index, step)
    size, length, vocabulary = job.data.global_batch, job.data.sequence_length, job.model.vocab_size
    rows = np.random.default_rng(step).integers(0, vocabulary, (size, length + 1))
    first, last = layout.rows(dp_index, size)
    shape = batch_shape(layout, dp_index, size)
    places = shape[0] * shape[1]
    tokens = np.random.default_rng(1000 + dp_index).integers(0, vocabulary, (places, length + 1))
    tokens[: last - first] = (with_documents(rows) if job.data.document_masks else rows)[first:last]
    weights = np.zeros(places)
    weights[: last - first] = 1.0
    masks: dict[str, Any] = {}
    if job.data.loss_mask:
        whole, mine = counted(size, length, step), np.zeros((places, length), bool)
        mine[: last - first] = whole[first:last]
        masks = {"counted": mine.reshape(*shape, length), "global_counted": int(whole.sum())}
    return StepBatch(
        step=step,
        tokens=tokens.reshape(*shape, length + 1),
        weights=weights.reshape(shape),
        global_tokens=size * length,
        rows=((step - 1) * size + first, (step - 1) * size + last),
        digest=bytes(16),
        **masks,
    )


def pieces(state: list[StateTensor]) -> list[Piece]:
    """State as values that travel through a pipe."""
    return [
        (
            item.shard.name,
            item.shard.global_shape,
            item.shard.box.offset,
            item.shard.box.size,
            item.primary,
            item.values().cpu().clone().numpy(),
        )
        for item in state
    ]


def address(item: StateTensor) -> int:
    """Where the live storage begins."""
    return (item.tensor if isinstance(item.tensor, torch.Tensor) else item.tensor.codes).data_ptr()


def spoil(item: StateTensor) -> None:
    """Overwrite the live storage: what is not restored shows."""
    if isinstance(item.tensor, torch.Tensor):
        item.tensor.fill_(float("nan"))
    else:
        item.tensor.codes.fill_(3)
        item.tensor.scales.fill_(float("nan"))


@dataclass
class Result:
    """One rank's part of everything that is compared."""

    loss: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    evaluation: tuple[float, int] = (0.0, 0)
    gradients: list[Piece] = field(default_factory=list)  # of the first step, before clipping
    state: list[Piece] = field(default_factory=list)  # after STEPS steps
    applied: tuple[str, ...] = ()
    stable: bool = True  # the state's storage did not move
    phases: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # of the whole generation, with the last result


def train(job: JobConfig, layout: Layout, rank: int, groups: Any, device: torch.device = CPU) -> Result:
    """Build, take STEPS steps, and evaluate before the last: the step after must not notice."""
    result = Result()
    engine = build_engine(job, layout, rank, groups, device)
    engine.initialise(job.seed)
    result.applied = engine.applied
    before = [address(item) for item in engine.state()]
    dp_index = layout.coordinates(rank).dp
    for step in range(1, STEPS + 1):
        if step == STEPS and job.optimizer.name != "sgd":  # once per layout will do
            averaged = job.evaluate.weights == "ema"
            result.evaluation = engine.evaluate([batch(job, layout, dp_index, 100)], averaged)
        feed = batch(job, layout, dp_index, step)

        def hear(phase: str, first: bool = step == 1) -> None:
            result.phases.append(phase)
            if first and phase == "clip":
                result.gradients = pieces(engine.gradients())

        loss, norm = engine.gradients_of(feed, hear)
        result.loss.append(float(loss))
        result.norm.append(float(norm))
        engine.optimizer_step(job.optimizer.learning_rate)
    result.stable = before == [address(item) for item in engine.state()]
    result.state = pieces(engine.state())
    engine.close()
    return result


def run_layout(
    job: Job, configs: list[JobConfig], layout: Layout, plant: str = "", kind: str = "cpu"
) -> list[Result]:
    """One rank of one layout in a fresh generation, one training per config.

    ``plant`` names a fault (see `planted`); ``kind`` of device: ``cpu`` or ``cuda``.
    """
    keep_calls()
    device = own_device(kind)
    groups = job.groups(**group_options(device))
    groups.connect()
    undo = planted(plant, job.rank) if plant else None
    try:
        results = [train(config, layout, job.rank, groups, device) for config in configs]
        results[-1].calls = calls() if kind == "cpu" else []  # NCCL's have other names
        return results
    finally:
        if undo is not None:
            undo()
        groups.close()
        OPERATIONS.keep(0)
        gc.collect()


def assemble(parts: list[list[Piece]]) -> dict[str, np.ndarray]:
    """Full tensors from all ranks' boxes; replicas must agree bit for bit, and nothing may be missing."""
    full: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for part in parts:
        for name, shape, offset, size, _, values in part:
            target = full.setdefault(name, np.full(shape, np.nan, values.dtype))
            seen = filled.setdefault(name, np.zeros(shape, bool))
            place = tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))
            old = target[place]
            assert np.array_equal(old[seen[place]], values[seen[place]]), f"replicas disagree about {name}"
            target[place] = values
            seen[place] = True
    for name, seen in filled.items():
        assert seen.all(), f"{name} is not covered"
    return full
