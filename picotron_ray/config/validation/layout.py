"""Layout rules: whether a layout fits a job. Config validation and the planner share them.

Torch would find a mistake late and deep: tensor parallelism over an indivisible dimension fails inside
DTensor. So every rule is checked here, with the two numbers in the message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.kernels import GROUPED_ROW_BYTES, hidden_widths, ungrouped_widths
from picotron_ray.config.support.precision import COMPUTE_BYTES
from picotron_ray.config.validation.comm import comm_layout_problems
from picotron_ray.config.validation.fp8 import gather_problems, width_problems
from picotron_ray.config.validation.meta import meta_layout_problem
from picotron_ray.config.validation.schedules import (
    least_micro_batch,
    placement,
    plain_schedule,
    virtual_stages,
)
from picotron_ray.config.validation.uneven import uneven_problems
from picotron_ray.layout.layout import ContextVariant, Layout
from picotron_ray.layout.recompute_policy import is_selective, stage_words
from picotron_ray.layout.schedules import SCHEDULES, schedule_of


class LayoutProblem(NamedTuple):
    """One broken rule: the layout key at fault, the keys it is at odds with, and what is wrong, in words."""

    key: str
    against: tuple[str, ...]
    text: str


def layout_problems(job: JobConfig, layout: Layout) -> list[LayoutProblem]:
    """Every rule that ``layout`` breaks for this model and batch; empty where it fits."""
    return [
        *_tensor_problems(job, layout.tp),
        *_context_problems(job, layout.cp, layout.tp, layout.context),
        *(LayoutProblem(*problem) for problem in width_problems(job, layout.cp, layout.tp)),
        *(LayoutProblem(*problem) for problem in gather_problems(job, layout)),
        *_grouped_problems(job, layout.tp),
        *_expert_problems(job, layout),
        *_copies_problems(layout),
        *_recompute_problems(layout),
        *_pipeline_problems(job, layout),
        *_batch_problems(job, layout),
        *(LayoutProblem(*problem) for problem in uneven_problems(job, layout)),
        *_graph_problems(job, layout),
        *_meta_problems(job, layout),
        *(LayoutProblem(*problem) for problem in comm_layout_problems(job.comm, layout)),
    ]


def _tensor_problems(job: JobConfig, tp: int) -> Iterator[LayoutProblem]:
    model = job.model
    if model.builder is not None:
        if model.built is not None and tp > 1 and tp not in model.built.tensor_degrees:
            yield LayoutProblem("layout.tp", (), f"saw {tp}; {model.built.no_tensor}")
        return
    cut = {
        "model.heads": model.heads,
        "model.kv_heads": model.kv_heads,
        **hidden_widths(job),
        # Sequence parallelism keeps 1/tp of every sequence between the tensor-parallel blocks.
        "data.sequence_length": job.data.sequence_length,
    }
    uncut = [key for key, size in cut.items() if size % tp]
    if uncut:
        sizes = ", ".join(f"{key}={cut[key]}" for key in uncut)
        yield LayoutProblem("layout.tp", tuple(uncut), f"saw {tp}, which does not divide {sizes}")
    rows = -(-model.vocab_size // tp)  # each rank has so many, the last one what is left
    if rows * (tp - 1) >= model.vocab_size:
        text = f"saw {tp} with model.vocab_size={model.vocab_size}, which leaves the last rank without a row"
        yield LayoutProblem("layout.tp", ("model.vocab_size",), text)


def _expert_problems(job: JobConfig, layout: Layout) -> Iterator[LayoutProblem]:
    ep, experts = layout.ep, job.model.moe.experts
    if ep == 1:
        return
    if not experts:
        yield LayoutProblem(
            "layout.ep", ("model.moe.experts",), f"saw {ep}; a model without experts needs ep=1"
        )
        return
    if experts % ep:
        text = f"saw {ep}, which does not divide model.moe.experts={experts}"
        yield LayoutProblem("layout.ep", ("model.moe.experts",), text)
    chunks = job.kernels.expert_chunks
    if chunks != "auto" and chunks > experts // ep:
        text = f"saw {chunks}, expected at most the {experts // ep} experts of a rank, with layout.ep={ep}"
        yield LayoutProblem("kernels.expert_chunks", ("layout.ep", "model.moe.experts"), text)
    if layout.replicas % ep:
        text = f"saw {ep}, which does not divide dp x cp = {layout.replicas}, over which experts are spread"
        yield LayoutProblem("layout.ep", ("layout.dp", "layout.cp"), text)


def _copies_problems(layout: Layout) -> Iterator[LayoutProblem]:
    copies, replicas = layout.replicate, layout.replicas
    if copies == 1:
        return
    saw, against = f"saw {copies}", ("layout.dp", "layout.cp")
    if not layout.zero:
        text = f"{saw} with layout.zero=0, which cuts nothing; use zero 1, 2 or 3, or replicate=1"
        yield LayoutProblem("layout.replicate", ("layout.zero",), text)
    elif replicas % copies or replicas == copies:
        text = f"{saw}, expected a divisor of dp x cp = {replicas} below it; zero=0 copies without cutting"
        yield LayoutProblem("layout.replicate", against, text)
    elif replicas // copies % layout.ep:
        text = f"{saw}, which leaves {replicas // copies} ranks per copy, not a multiple of ep={layout.ep}"
        yield LayoutProblem("layout.replicate", (*against, "layout.ep"), text)


def _recompute_problems(layout: Layout) -> Iterator[LayoutProblem]:
    policy = layout.recompute
    listed_stages = len(stage_words(policy))
    if listed_stages not in (1, layout.stages):
        text = f"saw a list of {listed_stages}, expected one word, or one for each of {layout.stages} stages"
        yield LayoutProblem("layout.recompute", ("layout.pp", "layout.virtual_stages"), text)
    gathered_inside = layout.ep > 1 and layout.expert_shards > 1
    if is_selective(policy) and gathered_inside:
        text = (
            f"saw {policy} with zero={layout.zero} and ep={layout.ep} over {layout.replicas} replicas, where"
            " a block gathers its experts within: the second forward pass gathers other than the first; use"
            " full or none"
        )
        yield LayoutProblem("layout.recompute", ("layout.zero", "layout.ep", "layout.dp", "layout.cp"), text)


def _context_problems(job: JobConfig, cp: int, tp: int, context: ContextVariant) -> Iterator[LayoutProblem]:
    if cp == 1:
        return
    if job.model.builder is not None:
        yield LayoutProblem("layout.cp", (), f"saw {cp}; a model of your own keeps its rows whole: use cp=1")
        return
    length, keys = job.data.sequence_length, job.model.kv_heads // tp
    if context == "ulysses" and keys % cp:  # query heads are a multiple of them
        each = f" / tp={tp}" if tp > 1 else ""
        text = (
            f"saw {cp} with layout.context=ulysses, which does not divide model.kv_heads={job.model.kv_heads}"
            f"{each}: each key head goes to one rank; use ring or all-gather"
        )
        yield LayoutProblem("layout.cp", ("layout.context", "model.kv_heads", "layout.tp"), text)
    if length % (2 * cp):
        text = f"saw {cp}: data.sequence_length={length} does not divide into 2 x {cp} chunks"
        yield LayoutProblem("layout.cp", ("data.sequence_length",), text)
    elif length // cp % tp:
        text = f"saw {cp} with tp={tp}, which does not divide {length // cp} tokens per rank"
        yield LayoutProblem("layout.cp", ("data.sequence_length", "layout.tp"), text)


def _grouped_problems(job: JobConfig, tp: int) -> Iterator[LayoutProblem]:
    moe = job.model.moe
    if job.kernels.experts != "grouped" or not moe.experts or moe.intermediate_size % tp:
        return
    odd = [f"{key}: {width}" for key, width in ungrouped_widths(job, tp).items()]
    if odd:
        least = GROUPED_ROW_BYTES // COMPUTE_BYTES[job.precision]
        saw = f"saw grouped in {job.precision}{f' with tp={tp}' if tp > 1 else ''}"
        text = f"{saw}, which multiplies multiples of {least}, but {', '.join(odd)}; use loop"
        against = ("layout.tp", "precision", "model.hidden_size", "model.moe.intermediate_size")
        yield LayoutProblem("kernels.experts", against, text)


def splits_backward(job: JobConfig, layout: Layout) -> bool:
    """Whether the layout's schedule splits the backward pass."""
    return layout.pp > 1 and schedule_of(layout.schedule, job.layout.actions).splits_backward


