"""Data of a run that learns from tasks, in the place of a dataset."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from picotron_ray.config.import_path import import_object
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import EVALUATION_SEED, token_digest
from picotron_ray.data.dataset import DataSplits, build_dataset
from picotron_ray.data.tasks.families import Family, own_family
from picotron_ray.data.tasks.task_samples import KEY, TaskPart, TaskPlan, Tasks, TaskSamples
from picotron_ray.errors import ConfigError, DataError

TRAINED, HELD_OUT = 0, 1
"""Streams of tasks."""
VERSION = "tasks 1"
"""Of the way in which numbers become tasks, and tasks rows."""
PROBED = 4
"""Tasks of each stream that the fingerprint sees, for a family whose code has changed."""


def open_data(job: JobConfig, cache_dir: Path, steps: int = 0, *, evaluated: bool = False) -> DataSplits:
    """Open a run's data: its dataset, or its tasks where it learns from tasks.

    Args:
        cache_dir, steps: as `build_dataset` has them.
        evaluated: whether held-out sets are opened too.

    Raises:
        DataError: as `build_dataset` does; or tasks cannot be made, in one line.
    """
    if not job.meta.on:
        evaluate = job.evaluate if evaluated else None
        return build_dataset(job.data, job.model.vocab_size, job.seed, cache_dir, steps, evaluate)
    splits = open_tasks(job), open_tasks(job, held_out=True)
    probes = [token_digest(split.rows(split.first(PROBED))).hex() for split in splits]
    words = [VERSION, job.meta.tasks, job.meta.support, job.meta.query, job.seed, probes]
    return DataSplits(
        *splits,
        fingerprint=xxhash.xxh3_128_hexdigest(json.dumps(words).encode()),
        bigram_entropy=0.0,
        plan=TaskPlan(job.data.global_batch),
        global_batch=job.data.global_batch,
    )


def open_tasks(job: JobConfig, *, held_out: bool = False) -> TaskSamples:
    """Open a stream of a job's tasks.

    Raises:
        DataError: tasks cannot be made, or are not for its model, in one line.
    """
    seed = (EVALUATION_SEED, HELD_OUT) if held_out else (job.seed, TRAINED)
    tasks = Tasks(_family(job), job.meta.tasks, seed, job.model.vocab_size)
    shape = tasks.shape(job.meta.support, job.meta.query)
    length = job.data.sequence_length
    for name, part in (("inputs", shape.inputs), ("targets", shape.targets)):
        if job.model.builder is None and part != TaskPart((length,), tokens=True):
            saw = f"saw {name} of {list(part.shape)} {'token ids' if part.tokens else 'floats'} an example"
            raise DataError(
                f"{KEY}: {job.meta.tasks}: {saw}, but the model takes data.sequence_length={length} token"
                " ids; make those, or say model.builder"
            )
    return TaskSamples(tasks, shape)


def _family(job: JobConfig) -> Family:
    named, vocabulary = job.meta.tasks, job.model.vocab_size
    family = own_family(named, vocabulary, job.data.sequence_length)
    if family is None:
        try:
            family = import_object(KEY, named)
        except ConfigError as error:
            raise DataError(*error.problems) from error
        if not callable(family):
            kind = type(family).__name__
            raise DataError(f"{KEY}: {named} is a {kind}, expected a function of (generator, examples)")
    return family
