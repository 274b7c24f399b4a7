"""Data of a run that learns from tasks, in the place of a dataset."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import xxhash

from picotron_ray.config.import_path import import_object
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import EVALUATION_SEED, token_digest
from picotron_ray.data.dataset import DataSplits, build_dataset
from picotron_ray.data.tasks.families import own_family
from picotron_ray.data.tasks.task_samples import KEY, TaskPlan, Tasks, TaskSamples, TaskShape
from picotron_ray.errors import ConfigError, DataError

TRAINED, HELD_OUT = 0, 1
"""Streams of tasks."""
VERSION = "tasks 1"
"""Of the way in which numbers become tasks, and tasks rows."""
PROBED = 4
"""Tasks of each stream that the fingerprint sees, for a family whose code has changed."""


def open_data(job: JobConfig, cache_dir: Path, steps: int = 0) -> DataSplits:
    """Open a run's data: its dataset, or its tasks where it learns from tasks.

    Args:
        cache_dir, steps: as `build_dataset` has them.

    Raises:
        DataError: as `build_dataset` does; or tasks cannot be made, in one line.
    """
    if not job.meta.on:
        return build_dataset(job.data, job.model.vocab_size, job.seed, cache_dir, steps)
    train, held_out = _stream(job, (job.seed, TRAINED)), _stream(job, (EVALUATION_SEED, HELD_OUT))
    shape = train.shape(job.meta.support, job.meta.query)
    splits = TaskSamples(train, shape), TaskSamples(held_out, shape)
    probes = [token_digest(split.rows(np.arange(PROBED))).hex() for split in splits]
    words = [VERSION, job.meta.tasks, job.meta.support, job.meta.query, job.seed, probes]
    return DataSplits(
        *splits,
        fingerprint=xxhash.xxh3_128_hexdigest(json.dumps(words).encode()),
        bigram_entropy=0.0,
        plan=TaskPlan(job.data.global_batch),
        global_batch=job.data.global_batch,
    )


def task_shape(job: JobConfig) -> TaskShape:
    """Look at the first task of a job. Raises DataError where it cannot be made, in one line."""
    return _stream(job, (job.seed, TRAINED)).shape(job.meta.support, job.meta.query)


def _stream(job: JobConfig, seed: tuple[int, int]) -> Tasks:
    named, vocabulary = job.meta.tasks, job.model.vocab_size
    family = own_family(named, vocabulary, job.data.sequence_length)
    if family is None:
        try:
            family = import_object(KEY, named)
        except ConfigError as error:
            raise DataError(*error.problems) from error
        if not callable(family):
            raise DataError(f"{KEY}: {named} is a {type(family).__name__}, expected a function of"
                            " (generator, examples)")
    return Tasks(family, named, seed, vocabulary)