def _pipeline_problems(job: JobConfig, layout: Layout) -> Iterator[LayoutProblem]:
    rows = len(job.layout.actions)
    if SCHEDULES[layout.schedule].with_actions and layout.pp != rows:
        text = f"saw {layout.pp}, expected {rows}, the rows of layout.actions"
        yield LayoutProblem("layout.pp", ("layout.actions", "layout.schedule"), text)
        return
    yield from _stage_problems(job, layout.pp, layout.virtual_stages)
    if layout.pp > 1:
        yield from _schedule_problems(job, layout)


def _schedule_problems(job: JobConfig, layout: Layout) -> Iterator[LayoutProblem]:
    name, virtual = layout.schedule, layout.virtual_stages
    schedule = schedule_of(name, job.layout.actions)
    least, most = schedule.stages_per_rank
    if not least <= virtual <= most:
        expected = f"{least}" if least == most else f"{least} or more"
        text = f"saw {virtual}, expected {expected} for schedule {name}"
        yield LayoutProblem("layout.virtual_stages", ("layout.schedule",), text)
        return
    shape = layout.pipeline_shape(job.data.global_batch)
    problem = schedule.problem(shape)
    if problem:
        text = (
            f"saw {layout.stages} stages but {shape.micro_batches} micro-batches per step (data.global_batch="
            f"{job.data.global_batch}, dp={layout.dp}, micro_batch={layout.micro_batch});"
            f" {name} {problem}"
        )
        against = ("data.global_batch", "layout.schedule", "layout.actions")
        yield LayoutProblem("layout.pp" if schedule.placement != "list" else "layout.actions", against, text)
    if schedule.splits_backward and layout.zero == 3:
        text = (
            f"saw 3 with schedule {name}, which splits the backward pass: gradients come out wrong when"
            " weights are resharded in between; use zero=2 or 0, or another schedule"
        )
        yield LayoutProblem("layout.zero", ("layout.schedule",), text)
    if schedule.splits_backward and layout.recompute != "none":
        text = (
            f"saw {layout.recompute} with schedule {name}, which splits the backward pass: activations"
            " are computed again for one half only; use recompute=none or another schedule"
        )
        yield LayoutProblem("layout.recompute", ("layout.schedule",), text)


