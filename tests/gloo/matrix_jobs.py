"""What a process does in the layout matrix, and the reference in one process.

A full tensor is put together from the boxes that the ranks return, so the comparison also covers the
boxes: a hole or an overlap that disagrees is an error.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from picotron_ray.checkpoint.dcp import StateTensor
from picotron_ray.config.compute import LayoutConfig
from picotron_ray.config.data import DataConfig
from picotron_ray.config.job import JobConfig
from picotron_ray.config.layout import Layout
from picotron_ray.config.model import ModelConfig
from picotron_ray.config.optimizer import OptimizerConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.train.engine import build_engine
from tests.gloo.pool import Job

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
    **options: Any,
) -> JobConfig:
    """Actions are of the layouts with schedule ``custom``; others take no notice."""
    if actions:
        options["layout"] = LayoutConfig(schedule="custom", actions=actions)
    return JobConfig(
        precision=options.pop("precision", "fp64"),
        model=model,
        data=options.pop("data", None) or DataConfig(sequence_length=SEQUENCE, global_batch=global_batch),
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


def with_documents(rows: np.ndarray) -> np.ndarray:
    """Rows of tokens, in place, so that their documents end as ``ENDS`` says."""
    rows[rows == END] = 0
    for row, ends in zip(rows, cycle(ENDS)):
        row[list(ends)] = END
    return rows


def batch(job: JobConfig, layout: Layout, dp_index: int, step: int) -> StepBatch:
    """Rows of one replica of a made-up global batch, filled up with rows of weight 0 and random tokens.

    The tokens of fill rows are not zero here: nothing may depend on them.
    """
    size = job.data.global_batch
    rows = np.random.default_rng(step).integers(0, job.model.vocab_size, (size, SEQUENCE + 1))
    first, last = layout.rows(dp_index, size)
    count = layout.micro_batches(size)
    places = count * layout.micro_batch
    tokens = np.random.default_rng(1000 + dp_index).integers(0, job.model.vocab_size, (places, SEQUENCE + 1))
    tokens[: last - first] = (with_documents(rows) if job.data.document_masks else rows)[first:last]
    weights = np.zeros(places)
    weights[: last - first] = 1.0
    shape = (count, layout.micro_batch)
    return StepBatch(
        step=step,
        tokens=tokens.reshape(*shape, SEQUENCE + 1),
        weights=weights.reshape(shape),
        global_tokens=size * SEQUENCE,
        rows=((step - 1) * size + first, (step - 1) * size + last),
        digest=bytes(16),
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
            item.tensor.detach().clone().numpy(),
        )
        for item in state
    ]


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


def train(job: JobConfig, layout: Layout, rank: int, groups: Any) -> Result:
    """Build, take STEPS steps, and evaluate before the last: the step after must not notice."""
    result = Result()
    engine = build_engine(job, layout, rank, groups, CPU)
    engine.initialise(job.seed)
    result.applied = engine.applied
    before = [item.tensor.data_ptr() for item in engine.state()]
    dp_index = layout.coordinates(rank).dp
    for step in range(1, STEPS + 1):
        if step == STEPS and job.optimizer.name != "sgd":  # once per layout will do
            result.evaluation = engine.evaluate([batch(job, layout, dp_index, 100)])
        feed = batch(job, layout, dp_index, step)
        result.loss.append(engine.forward_backward(feed, result.phases.append))
        engine.reduce(result.phases.append)
        if step == 1:
            result.gradients = pieces(engine.gradients())
        result.norm.append(engine.clip(result.phases.append))
        engine.optimizer_step(job.optimizer.learning_rate)
    result.stable = before == [item.tensor.data_ptr() for item in engine.state()]
    result.state = pieces(engine.state())
    engine.close()
    return result


def run_layout(job: Job, configs: list[JobConfig], layout: Layout, plant: str = "") -> list[Result]:
    """One rank of one layout in a fresh generation, one training per config.

    ``plant`` names a fault (see `planted`).
    """
    groups = job.groups()
    groups.connect()
    undo = planted(plant, job.rank) if plant else None
    try:
        return [train(config, layout, job.rank, groups) for config in configs]
    finally:
        if undo is not None:
            undo()
        groups.close()
        gc.collect()


def planted(kind: str, rank: int) -> Any:
    """Double one reduction in this process, or break something else; returns the function that undoes it."""
    import picotron_ray.parallel.loss as loss
    import picotron_ray.parallel.norm as norm
    import picotron_ray.parallel.pipeline as pipeline
    import picotron_ray.train.engine as engine

    if kind == "documents":  # rank 1 alone takes every row for one document
        kept_numbers = engine.document_numbers
        return replace(engine, "document_numbers", lambda x, end: kept_numbers(x, end) * (rank != 1))
    if kind == "tp-partial":
        kept_sum = engine.sum_

        def doubled(tensors: Any, group: Any) -> None:
            kept_sum(tensors, group)
            torch._foreach_mul_(tensors, 2.0)

        return replace(engine, "sum_", doubled)
    if kind == "dp":
        return double_buckets(lambda parameter: True)
    if kind == "copies":
        kept_before = engine.before_backward

        def alone(model: Any, zero: int, last: bool) -> None:
            kept_before(model, zero, last)
            model.set_requires_all_reduce(False)

        return replace(engine, "before_backward", alone)
    if kind == "fsdp":
        import picotron_ray.parallel.data as data
        import picotron_ray.train.stages as stages

        kept_apply = stages.parallelize

        def applied(model: Any, *rest: Any) -> Any:
            found = kept_apply(model, *rest)
            for module in model.modules():
                if isinstance(module, data.FSDPModule):
                    module.set_gradient_divide_factor(0.5)
            return found

        return replace(stages, "parallelize", applied)
    if kind == "fp8":
        import picotron_ray.parallel.fp8 as fp8

        undo = replace(engine, "check_precision", lambda job, device: None)
        undo_emulate = replace(fp8, "EMULATE", True)
        return lambda: (undo(), undo_emulate())
    if kind.startswith("offload-"):
        from tests.gloo.offload_jobs import PLANTS as OFFLOADS

        return OFFLOADS[kind.removeprefix("offload-")]()
    if kind == "norm":
        return double_all_reduce(norm)
    if kind == "vocab":
        return double_all_reduce(loss, dist.ReduceOp.SUM)
    if kind == "pipeline":
        kept = pipeline.Pipeline._micro_loss
        pipeline.Pipeline._micro_loss = lambda self, output, target: kept(self, output, target) * 2.0
        return lambda: setattr(pipeline.Pipeline, "_micro_loss", kept)
    if kind == "actions":
        return exchange_micro_batches(rank)
    if kind in ("ring", "gathered"):
        return double_key_gradients(kind)
    if kind in MOE_PLANTS:
        return MOE_PLANTS[kind]()
    if kind.startswith("muon-"):
        from tests.gloo.muon_jobs import PLANTS

        return PLANTS[kind.removeprefix("muon-")]()
    raise ValueError(kind)


def exchange_micro_batches(rank: int) -> Any:
    """Rank 0 alone takes micro-batches 0 and 1 in its row of a list of actions for each other."""
    import picotron_ray.parallel.pipeline as pipeline

    kept = pipeline.action_list

    def exchanged(actions: tuple[str, ...]) -> Any:
        found = kept(actions)
        first, *rest = found.rows
        wrong = tuple(a._replace(micro_batch={0: 1, 1: 0}.get(a.micro_batch, a.micro_batch)) for a in first)
        return dataclasses.replace(found, rows=(wrong if rank == 0 else first, *rest))

    return replace(pipeline, "action_list", exchanged)


def replace(owner: Any, name: str, value: Any) -> Any:
    """Set an attribute; returns the function that sets it back."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, original)


