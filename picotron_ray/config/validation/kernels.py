"""Rules between keys of the kernels and what they work on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.support.determinism import KEY as DETERMINISTIC
from picotron_ray.config.support.determinism import determinism_problems
from picotron_ray.config.support.devices import device_problems, graph_problems
from picotron_ray.config.support.kernels import COMPILED_BY, attention_problem, compiled_by, overlap_problem
from picotron_ray.config.validation.compute import actions_problem
from picotron_ray.config.validation.schedules import plain_schedule
from picotron_ray.layout.recompute_policy import is_selective
from picotron_ray.layout.schedules import schedule_of
from picotron_ray.models.families.registry import family_of


def _splits(job: JobConfig) -> bool:
    """Whether a pipeline of the job would split its backward pass."""
    readable = not actions_problem(job)
    if not readable or job.layout.pp == 1:
        return False
    return schedule_of(plain_schedule(job), job.layout.actions).splits_backward


def _kernels(job: JobConfig) -> Iterator[Problem]:
    yield from _attention(job)
    yield from _compiled_blocks(job)
    if job.kernels.experts == "grouped" and job.precision == "fp64":
        text = "saw grouped with precision=fp64, which torch's grouped product does not have; use loop"
        yield Problem("kernels.experts", text, ("precision",))
    for key in ("experts", "expert_exchange", "expert_chunks"):
        asked = getattr(job.kernels, key)
        if asked != "auto" and not job.model.moe.experts:
            text = f"saw {asked} with model.moe.experts=0, a dense model; drop it"
            yield Problem(f"kernels.{key}", text, ("model.moe.experts",))
    if job.kernels.optimizer != "fused" and job.optimizer.name == "sgd":
        text = f"saw {job.kernels.optimizer} with optimizer.name=sgd, which has no adamw; drop it"
        yield Problem("kernels.optimizer", text, ("optimizer.name",))
    if job.kernels.optimizer != "fused" and job.optimizer.offload:
        text = f"saw {job.kernels.optimizer} with optimizer.offload=true, which updates by the host's fused"
        yield Problem("kernels.optimizer", f"{text} kernel; drop one", ("optimizer.offload",))
    for key, text in determinism_problems(job).items():
        yield Problem(DETERMINISTIC, text, (key,))
    yield from _graphs(job)
    yield from _closed_norms(job)
    yield from _compiled_functions(job)
    yield from _projections(job)
    yield from _overlap(job)
    yield from _loss(job)


def _compiled_blocks(job: JobConfig) -> Iterator[Problem]:
    key, schedule, recompute = compiled_by(job), job.layout.schedule, job.layout.recompute
    if not key:
        return
    saw, other = ("fp8", "bf16") if key == "precision" else ("true", "compile=false")
    if _splits(job):
        text = (
            f"saw {saw} with layout.schedule={schedule}, which splits the backward pass of compiled blocks"
            f" wrongly; use another schedule or {other}"
        )
        yield Problem(key, text, ("layout.schedule", "layout.pp", "layout.actions"))
    if recompute != "auto" and is_selective(recompute):
        text = (
            f"saw {saw} with layout.recompute={recompute}, which does not see into compiled blocks; use full"
        )
        yield Problem(key, text, ("layout.recompute",))


def _graphs(job: JobConfig) -> Iterator[Problem]:
    for key, text in device_problems(job, job.cluster.device).items():  # auto: once machines are known
        yield Problem(key, text, ("cluster.device",))
    yield from graph_problems(job)


def _closed_norms(job: JobConfig) -> Iterator[Problem]:
    if job.kernels.norm != "closed-form":
        return
    own, norms, compiled = job.model.builder is not None, family_of(job.model).norms, compiled_by(job)
    against = {
        "model.builder": own and "a model of your own, which computes as it was built",
        "model.family": not own
        and norms != "RMSNorm"
        and f"model.family={job.model.family}, which has {norms}",
        compiled: compiled and f"{COMPILED_BY[compiled]}, which compiles all of a block",
    }
    for key, text in against.items():
        if text:
            yield Problem("kernels.norm", f"saw closed-form with {text}; leave it at auto", (key,))


def _compiled_functions(job: JobConfig) -> Iterator[Problem]:
    model, schedule = job.model, job.layout.schedule
    for name in ("norm", "activation"):
        if getattr(job.kernels, name) != "compiled":
            continue
        key, plain = f"kernels.{name}", "auto" if name == "norm" else "eager"
        if model.builder is not None:
            text = f"saw compiled; a model of your own computes as it was built: leave it at {plain}"
            yield Problem(key, text, ("model.builder",))
        elif name not in family_of(model).compiled_functions(model):
            text = f"saw compiled with {_uncompiled(model, name)}; leave it at {plain}"
            yield Problem(key, text, ("model.family", "model.moe.experts"))
        if whole := compiled_by(job):
            text = f"saw compiled with {COMPILED_BY[whole]}, which compiles all of a block; drop one"
            yield Problem(key, text, (whole,))
        if name == "norm" and _splits(job):
            text = f"saw compiled with layout.schedule={schedule}, which splits the backward pass, and"
            text += " that of a compiled norm runs once; use another schedule or auto"
            yield Problem(key, text, ("layout.schedule", "layout.pp", "layout.actions"))


def _uncompiled(model: ModelConfig, name: str) -> str:
    """Keys under which a model has no function of its own that ``kernels.<name>`` could compile, and why."""
    if model.moe.experts:
        return f"model.moe.experts={model.moe.experts}, which get other numbers of rows each time"
    lacks = "norm of a residual sum" if name == "norm" else "SwiGLU"
    return f"model.family={model.family}, which has no {lacks}"


def _projections(job: JobConfig) -> Iterator[Problem]:
    if job.kernels.projections == "fused" and job.model.builder is not None:
        text = "saw fused; a model of your own has the projections that it was built with: leave it at auto"
        yield Problem("kernels.projections", text, ("model.builder",))
    together = job.kernels.projections == "fused" and job.kernels.activation == "compiled"
    if together and job.layout.offload_activations:
        text = (
            "saw compiled with kernels.projections=fused and layout.offload_activations=true: gate and up"
            " come back as tensors of their own, and a compiled gate wants them as pieces of one; use eager"
        )
        against = ("kernels.projections", "layout.offload_activations")
        yield Problem("kernels.activation", text, against)
    if job.kernels.projections == "fused" and job.precision == "fp8":
        text = "saw fused with precision=fp8, which has a scale per projection; use separate"
        yield Problem("kernels.projections", text, ("precision",))


def _overlap(job: JobConfig) -> Iterator[Problem]:
    key, asked, schedule = "kernels.tp_overlap", job.kernels.tp_overlap, job.layout.schedule
    if asked in ("auto", "none"):
        return
    problem = overlap_problem(job, job.cluster.device)  # auto: once machines are known
    if problem:
        yield Problem(key, problem, ("cluster.device",))
    if job.layout.tp == 1:
        text = f"saw {asked} with layout.tp=1, which sends nothing that it could hide; use none or another tp"
        yield Problem(key, text, ("layout.tp",))
    if job.model.builder is not None:
        text = f"saw {asked}; a model of your own calls its linear layers by itself: leave it at none"
        yield Problem(key, text, ("model.builder",))
    if job.precision == "fp8":
        text = f"saw {asked} with precision=fp8, which scales whole tensors, not parts that travel; use none"
        yield Problem(key, text, ("precision",))
    if _splits(job):
        text = (
            f"saw {asked} with layout.schedule={schedule}, each half of whose backward pass would send and"
            " multiply all of it; use another schedule or none"
        )
        yield Problem(key, text, ("layout.schedule", "layout.pp", "layout.actions"))


def _loss(job: JobConfig) -> Iterator[Problem]:
    kernels = job.kernels
    if kernels.loss == "linear" and job.model.builder is not None:
        text = "saw linear; a model of your own gives logits: leave it at auto"
        yield Problem("kernels.loss", text, ("model.builder",))
    chunked = kernels.loss_chunk != KernelsConfig().loss_chunk
    if kernels.loss == "auto" and chunked and job.model.builder is not None:
        text = f"saw {kernels.loss_chunk}; a model of your own gives logits: drop it"
        yield Problem("kernels.loss_chunk", text, ("model.builder",))
    if kernels.loss == "logits" and chunked:
        text = (
            f"saw {kernels.loss_chunk} with kernels.loss={kernels.loss}, which cuts nothing; drop it or use"
        )
        yield Problem("kernels.loss_chunk", f"{text} kernels.loss=linear", ("kernels.loss",))


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
    # auto is judged again once the machines are known; here some device must offer the kernel
    devices = ("cpu", "cuda") if job.cluster.device == "auto" else (job.cluster.device,)
    problems = [attention_problem(job, device) for device in devices]
    problem = problems[-1]
    if problem and all(problems):
        yield Problem(
            "kernels.attention",
            problem,
            ("cluster.device", "precision", job.data.asks_apart[0], DETERMINISTIC),
        )


RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (_kernels,)