def _stage_problems(job: JobConfig, pp: int, virtual: int) -> Iterator[LayoutProblem]:
    model, stages = job.model, pp * virtual
    if pp == 1 or (model.builder is not None and model.built is None):
        return
    if model.builder is not None and model.built is not None and not model.built.pipeline:
        yield LayoutProblem("layout.pp", (), f"saw {pp}; {model.built.no_pipeline}")
    elif model.depth < stages:
        each = f" x {virtual} stages each" if virtual > 1 else ""
        layers = "model.layers=" if model.builder is None else "the model's blocks: "
        text = f"saw {pp}{each}, more than {layers}{model.depth}; every stage needs a layer"
        yield LayoutProblem("layout.pp", ("model.layers",), text)


def _batch_problems(job: JobConfig, layout: Layout) -> Iterator[LayoutProblem]:
    batch = job.data.global_batch
    if layout.dp > batch:
        yield LayoutProblem(
            "layout.dp",
            ("data.global_batch",),
            f"saw {layout.dp}, more replicas than data.global_batch={batch}",
        )
    if layout.micro_batch > batch:
        yield LayoutProblem(
            "layout.micro_batch",
            ("data.global_batch",),
            f"saw {layout.micro_batch}, more rows than data.global_batch={batch}",
        )


def _graph_problems(job: JobConfig, layout: Layout) -> Iterator[LayoutProblem]:
    """Refuse communication within recorded passes: no abort is known to end a recorded collective."""
    if not job.kernels.cuda_graphs:
        return
    degrees = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep")}
    within = [f"layout.{name}={degree}" for name, degree in degrees.items() if degree > 1]
    if layout.zero:
        within.append(f"layout.zero={layout.zero}")
    if within:
        text = (
            f"saw true with {', '.join(within)}, which communicates within the passes; use dp alone, or false"
        )
        yield LayoutProblem("kernels.cuda_graphs", tuple(name.split("=")[0] for name in within), text)


