"""Rules between keys of how a step is computed: optimizer, layout, kernels, precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.optimizer import OptimizerConfig, ScheduleConfig
from picotron_ray.config.support.devices import offload_problems
from picotron_ray.config.support.kernels import COMPILED_BY, compiled_by
from picotron_ray.config.support.precision import precision_problem
from picotron_ray.config.validation.layout import Degrees, layout_problems, nearest_layouts
from picotron_ray.config.validation.schedules import (
    asked_pp,
    least_micro_batch,
    own_schedule,
    placement,
    plain_schedule,
    virtual_stages,
)
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import is_quantized, is_selective, recomputed, stage_words
from picotron_ray.layout.schedule_actions import action_list
from picotron_ray.layout.schedules import SCHEDULES

_OPTIMIZERS_OF = {
    "momentum": ("muon",),
    "beta1": ("adamw", "muon"),
    "beta2": ("adamw", "muon"),
    "eps": ("adamw", "muon"),
}
"""Keys of ``optimizer`` that not every optimizer has: those that have it."""


def _optimizer(job: JobConfig) -> Iterator[Problem]:
    chosen, plain = job.optimizer, OptimizerConfig()
    for key, names in _OPTIMIZERS_OF.items():
        value = getattr(chosen, key)
        if chosen.name not in names and value != getattr(plain, key):
            text = f"saw {value:g} with optimizer.name={chosen.name}, which has none; drop it or use"
            yield Problem(
                f"optimizer.{key}", f"{text} optimizer.name={' or '.join(names)}", ("optimizer.name",)
            )
    if chosen.name == "muon" and job.model.built is not None and not job.model.built.matrices:
        yield Problem(
            "optimizer.name",
            f"saw muon, but {job.model.builder} has no matrix inside a repeated block; say in"
            " model.plan.blocks which modules are its blocks, or use adamw",
            ("model.plan.blocks",),
        )


def _expert_placement(job: JobConfig) -> Iterator[Problem]:
    if job.layout.expert_placement == "even":
        return
    key, against = (
        "layout.expert_placement",
        {
            "model.moe.experts": not job.model.moe.experts and "model.moe.experts=0, a dense model; drop it",
            "layout.ep": job.layout.ep == 1
            and "layout.ep=1, where every rank has all experts; use a larger ep, auto, or even",
            "optimizer.moments": job.optimizer.moments == "8bit"
            and "optimizer.moments=8bit, whose blocks span the experts of a rank; use full, or even",
        },
    )
    for other, text in against.items():
        if text:
            yield Problem(key, f"saw by_load with {text}", (other,))


def _offload(job: JobConfig) -> Iterator[Problem]:
    for key, text in offload_problems(job, job.cluster.device).items():  # auto: once machines are known
        yield Problem(key, text, ("cluster.device",))
    asked = job.layout.recompute
    selective = asked != "auto" and is_selective(asked)
    if job.layout.offload_activations and selective:
        text = (
            f"saw true with layout.recompute={asked}, whose kept results stay on the device, out of sight of"
            " what moves activations; use full or none"
        )
        yield Problem("layout.offload_activations", text, ("layout.recompute",))
    compiled = compiled_by(job)
    if job.layout.offload_activations and compiled:
        setting = COMPILED_BY[compiled] + (
            ", which compiles blocks and" if compiled == "precision" else ", which"
        )
        text = f"saw true with {setting} decides by itself what a block keeps; drop one"
        yield Problem("layout.offload_activations", text, (compiled,))
    built = job.model.built
    if job.layout.offload_activations and built is not None and not built.blocks:
        text = f"saw true, but {job.model.builder} has no repeated block; say in model.plan.blocks which are"
        yield Problem("layout.offload_activations", text, ("model.plan.blocks",))
    lacking = {
        "sgd": "which has no moments; drop it or use adamw",
        "muon": "whose momentum the device orthogonalises; drop it or use adamw",
    }
    if job.optimizer.offload and job.optimizer.name in lacking:
        text = f"saw true with optimizer.name={job.optimizer.name}, {lacking[job.optimizer.name]}"
        yield Problem("optimizer.offload", text, ("optimizer.name",))


def _quantized(job: JobConfig) -> Iterator[Problem]:
    """Refuse activations in 8 bits where they cannot be, or nobody would know what they are."""
    asked, built = job.layout.recompute, job.model.built
    if asked == "auto" or not is_quantized(asked):
        return
    unseen = "true, which decides by itself what a block keeps; drop one"
    blockless = built is not None and not built.blocks
    against = {
        "precision": {
            "fp64": "fp64, which is for exact gradients; use full or fp32",
            "fp8": compiled_by(job) and "fp8, whose compiled blocks decide what they keep; use full or bf16",
        }.get(job.precision, ""),
        "kernels.compile": job.kernels.compile is True and unseen,
        "kernels.cuda_graphs": job.kernels.cuda_graphs and "true, whose passes run no hooks; drop one",
        "layout.offload_activations": job.layout.offload_activations and "true, which moves them; drop one",
        "model.plan.blocks": blockless and f"(): {job.model.builder} has no repeated block; say which are",
    }
    for key, why in against.items():
        if why:
            yield Problem("layout.recompute", f"saw {asked} with {key}={why}", (key,))


def _moments(job: JobConfig) -> Iterator[Problem]:
    if job.optimizer.moments == "full":
        return
    against = {
        "optimizer.name": job.optimizer.name == "sgd" and "sgd, which has no moments; drop it or use adamw",
        "optimizer.offload": job.optimizer.offload
        and "true, whose moments take nothing of the device that 8 bits would save; drop one",
        "precision": job.precision == "fp64" and "fp64, which is for exact moments; use full or fp32",
    }
    for key, why in against.items():
        if why:
            yield Problem("optimizer.moments", f"saw {job.optimizer.moments} with {key}={why}", (key,))


def _schedule(job: JobConfig) -> Iterator[Problem]:
    schedule = job.optimizer.schedule
    key = "optimizer.schedule"
    if schedule.warmup_steps > job.steps:
        yield Problem(
            f"{key}.warmup_steps",
            f"saw {schedule.warmup_steps}, expected at most steps={job.steps}",
            ("steps",),
        )
    elif schedule.warmup_steps + schedule.decay_steps > job.steps:
        yield Problem(
            f"{key}.decay_steps",
            f"saw {schedule.decay_steps}, expected at most {job.steps - schedule.warmup_steps}"
            f" (steps={job.steps} less warmup_steps={schedule.warmup_steps})",
            ("steps", f"{key}.warmup_steps"),
        )
    if schedule.kind == "constant" and schedule.final_ratio != ScheduleConfig().final_ratio:
        text = (
            f"saw {schedule.final_ratio:g} with kind=constant, whose rate stays; drop it or use cosine or wsd"
        )
        yield Problem(f"{key}.final_ratio", text, (f"{key}.kind",))
    if schedule.decay_steps and schedule.kind != "wsd":
        yield Problem(
            f"{key}.decay_steps",
            f"saw {schedule.decay_steps} with kind={schedule.kind}, which has none; drop it or use kind=wsd",
            (f"{key}.kind",),
        )


def _without_effect(job: JobConfig) -> Iterator[Problem]:
    """Refuse settings that would do nothing under any layout."""
    asked, depth = job.layout, job.model.depth
    words = () if asked.recompute == "auto" or not depth else stage_words(asked.recompute)
    for word in dict.fromkeys(words):
        if word != "none" and set(recomputed(word, depth)) == {"kept"}:
            text = f"saw {word}, which computes none of {depth} blocks again; use none, or another number"
            yield Problem("layout.recompute", text, ("model.layers",))
    if asked.pp == 1 and asked.virtual_stages not in (1, "auto"):
        text = f"saw {asked.virtual_stages} with layout.pp=1, which has no stages; drop it or use pp"
        yield Problem("layout.virtual_stages", text, ("layout.pp",))


def actions_problem(job: JobConfig) -> str:
    """The reason why ``layout.actions`` cannot run; empty where it can, or there is none."""
    actions, schedule = job.layout.actions, plain_schedule(job)
    if SCHEDULES[schedule].with_actions is None:
        rows = f"saw {len(actions)} rows with layout.schedule={schedule}, which makes its own list"
        return f"{rows}; use schedule=custom or drop them" if actions else ""
    try:
        action_list(actions)
    except ConfigError as error:
        return str(error).removeprefix("layout.actions: ")
    return ""


def _actions(job: JobConfig) -> Iterator[Problem]:
    problem = actions_problem(job)
    if problem:
        yield Problem("layout.actions", problem, ("layout.schedule",))


def _least_dp(job: JobConfig, least: int) -> int:
    """The fewest replicas, a multiple of ``least``, that make the micro-batches of the job's own list."""
    own, asked = own_schedule(job), job.layout.micro_batch
    if own is None or asked == "auto":
        return least
    multiples = range(least, job.cluster.max_workers + 1, least)
    counts = {dp: Layout(dp=dp, micro_batch=asked).micro_batches(job.data.global_batch) for dp in multiples}
    return next((dp for dp, count in counts.items() if count == own.micro_batches), least)


