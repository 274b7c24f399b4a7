"""Inspection of a model of the user's own before it learns from tasks: whether it can adapt to one.

It takes what the tasks give, and is tried on one of them in fp64, by all that a step does.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from picotron_ray.config.import_path import one_line
from picotron_ray.config.schema.custom_model import BuiltModel
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.tasks.open_tasks import open_tasks
from picotron_ray.errors import ConfigError
from picotron_ray.models.custom import logits_of
from picotron_ray.train.meta.passes import of_tasks
from picotron_ray.train.meta.strategies import Examples, Learner
from picotron_ray.train.meta.task_batches import TaskBatcher

KEY = "model.builder"
UNCUT = "a model that learns from tasks is not cut"


def inspect_learner(job: JobConfig, module: nn.Module) -> tuple[BuiltModel, list[str]]:
    """Try a model of the user's own on a task.

    Returns:
        The description that workers need, and lines for the user.

    Raises:
        ConfigError: its outputs are not what the task predicts, or a step of the strategy fails.
        DataError: the task cannot be made.
    """
    tasks = open_tasks(job)
    trial = copy.deepcopy(module).double()
    inner = trial.forward
    trial.forward = lambda inputs: logits_of(inner(inputs))
    batcher = TaskBatcher(tasks.shape, torch.device("cpu"), torch.float64)
    support, query = batcher.examples(torch.from_numpy(tasks.rows(tasks.first(1))))
    one = Examples(support.inputs[0], support.targets[0])
    before = {name: value.clone() for name, value in trial.named_buffers()}
    width, kept = _outputs(job, trial, one)
    _check_step(job, trial, support, query)
    for name, value in trial.named_buffers():
        if not torch.equal(value, before[name]):
            raise ConfigError(f"{KEY}: forward writes buffer {name}, which no checkpoint holds; use others")
    parameters = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    built = BuiltModel(
        parameters=parameters,
        blocks=(),
        pipeline=(),
        tensor={},
        cuts={},
        tensor_degrees=(),
        hidden_size=width,
        activations=-(-kept // len(one.inputs)),
        no_tensor=UNCUT,
        no_pipeline=UNCUT,
    )
    total = sum(p.numel() for p in module.parameters())
    said = f"model {job.model.builder}: {total:,} parameters in {len(parameters)} tensors, tried on a task of"
    return built, [f"{said} {job.meta.tasks}"]


def _outputs(job: JobConfig, trial: nn.Module, one: Examples) -> tuple[int, int]:
    """Check the outputs of a task's support set; return their width, and the elements that forward keeps."""
    kept: dict[int, int] = {}
    own = {p.data_ptr() for p in [*trial.parameters(), *trial.buffers()]}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    seen = f"forward of inputs {list(one.inputs.shape)} of {job.meta.tasks}"
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs: Any = trial(one.inputs)
    except Exception as error:
        raise ConfigError(f"{KEY}: {seen} raises {one_line(error)}; take what meta.tasks gives") from error
    numbers = one.targets.is_floating_point()
    expected = [*one.targets.shape, *([] if numbers else [job.model.vocab_size])]
    found = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if found != expected:
        what = "as its targets have" if numbers else "logits of model.vocab_size"
        raise ConfigError(f"{KEY}: {seen} gives {found}, expected {expected}, {what}")
    return expected[-1], sum(kept.values())


def _check_step(job: JobConfig, trial: nn.Module, support: Examples, query: Examples) -> None:
    """Take the gradient of one task, as a step does."""
    meta = job.meta
    learner = Learner(trial, meta.strategy, meta.inner_rate, meta.inner_steps)
    try:
        aims, after = of_tasks(learner, learner.objective, {}, support, query)
        aims.sum().backward()
    except Exception as error:
        raise ConfigError(f"{KEY}: a step of {meta.strategy} raises {one_line(error)}") from error
    slopes = [p.grad for p in trial.parameters() if p.grad is not None]
    if not after.isfinite().all() or not all(slope.isfinite().all() for slope in slopes):
        raise ConfigError(
            f"meta.inner_rate: saw {meta.inner_rate:g}, by which {meta.inner_steps} inner steps of a task"
            " give a loss or gradient that is not finite; use a smaller one"
        )
    if not any(slope.any() for slope in slopes):
        raise ConfigError(f"{KEY}: the loss of a task has no gradient, so that nothing would be trained")
