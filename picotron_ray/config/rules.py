"""Rules between keys: what each value alone cannot show to be wrong.

A rule yields problems and never raises, so that all mistakes of a config are reported at once. ``touches``
names the keys that a rule looked at: where one of them already failed on its own, the rule's problem is
not reported (it would speak about a default, not about what the user wrote).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from picotron_ray.config.fit import Degrees, misfits, nearest_layouts, virtual_stages
from picotron_ray.config.job import END_OF_DOCUMENT, JobConfig, ModelConfig, OptimizerConfig
from picotron_ray.config.kernels import attention_problem, precision_problem
from picotron_ray.config.layout import Layout
from picotron_ray.config.moe import MoeConfig
from picotron_ray.config.phases import PHASES
from picotron_ray.config.schedules import RULES as SCHEDULES
from picotron_ray.config.urls import url_problems

_NOT_GPT2 = ("head_dim", "qkv_bias", "qk_norm", "sliding_window", "rope_scaling", "rope_theta", "moe")
BYTE_VOCABULARY = END_OF_DOCUMENT + 1  # 256 byte values and the end of a document


class Problem(NamedTuple):
    """One mistake: the key to change, what is wrong, and the other keys it depends on."""

    key: str
    text: str
    touches: tuple[str, ...] = ()


def check(job: JobConfig) -> list[Problem]:
    """Every broken rule of a config whose values are each valid."""
    return [problem for rule in RULES for problem in rule(job)]


def _builder(job: JobConfig) -> Iterator[Problem]:
    """Keys that do not go with `model.builder`, or not without it."""
    model, plain = job.model, ModelConfig()
    own = ("arguments", "plan", "built")
    skipped = {"vocab_size", "builder", *own} if model.builder else set(ModelConfig.model_fields) - set(own)
    for key in ModelConfig.model_fields:
        if key not in skipped and getattr(model, key) != getattr(plain, key):
            text = "a value with model.builder, which takes only vocab_size, arguments and plan"
            yield Problem(
                f"model.{key}",
                f"saw {text if model.builder else 'a value without model.builder'}; drop it",
                ("model.builder",),
            )
    try:
        json.dumps(model.arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        text = (
            f"saw something other than finite plain data: {error}; use numbers, strings, lists and mappings"
        )
        yield Problem("model.arguments", text)


def _model(job: JobConfig) -> Iterator[Problem]:
    model = job.model
    if model.builder is not None:
        return
    if model.heads % model.kv_heads:
        yield Problem(
            "model.kv_heads",
            f"saw {model.kv_heads}, which does not divide model.heads={model.heads}",
            ("model.heads",),
        )
    if model.head_dim is None and model.hidden_size % model.heads:
        yield Problem(
            "model.heads",
            f"saw {model.heads}, which does not divide model.hidden_size={model.hidden_size}; say"
            " model.head_dim where that is meant",
            ("model.hidden_size", "model.head_dim"),
        )
    elif model.head_size % 2 and not model.is_gpt2:
        yield Problem(
            "model.hidden_size" if model.head_dim is None else "model.head_dim",
            f"saw {model.hidden_size} with model.heads={model.heads}, a head size of {model.head_size};"
            " rotary positions need an even head size",
            ("model.heads", "model.head_dim"),
        )
    scaling = model.rope_scaling
    if scaling.high_frequency_factor <= scaling.low_frequency_factor:
        yield Problem(
            "model.rope_scaling.high_frequency_factor",
            f"saw {scaling.high_frequency_factor:g}, expected more than"
            f" low_frequency_factor={scaling.low_frequency_factor:g}",
            ("model.rope_scaling.low_frequency_factor",),
        )


def _gpt2(job: JobConfig) -> Iterator[Problem]:
    """What goes with one family and not with the other."""
    model, plain, length = job.model, ModelConfig(), job.data.sequence_length
    if model.builder is not None:
        return
    if not model.is_gpt2:
        if model.max_positions is not None:
            text = f"saw {model.max_positions} with model.family=llama, whose positions are rotary; drop it"
            yield Problem("model.max_positions", text, ("model.family",))
        return
    for key in _NOT_GPT2:
        if getattr(model, key) != getattr(plain, key):
            yield Problem(f"model.{key}", "saw a value with model.family=gpt2, which has none; drop it")
    if model.kv_heads != model.heads:
        text = f"saw {model.kv_heads} with model.family=gpt2, expected model.heads={model.heads}"
        yield Problem("model.kv_heads", text, ("model.heads", "model.family"))
    if model.max_positions is None or model.max_positions < length:
        saw = "nothing" if model.max_positions is None else model.max_positions
        text = f"saw {saw} with model.family=gpt2, expected at least data.sequence_length={length}"
        yield Problem("model.max_positions", text, ("data.sequence_length", "model.family"))


def _moe(job: JobConfig) -> Iterator[Problem]:
    moe, plain = job.model.moe, MoeConfig()
    if moe.experts:
        if moe.top_k > moe.experts:
            text = f"saw {moe.top_k}, expected at most model.moe.experts={moe.experts}"
            yield Problem("model.moe.top_k", text, ("model.moe.experts",))
        return
    for key in MoeConfig.model_fields:
        if getattr(moe, key) != getattr(plain, key):
            text = "saw a value with model.moe.experts=0, a dense model; say how many experts, or drop it"
            yield Problem(f"model.moe.{key}", text, ("model.moe.experts",))


def _data(job: JobConfig) -> Iterator[Problem]:
    data, vocabulary = job.data, job.model.vocab_size
    if data.source == "stdlib" and data.path is not None:
        yield Problem(
            "data.path", "saw a path with data.source=stdlib, which reads none; drop it", ("data.source",)
        )
    if data.source != "stdlib" and not data.path:
        what = "a file or folder of token ids" if data.source == "memmap" else "a file, folder or glob"
        text = f"saw nothing, expected {what} for data.source={data.source}; say data.path=..."
        yield Problem("data.path", text, ("data.source",))
    if data.source != "memmap" and vocabulary < BYTE_VOCABULARY:
        yield Problem(
            "model.vocab_size",
            f"saw {vocabulary}, expected at least {BYTE_VOCABULARY} (256 bytes and end of document) for"
            f" data.source={data.source}",
            ("data.source",),
        )
    if data.path and "://" in data.path:
        yield Problem("data.path", "saw a URL, expected a path that every node can read", ())


def _documents(job: JobConfig) -> Iterator[Problem]:
    data, end, vocabulary = job.data, job.data.end_token, job.model.vocab_size
    if data.document_masks and job.model.builder is not None:
        text = "saw true; a model of your own attends as it was built: leave it out"
        yield Problem("data.document_masks", text, ("model.builder",))
    if data.source != "memmap":
        if end is not None:
            text = f"saw {end} with data.source={data.source}, which ends documents by itself; drop it"
            yield Problem("data.end_token", text, ("data.source",))
    elif end is None:
        if data.document_masks:
            text = "saw null with data.document_masks=true; say which id ends a document in these token files"
            yield Problem("data.end_token", text, ("data.source", "data.document_masks"))
    elif end >= vocabulary:
        text = f"saw {end}, expected an id below model.vocab_size={vocabulary}"
        yield Problem("data.end_token", text, ("data.source", "model.vocab_size"))


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
    if schedule.decay_steps and schedule.kind != "wsd":
        yield Problem(
            f"{key}.decay_steps",
            f"saw {schedule.decay_steps} with kind={schedule.kind}, which has none; drop it or use kind=wsd",
            (f"{key}.kind",),
        )


def _layout(job: JobConfig) -> Iterator[Problem]:
    asked = job.layout
    degrees = Degrees(
        *(1 if degree == "auto" else degree for degree in (asked.dp, asked.tp, asked.pp, asked.cp))
    )
    copies = 1 if asked.replicate == "auto" else asked.replicate
    if asked.dp == "auto":  # as few replicas as experts and copies need
        ep = 1 if asked.ep == "auto" else asked.ep
        least = copies * (ep if ep > 1 or copies == 1 else 2)
        degrees = degrees._replace(dp=math.lcm(least, degrees.cp) // degrees.cp)
    layout = Layout(
        **degrees._asdict(),
        ep=1 if asked.ep == "auto" else asked.ep,
        schedule=asked.schedule,
        virtual_stages=virtual_stages(job, degrees.pp),
        zero=asked.zero if asked.zero != "auto" else 0 if copies == 1 else 1,
        replicate=copies,
        recompute=asked.recompute if asked.recompute != "auto" else "none",
        micro_batch=1 if asked.micro_batch == "auto" else asked.micro_batch,
    )
    most, world = job.cluster.max_workers, layout.world_size
    others = ("ep", "zero", "replicate", "micro_batch", "schedule", "virtual_stages", "recompute")
    touched = tuple(f"layout.{name}" for name in (*Degrees._fields, *others))
    found = misfits(job, layout)
    for misfit in found:
        text = misfit.text + _nearest(job, degrees)
        yield Problem(misfit.key, text, (*touched, "cluster.max_workers", *misfit.against))
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


def _kernels(job: JobConfig) -> Iterator[Problem]:
    yield from _attention(job)
    schedule = job.layout.schedule
    if job.kernels.compile and job.layout.pp != 1 and SCHEDULES[schedule].splits:
        text = (
            f"saw true with layout.schedule={schedule}, which splits the backward pass of compiled blocks"
            " wrongly; use another schedule or compile=false"
        )
        yield Problem("kernels.compile", text, ("layout.schedule", "layout.pp"))
    if job.kernels.experts == "grouped" and job.precision == "fp64":
        text = "saw grouped with precision=fp64, which torch's grouped product does not have; use loop"
        yield Problem("kernels.experts", text, ("precision",))
    if job.kernels.experts != "auto" and not job.model.moe.experts:
        text = f"saw {job.kernels.experts} with model.moe.experts=0, a dense model; drop it"
        yield Problem("kernels.experts", text, ("model.moe.experts",))
    if job.kernels.compile and job.layout.recompute == "selective":
        text = "saw true with layout.recompute=selective, which does not see into compiled blocks; use full"
        yield Problem("kernels.compile", text, ("layout.recompute",))


def _attention(job: JobConfig) -> Iterator[Problem]:
    asked = job.kernels.attention
    if asked == "auto":
        return
    if job.model.builder is not None:
        yield Problem(
            "kernels.attention",
            f"saw {asked}; a model of your own has its own: leave it at auto",
            ("model.builder",),
        )
        return
    least = 1 if job.layout.cp == "auto" else job.layout.cp
    # auto is judged again once the machines are known; here some device must offer the kernel
    devices = ("cpu", "cuda") if job.cluster.device == "auto" else (job.cluster.device,)
    problems = [attention_problem(job, device, least) for device in devices]
    problem = problems[-1]
    if problem and all(problems):
        yield Problem(
            "kernels.attention", problem, ("cluster.device", "precision", "layout.cp", "data.document_masks")
        )


def _precision(job: JobConfig) -> Iterator[Problem]:
    problem = precision_problem(job, job.cluster.device)  # auto is judged when the machines are known
    if problem:
        yield Problem("precision", problem, ("cluster.device",))
    bound = job.adaptive_precision.error_bound
    if bound is not None and job.precision not in ("bf16", "fp16"):
        text = f"saw {bound:g} with precision={job.precision}, which has nothing to adapt; use bf16 or fp16"
        yield Problem("adaptive_precision.error_bound", text, ("precision",))
    if bound is not None and job.kernels.compile:
        text = f"saw {bound:g} with kernels.compile=true, which fixes the precision of a block; drop one"
        yield Problem("adaptive_precision.error_bound", text, ("kernels.compile",))


def _cluster(job: JobConfig) -> Iterator[Problem]:
    cluster, elastic = job.cluster, job.elastic
    if cluster.min_workers > cluster.max_workers:
        yield Problem(
            "cluster.min_workers",
            f"saw {cluster.min_workers}, expected at most cluster.max_workers={cluster.max_workers}",
            ("cluster.max_workers",),
        )
    elif (
        cluster.local_cpus is not None and cluster.min_workers * cluster.cpus_per_worker > cluster.local_cpus
    ):
        yield Problem(
            "cluster.local_cpus",
            f"saw {cluster.local_cpus}, too few for cluster.min_workers={cluster.min_workers} at"
            f" cluster.cpus_per_worker={cluster.cpus_per_worker:g}",
            ("cluster.min_workers", "cluster.cpus_per_worker"),
        )
    if elastic.node_timeout_s < 2 * elastic.heartbeat_s:
        yield Problem(
            "elastic.node_timeout_s",
            f"saw {elastic.node_timeout_s:g}, expected at least twice"
            f" elastic.heartbeat_s={elastic.heartbeat_s:g}",
            ("elastic.heartbeat_s",),
        )


def _snapshot(job: JobConfig) -> Iterator[Problem]:
    snapshot = job.snapshot
    if snapshot.interval_steps != "auto" and snapshot.interval_steps < 1:
        yield Problem(
            "snapshot.interval_steps", f"saw {snapshot.interval_steps}, expected auto or at least 1"
        )
    for key, folder in (("folder", snapshot.folder), ("overflow_folder", snapshot.overflow_folder)):
        if folder is not None and not folder.startswith("/"):
            yield Problem(
                f"snapshot.{key}", f"saw {folder!r}, expected an absolute path, the same on every node"
            )


def _checkpoint(job: JobConfig) -> Iterator[Problem]:
    checkpoint = job.checkpoint
    every = checkpoint.keep_every_steps
    if every is not None and every % checkpoint.interval_steps:
        yield Problem(
            "checkpoint.keep_every_steps",
            f"saw {every}, expected a multiple of checkpoint.interval_steps={checkpoint.interval_steps},"
            " or no commit would be kept",
            ("checkpoint.interval_steps",),
        )
    if checkpoint.resume_step is not None and checkpoint.resume_step > job.steps:
        yield Problem(
            "checkpoint.resume_step",
            f"saw {checkpoint.resume_step}, expected at most steps={job.steps}",
            ("steps",),
        )


def _storage(job: JobConfig) -> Iterator[Problem]:
    for key, text in url_problems(job.storage):
        yield Problem(f"storage.{key}", text, ("storage.url",))


def _init_from(job: JobConfig) -> Iterator[Problem]:
    asked = job.init_from
    if asked.run is None:
        given = [key for key, value in asked if value not in (None, False)]
        for key in given:
            yield Problem(f"init_from.{key}", "saw a value without init_from.run; name the run, or drop it")
        return
    if asked.run == job.name and asked.url in (None, job.storage.url):
        text = f"saw {asked.run!r}, which is this run itself; give this one another name"
        yield Problem("init_from.run", text, ("name",))
    if asked.url is not None:
        theirs = job.storage.model_copy(update={"url": asked.url})
        yield from (Problem("init_from.url", text) for key, text in url_problems(theirs) if key == "url")


def _chaos(job: JobConfig) -> Iterator[Problem]:
    for index, fault in enumerate(job.chaos):
        at = f"chaos.{index}"
        kind, _, number = fault.target.partition(":")
        if fault.phase not in PHASES:
            yield Problem(f"{at}.phase", f"saw {fault.phase!r}, expected one of {', '.join(PHASES)}")
        elif fault.phase == "commit" and kind != "coordinator":
            yield Problem(
                f"{at}.phase", f"saw commit with target {fault.target}; only the coordinator commits"
            )
        if kind == "worker" and int(number) >= job.cluster.max_workers:
            yield Problem(
                f"{at}.target",
                f"saw {fault.target}, expected a rank below cluster.max_workers={job.cluster.max_workers}",
                ("cluster.max_workers",),
            )
        if (fault.fault == "remove-node") != (kind == "node"):
            expected = "node:<index>" if fault.fault == "remove-node" else "worker:<rank> or coordinator"
            text = f"saw {fault.target}, expected {expected} for fault {fault.fault}"
            yield Problem(f"{at}.target", text, (f"{at}.fault",))
        if fault.step > job.steps:
            yield Problem(f"{at}.step", f"saw {fault.step}, expected at most steps={job.steps}", ("steps",))


RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (
    _builder,
    _model,
    _gpt2,
    _moe,
    _data,
    _documents,
    _optimizer,
    _schedule,
    _layout,
    _kernels,
    _precision,
    _cluster,
    _snapshot,
    _checkpoint,
    _storage,
    _init_from,
    _chaos,
)
