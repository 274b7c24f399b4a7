"""Rules between keys of ``comm`` and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.comm import COMPRESSED, CommConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.comm import COLLECTIVES, nccl_problems
from picotron_ray.config.support.kernels import compiled_by
from picotron_ray.layout.layout import Layout

_ONLY_OF = {
    "ratio": ("topk", "powersgd"),
    "bits": ("int8",),
    "overlap_ratio": ("auto", "overlapped", "reduce-scatter", *COMPRESSED),
}
"""Keys of ``comm`` that some values of ``comm.gradients`` have alone."""
_WITHOUT = {
    "layout.tp": "under which no activations are",
    "layout.ep": "under which no rows travel",
    "model.moe.experts": "which has no rows to send",
    "kernels.tp_overlap": "which sends part by part itself",
    "kernels.compile": "whose graphs hold the backend's collectives",
    "precision": "whose compiled blocks hold the backend's collectives",
    "cluster.max_workers": "which leaves one rank",
}
"""Keys under which an axis has no collectives, or others, and why."""


def _compression(job: JobConfig) -> Iterator[Problem]:
    asked = job.comm.gradients
    if asked in COMPRESSED and job.precision == "fp64":
        text = f"saw {asked} with precision=fp64, which is for exact sums; use an exact reducer or fp32"
        yield Problem("comm.gradients", text, ("precision",))
    if asked in COMPRESSED and job.comm.topology != "auto":
        text = f"saw {job.comm.topology} with comm.gradients={asked}, which has a way of its own; use auto"
        yield Problem("comm.topology", text, ("comm.gradients",))


def _reduce_dtype(job: JobConfig) -> Iterator[Problem]:
    if job.comm.reduce_dtype == "bf16" and job.precision not in ("bf16", "fp16", "fp8"):
        text = f"saw bf16 with precision={job.precision}; use fp32, or precision=bf16"
        yield Problem("comm.reduce_dtype", text, ("precision",))


def _without_effect(job: JobConfig) -> Iterator[Problem]:
    """Refuse keys that the chosen reducer, or any algorithm, does not have."""
    comm, plain = job.comm, CommConfig()
    levels = [key for key in ("gradients", *COLLECTIVES) if getattr(comm, key) == "hierarchical"]
    if comm.inner_ranks != "auto" and not levels and not comm.selector:
        text = f"saw {comm.inner_ranks} without neighbourhoods; drop it or use comm.gradients=hierarchical"
        yield Problem("comm.inner_ranks", f"{text}, or another key of comm", ("comm.gradients",))
    for key, names in _ONLY_OF.items():
        value = getattr(comm, key)
        if value != getattr(plain, key) and comm.gradients not in names:
            text = f"saw {value} with comm.gradients={comm.gradients}, which has none; drop it or use"
            yield Problem(f"comm.{key}", f"{text} comm.gradients={' or '.join(names)}", ("comm.gradients",))


def _topology(job: JobConfig) -> Iterator[Problem]:
    comm = job.comm
    if comm.topology == "auto":
        return
    if comm.gradients in ("overlapped", "reduce-scatter"):
        text = f"with comm.gradients={comm.gradients}, but own algorithms begin after the backward pass; use"
        text += " auto, flat, bucketed or hierarchical"
        yield Problem("comm.topology", f"saw {comm.topology} {text}", ("comm.gradients",))


def _collectives(job: JobConfig) -> Iterator[Problem]:
    """Refuse algorithms of gathers and exchanges where nothing is gathered or exchanged by them."""
    kernels, layout = job.kernels, job.layout
    has_none: dict[str, dict[str, object]] = {
        "parameters": {},
        "activations": {
            "layout.tp": layout.tp == 1,
            "kernels.tp_overlap": kernels.tp_overlap not in ("auto", "none"),
            compiled_by(job) or "kernels.compile": bool(compiled_by(job)),
        },
        "experts": {
            "model.moe.experts": not job.model.moe.experts,
            "layout.ep": layout.ep == 1,
            compiled_by(job) or "kernels.compile": bool(compiled_by(job)),
        },
    }
    for key, against in has_none.items():
        asked = getattr(job.comm, key)
        against |= {"cluster.max_workers": job.cluster.max_workers == 1}
        if asked != "auto":
            yield from _at_odds(job, key, asked, against)


def _at_odds(job: JobConfig, key: str, asked: str, against: Mapping[str, object]) -> Iterator[Problem]:
    for other, holds in against.items():
        if holds:
            section, _, name = other.rpartition(".")
            owner = job.model.moe if section == "model.moe" else getattr(job, section) if section else job
            value = getattr(owner, name)
            text = f"saw {asked} with {other}={_word(value)}, {_WITHOUT[other]}; use auto"
            yield Problem(f"comm.{key}", text, (other,))


def _nccl(job: JobConfig) -> Iterator[Problem]:
    for key, text in nccl_problems(job, job.cluster.device).items():  # auto: once machines are known
        yield Problem(key, text, ("cluster.device",))


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _selector(job: JobConfig) -> Iterator[Problem]:
    comm = job.comm
    if not comm.selector:
        return
    against = {
        "comm.gradients": comm.gradients != "auto" and f"{comm.gradients}, which leaves no choice",
        "comm.topology": comm.topology != "auto" and f"{comm.topology}, which leaves no choice",
        "kernels.cuda_graphs": job.kernels.cuda_graphs and "true, whose waits it cannot time",
    }
    for key, why in against.items():
        if why:
            yield Problem("comm.selector", f"saw true with {key}={why}; drop one", (key,))


def _alone(job: JobConfig) -> Iterator[Problem]:
    """Refuse ways of exchange where there will never be two replicas."""
    comm, layout = job.comm, job.layout
    own = comm.topology != "auto"
    if not own and comm.gradients not in ("hierarchical", *COMPRESSED):
        return
    key, saw = ("comm.topology", comm.topology) if own else ("comm.gradients", comm.gradients)
    alone = {"cluster.max_workers": job.cluster.max_workers, "layout.dp": layout.dp if layout.cp == 1 else 0}
    for against, value in alone.items():
        if value == 1:
            text = f"saw {saw} with {against}=1, which leaves one rank that has nobody to sum with"
            yield Problem(key, f"{text}; use auto, or more replicas", (against, "layout.cp"))
            return


def _asked_layout(job: JobConfig) -> Iterator[Problem]:
    zero, replicate = job.layout.zero, job.layout.replicate
    if zero == "auto":
        return
    layout = Layout(dp=2, zero=zero, replicate=1 if replicate == "auto" else replicate)
    for key, against, text in comm_layout_problems(job.comm, layout):
        yield Problem(key, text, against)


def comm_layout_problems(comm: CommConfig, layout: Layout) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield key, keys that it is at odds with, and text of each rule that a layout breaks.

    Under ZeRO FSDP2 sums gradients: by a reduce-scatter for each block, beside the backward pass.
    """
    against, has = ("layout.zero",), f"layout.zero={layout.zero}"
    if not layout.zero:
        if comm.reduce_dtype != "fp32" and layout.replicas > 1:
            text = f"saw {comm.reduce_dtype} with {has}, whose replicas have comm.gradients=bf16, which keeps"
            yield "comm.reduce_dtype", against, f"{text} what rounding leaves; use that, or zero=1"
        if comm.parameters != "auto" and layout.replicas > 1:
            text = (
                f"saw {comm.parameters} with {has}, under which no weights are gathered; use auto or zero=1"
            )
            yield "comm.parameters", against, text
        if comm.zero_blocks > 1 and layout.replicas > 1:
            text = f"saw {comm.zero_blocks} with {has}, under which no weights are gathered; use 1 or zero=1"
            yield "comm.zero_blocks", against, text
        return
    if comm.gradients in COMPRESSED:
        text = f"saw {comm.gradients} with {has}, under which no rank has the gradients to keep an error of"
        yield "comm.gradients", against, f"{text}; use zero=0 or an exact reducer"
    elif comm.gradients in ("flat", "bucketed"):
        text = f"saw {comm.gradients} with {has}, whose gradients FSDP2 reduces block by block"
        yield "comm.gradients", against, f"{text}; use auto, overlapped or reduce-scatter"
    elif comm.gradients == "hierarchical" and layout.replicate == 1:
        text = f"saw hierarchical with {has}, which has two levels where layout.replicate is above 1"
        yield "comm.gradients", (*against, "layout.replicate"), f"{text}; set it, or use auto"
    if comm.topology != "auto":
        text = (
            f"saw {comm.topology} with {has}, whose gradients FSDP2 sums by the backend's algorithm; use auto"
        )
        yield "comm.topology", against, text
    if comm.overlap_ratio != "auto":
        text = f"saw {comm.overlap_ratio} with {has}, where FSDP2 overlaps each block; use auto"
        yield "comm.overlap_ratio", against, text


RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (
    _compression,
    _reduce_dtype,
    _without_effect,
    _topology,
    _nccl,
    _collectives,
    _selector,
    _alone,
    _asked_layout,
)