def _layout(job: JobConfig) -> Iterator[Problem]:
    asked = job.layout
    if actions_problem(job):
        return
    degrees = Degrees(
        *(1 if degree == "auto" else degree for degree in (asked.dp, asked.tp, asked_pp(job), asked.cp))
    )
    copies = 1 if asked.replicate == "auto" else asked.replicate
    if asked.dp == "auto":  # as few replicas as experts and copies need
        ep = 1 if asked.ep == "auto" else asked.ep
        least = copies * max(ep, 1 if copies == 1 else 2)
        degrees = degrees._replace(dp=_least_dp(job, math.lcm(least, degrees.cp) // degrees.cp))
    layout = Layout(
        **degrees._asdict(),
        ep=1 if asked.ep == "auto" else asked.ep,
        schedule=plain_schedule(job),
        virtual_stages=virtual_stages(job, degrees.pp),
        zero=asked.zero if asked.zero != "auto" else 0 if copies == 1 else 1,
        replicate=copies,
        recompute=asked.recompute if asked.recompute != "auto" else "none",
        micro_batch=least_micro_batch(job, degrees.dp) if asked.micro_batch == "auto" else asked.micro_batch,
        context=asked.context,
        placement=placement(job),
        offload_activations=asked.offload_activations,
    )
    most, world = job.cluster.max_workers, layout.world_size
    others = ("ep", "zero", "replicate", "micro_batch", "schedule", "virtual_stages", "recompute", "actions")
    touched = tuple(f"layout.{name}" for name in (*Degrees._fields, *others))
    found = [p for p in layout_problems(job, layout) if not p.key.startswith("comm.")]  # a rule of its own
    for problem in found:
        text = problem.text + _nearest(job, degrees)
        yield Problem(problem.key, text, (*touched, "cluster.max_workers", *problem.against))
    if found:
        return
    text = f"saw {str(degrees).replace(' ', ' x ')} = {world} workers, "
    if world > most:
        text += f"more than cluster.max_workers={most}"
    elif asked.dp == "auto" and most % world:  # with dp given, the workers left over are spares
        text += f"which does not divide cluster.max_workers={most}"
    else:
        return
    yield Problem(_widest(degrees), text + _nearest(job, degrees), (*touched, "cluster.max_workers"))


def _nearest(job: JobConfig, degrees: Degrees) -> str:
    found = nearest_layouts(job, degrees, job.cluster.max_workers)
    return "; nearest layouts that fit: " + (", ".join(found) or "none")


def _widest(degrees: Degrees) -> str:
    return max((degree, f"layout.{name}") for name, degree in degrees._asdict().items())[1]


def _precision(job: JobConfig) -> Iterator[Problem]:
    problem = precision_problem(job, job.cluster.device)  # auto is judged when the machines are known
    if problem:
        yield Problem("precision", problem, ("cluster.device",))
    bound = job.adaptive_precision.error_bound
    if bound is not None and job.precision == "fp8":
        text = f"saw {bound:g} with precision=fp8, whose layers are no parts that it can switch; use bf16"
        yield Problem("adaptive_precision.error_bound", text, ("precision",))
    elif bound is not None and job.precision not in ("bf16", "fp16"):
        text = f"saw {bound:g} with precision={job.precision}, which has nothing to adapt; use bf16 or fp16"
        yield Problem("adaptive_precision.error_bound", text, ("precision",))
    if bound is not None and job.kernels.compile is True:
        text = f"saw {bound:g} with kernels.compile=true, which fixes the precision of a block; drop one"
        yield Problem("adaptive_precision.error_bound", text, ("kernels.compile",))


RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (
    _optimizer,
    _offload,
    _quantized,
    _moments,
    _schedule,
    _without_effect,
    _actions,
    _layout,
    _expert_placement,
    _precision,
)