def _meta_problems(job: JobConfig, layout: Layout) -> Iterator[LayoutProblem]:
    """Refuse layouts that cut the model of a job that learns from tasks."""
    if problem := meta_layout_problem(job, layout):
        yield LayoutProblem(problem[0], ("meta.strategy",), problem[1])


class Degrees(NamedTuple):
    """The degrees of a layout whose product is the number of workers."""

    dp: int
    tp: int
    pp: int
    cp: int

    def __str__(self) -> str:
        shown = [f"dp={self.dp}", f"tp={self.tp}", f"pp={self.pp}"]
        return " ".join([*shown, f"cp={self.cp}"] if self.cp > 1 else shown)


def fitting_degrees(job: JobConfig, workers: int, above: int = 0) -> list[Degrees]:
    """All degrees that divide model and batch and use at most ``workers`` ranks, and more than ``above``.

    They are judged with the smallest micro-batch, which admits the most pipelines. Of ``job.layout`` only
    three things count: its schedule, its expert parallelism, and whether ``cp`` is other than 1.
    """
    experts = 1 if job.layout.ep == "auto" else job.layout.ep
    found = []
    for tp in _up_to(workers):
        if any(_tensor_problems(job, tp)) or any(_grouped_problems(job, tp)):
            continue
        groups = workers // tp
        for pp in _up_to(groups):
            if any(_stage_problems(job, pp, virtual_stages(job, pp))):
                continue
            pipelines = groups // pp
            for cp in _up_to(pipelines) if job.layout.cp != 1 else (1,):
                if any(_context_problems(job, cp, tp, job.layout.context)) or any(
                    width_problems(job, cp, tp)
                ):
                    continue
                most = min(pipelines // cp, job.data.global_batch)
                for dp in range(above // (tp * pp * cp) + 1, most + 1):
                    layout = Layout(
                        dp=dp,
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        ep=experts,
                        schedule=plain_schedule(job),
                        virtual_stages=virtual_stages(job, pp),
                        placement=placement(job),
                        micro_batch=least_micro_batch(job, dp),
                    )
                    if any(_pipeline_problems(job, layout)) or any(_meta_problems(job, layout)):
                        continue
                    if layout.replicas % experts == 0:
                        found.append(Degrees(dp, tp, pp, cp))
    return found


def _up_to(most: int) -> range:
    return range(1, most + 1)


def nearest_layouts(job: JobConfig, asked: Degrees, workers: int, count: int = 3) -> list[str]:
    """The ``count`` fitting layouts nearest to the degrees asked for, as ``dp=2 tp=1 pp=2``.

    Distance is the product of the ratios of the degrees, each above 1; among equals those with the most
    workers come first.
    """

    def distance(degrees: Degrees) -> tuple[Fraction, int, Degrees]:
        pairs = zip(degrees, asked, strict=True)
        apart = math.prod((Fraction(max(pair), min(pair)) for pair in pairs), start=Fraction(1))
        return apart, -math.prod(degrees), degrees

    best = sorted(fitting_degrees(job, workers), key=distance)[:count]
    return [str(degrees) for degrees in best]
