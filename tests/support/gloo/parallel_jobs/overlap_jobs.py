"""What processes do for the tests of overlap: note when messages set off and things are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from tests.support.gloo.faults import Undo, replace
from tests.support.gloo.parallel_jobs.matrix_jobs import run_layout
from tests.support.gloo.pool import Job


def noting(owner: Any, name: str, note: Callable[..., None]) -> Any:
    """Let every call of a method be noted first; returns the function that undoes it."""
    kept = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        note(*arguments)
        return kept(*arguments, **named)

    return replace(owner, name, call)


def train_and_undo(job: Job, config: JobConfig, layout: Layout, undo: list[Undo]) -> None:
    """Train with what was put in, and take it out again."""
    try:
        run_layout(job, [config], layout)
    finally:
        for each in undo:
            each()


def logged(job: Job, config: JobConfig, layout: Layout, marks: list[tuple[Any, str, str]]) -> list[str]:
    """Train, and note what is called by the way: (owner, method, how it stands in the log)."""
    log: list[str] = []
    undo = [noting(owner, name, lambda *_, said=said: log.append(said)) for owner, name, said in marks]
    train_and_undo(job, config, layout, undo)
    return log


def ring_log(job: Job, config: JobConfig, layout: Layout) -> list[str]:
    """``send`` and ``wait`` of keys or their gradients, ``forward`` and ``backward`` of a part."""
    from picotron_ray.comm.sequence_collectives import Shift
    from picotron_ray.parallel.context.ring_attention import TileAttention

    marks = [(Shift, "__init__", "send"), (Shift, "wait", "wait")]
    marks += [(TileAttention, "forward", "forward"), (TileAttention, "backward", "backward")]
    return logged(job, config, layout, marks)


def expert_log(job: Job, config: JobConfig, layout: Layout) -> list[str]:
    """``start`` and ``finish`` of transfers; ``shared`` where the expert that stays computes, ``down`` and
    ``inner`` where its backward pass is through its last matrix and comes to its first ones."""
    from picotron_ray.models.layers.swiglu import SwiGLU
    from picotron_ray.parallel.expert.shipment import Transfer

    log: list[str] = []
    seen: set[SwiGLU] = set()
    kept = SwiGLU.inner

    def inner(self: SwiGLU, x: Any) -> Any:
        log.append("shared")
        hidden = kept(self, x)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: log.append("inner"))
        if self not in seen:
            self.down.weight.register_post_accumulate_grad_hook(lambda _: log.append("down"))
            seen.add(self)
        return hidden

    undo = [noting(Transfer, name, lambda *_, name=name: log.append(name)) for name in ("start", "finish")]
    undo.append(replace(SwiGLU, "inner", inner))
    train_and_undo(job, config, layout, undo)
    return log


def pipeline_log(job: Job, config: JobConfig, layout: Layout) -> list[str]:
    """Of every step: ``recv F1``, ``recv B1`` where a receive is posted; ``F1``, ``B1`` where it computes."""
    from torch.distributed.pipelining import PipelineStage

    log: list[str] = []
    methods = {
        "get_fwd_recv_ops": "recv F",
        "get_bwd_recv_ops": "recv B",
        "forward_one_chunk": "F",
        "backward_one_chunk": "B",
    }
    undo = [
        noting(PipelineStage, name, lambda _, number, *__, what=what: log.append(f"{what}{number}"))
        for name, what in methods.items()
    ]
    train_and_undo(job, config, layout, undo)
    return log
