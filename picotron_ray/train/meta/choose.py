"""Choice of the passes of a job that learns from tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.meta import meta_layout_problem
from picotron_ray.data.tasks.open_tasks import open_tasks
from picotron_ray.errors import LayoutError
from picotron_ray.models.definition import ModelDefinition
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.parallel.mesh import Mesh
from picotron_ray.train.gradients import Gradients
from picotron_ray.train.meta.inner_rates import SHIFT, shift_parameters
from picotron_ray.train.meta.passes import MetaPasses
from picotron_ray.train.meta.strategies import Learner
from picotron_ray.train.meta.task_batches import TaskBatcher
from picotron_ray.train.precision.precision import master_dtype
from picotron_ray.train.reduction_plan import reduction_plan


def meta_passes(
    job: JobConfig,
    mesh: Mesh,
    definition: ModelDefinition,
    models: Mapping[int, nn.Module],
    parameters: Sequence[LocalParameter],
    device: torch.device,
) -> tuple[MetaPasses, Gradients]:
    """Make the passes of tasks, and the gradients that they add to: those of learned rates too.

    Raises:
        LayoutError: the layout cuts the model.
        DataError: there is no task.
    """
    if problem := meta_layout_problem(job, mesh.layout):
        raise LayoutError(f"{problem[0]}: {problem[1]}")
    shifts = list(shift_parameters(job.meta, parameters))
    by_name = {one.spec.name.removeprefix(f"{SHIFT}/"): one.parameter for one in shifts}
    (model,) = models.values()
    learner = Learner(model, job.meta.strategy, job.meta.inner_rate, job.meta.inner_steps)
    batcher = TaskBatcher(open_tasks(job).shape, device, master_dtype(job))
    gradients = Gradients([*parameters, *shifts], definition, mesh, reduction_plan(job.comm, mesh))
    return MetaPasses(learner, batcher, by_name), gradients