def double_buckets(chosen: Callable[[torch.Tensor], bool]) -> Any:
    """What is summed over ranks that hold the same comes out doubled, where all of a bucket is chosen."""
    from picotron_ray.parallel.replicated import Bucket

    kept = Bucket.wait

    def doubled(self: Bucket) -> None:
        kept(self)
        if all(chosen(parameter) for parameter in self.parameters):
            torch._foreach_mul_([parameter.grad for parameter in self.parameters], 2.0)

    return replace(Bucket, "wait", doubled)


def double_expert_replicas() -> Any:
    return double_buckets(lambda parameter: parameter.dim() == 3)


def lose_returning_gradients() -> Any:
    import picotron_ray.parallel.expert as expert

    kept = expert._Start.backward
    return replace(expert._Start, "backward", staticmethod(lambda ctx, g: (kept(ctx, g)[0] * 0.5, None)))


def double_auxiliary() -> Any:
    import picotron_ray.models.moe as moe

    kept = moe._Auxiliary.backward

    def doubled(ctx: Any, gradient: torch.Tensor) -> Any:
        x, loss, rest = kept(ctx, gradient)
        return x, loss * 2.0, rest

    return replace(moe._Auxiliary, "backward", staticmethod(doubled))


def count_local_tokens_only() -> Any:
    import picotron_ray.parallel.expert as expert

    return replace(expert.RowSpread, "totals", lambda self, counts: counts)


MOE_PLANTS = {
    "edp": double_expert_replicas,
    "dispatch": lose_returning_gradients,
    "auxiliary": double_auxiliary,
    "load": count_local_tokens_only,
}


def double_key_gradients(kind: str) -> Any:
    """What other context-parallel ranks found for this rank's keys comes home doubled."""
    import picotron_ray.parallel.context as context

    if kind == "gathered":
        original = context.reduce_scatter_sequence
        context.reduce_scatter_sequence = lambda x, group: original(x, group) * 2.0
        return lambda: setattr(context, "reduce_scatter_sequence", original)
    shift = context.Shift

    class Doubled(shift):  # type: ignore[misc, valid-type]
        def __init__(self, x: torch.Tensor, group: Any, tag: int = 0) -> None:
            super().__init__(x * 2.0 if tag else x, group, tag)

    context.Shift = Doubled  # type: ignore[misc]
    return lambda: setattr(context, "Shift", shift)


def double_all_reduce(module: Any, only: Any = None) -> Any:
    """Replace ``dist`` in one module by one whose sums come out doubled."""
    original = module.dist

    class Doubled:
        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

        def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **rest: Any) -> None:
            original.all_reduce(tensor, op=op, **rest)
            if only is None or op == only:
                tensor.mul_(2.0)

    module.dist = Doubled()
    return lambda: setattr(module, "dist", original)


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
