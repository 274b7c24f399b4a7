"""Import of checkpoints in Hugging Face's format (safetensors, in shards) into a run's storage.

It streams: one tensor of ours is in memory at a time. Everything is checked before the first byte is
written: the config, the tokenizer, and the name, shape and type of every tensor from the headers of the
files; then the tensors are read once to see that they are finite, and once more to be stored.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.import_tensors import commit_tensors
from picotron_ray.config.export import flatten
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.validation import model as model_rules
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Source
from picotron_ray.errors import AlreadyExistsError, ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.registry import parameter_table
from picotron_ray.models.huggingface import names
from picotron_ray.models.huggingface.config import architecture_in, model_keys
from picotron_ray.models.huggingface.mapping import Held
from picotron_ray.runtime.run_storage import hf_assets
from picotron_ray.runtime.run_storage.generation_entries import generation_body
from picotron_ray.runtime.run_storage.hf_arrays import ours_of, their_shapes, unpacked
from picotron_ray.runtime.run_storage.hf_files import Files, read_config
from picotron_ray.runtime.run_storage.run_json import saved_config

_FLOATS, _BYTES = {"F64", "F32", "F16", "BF16"}, {"U8"}


def model_section(folder: Path) -> dict[str, Any]:
    """The ``model`` section of a config that takes this checkpoint. Raises ConfigError."""
    keys = model_keys(read_config(folder))
    _built(keys)
    return keys


def _built(keys: dict[str, Any]) -> ModelConfig:
    """A model of these keys, checked as one of a config would be. Raises ConfigError."""
    try:
        model = ModelConfig.model_validate(keys)
    except ValidationError as error:
        places = [(".".join(map(str, part["loc"])), part) for part in error.errors(include_url=False)]
        raise ConfigError(
            *(f"config.json: model.{key}: saw {part['input']!r:.60}, {part['msg']}" for key, part in places)
        ) from error
    job = JobConfig(model=model, data=DataConfig(source="memmap", path="none", sequence_length=1))
    problems = [problem for rule in model_rules.RULES for problem in rule(job)]
    if problems:
        raise ConfigError(*(f"config.json: {problem.key}: {problem.text}" for problem in problems))
    return model


def master_type(job: JobConfig) -> str:
    """Type in which a run of this config keeps its weights."""
    return "float64" if job.precision == "fp64" else "float32"


def check_import(job: JobConfig, folder: Path) -> Files:
    """Check everything that can be wrong with an import, before anything is written.

    Raises ConfigError: one line per key of the model that differs, or per tensor that is missing, of another
    shape or type, or not expected.
    """
    config = read_config(folder)
    _same_model(job.model, _built(model_keys(config)))
    files, problems = Files(folder), []
    expected: set[str] = set()
    shapes = {spec.name: spec.shape for spec in parameter_table(job.model)}
    for held in names.tensors(job.model, architecture_in(config), files.names):
        allowed = _BYTES if held.packed else _FLOATS
        for name, shape in zip(held.theirs, their_shapes(held, shapes), strict=True):
            expected.add(name)
            if name not in files.names:
                problems.append(f"{folder}: tensor {name} is missing")
                continue
            found, dtype = files.describe(name)
            if found != shape:
                problems.append(f"{folder}: {name}: saw shape {list(found)}, expected {list(shape)}")
            if dtype not in allowed:
                problems.append(f"{folder}: {name}: saw type {dtype}, expected one of {sorted(allowed)}")
    extra = sorted(files.names - expected - names.ignored(job.model, files.names))
    problems += [f"{folder}: tensor {name} is not of this model" for name in extra]
    if problems:
        raise ConfigError(*problems[:20])
    return files


def _same_model(ours: ModelConfig, theirs: ModelConfig) -> None:
    """Check that the job's model is the checkpoint's; keys that only concern training may differ."""
    of_mixtures = ("moe.loss_coefficient", "moe.z_coefficient", "moe.capacity_factor")
    free = ("init_std", *of_mixtures, "freeze", "lora", "plan", "built")
    mine, wanted = flatten(ours.model_dump(mode="json")), flatten(theirs.model_dump(mode="json"))
    idle = {"intermediate_size"} if ours.moe.experts and not ours.moe.first_dense_layers else set()
    problems = [
        f"model.{key}: saw {mine.get(key)}, expected {value}, as the checkpoint's config.json says"
        for key, value in wanted.items()
        if mine.get(key) != value and key not in idle and not key.startswith(free)
    ]
    if problems:
        raise ConfigError(*problems)


def import_hf(job: JobConfig, folder: Path) -> dict[str, Any]:
    """Make a checkpoint step 0 of the run that ``job`` names; training then starts from it.

    Raises:
        ConfigError: see `check_import`, or the run exists.
        StorageError: the storage refused.
    """
    if job.precision == "auto":
        raise ConfigError("precision: saw auto, which is settled by a run's workers; name it for an import")
    files, config = check_import(job, folder), read_config(folder)
    architecture = architecture_in(config)
    text = f"{hf_assets.IMPORTED}{folder.resolve()}"
    kept = hf_assets.read(folder, text, config, job.model.vocab_size)
    note = hf_assets.source_note(job, kept)
    storage = open_storage(job.storage, job.name)
    if any(storage.list("log/")):
        raise ConfigError(f"name: run {job.name!r} exists in {storage.where}; choose another name")
    _refuse_unfinite(job, files, architecture)
    origin = {"from": text, "step": 0, "manifest": "", "digest": ""}

    def generation(term: int) -> dict[str, Any]:
        return generation_body(GenerationSpec(GenerationId(term, 0), (), Layout(), Source("init"), text))

    hf_assets.store(storage, kept)
    try:
        storage.put_if_absent("run.json", json.dumps(saved_config(job), indent=1).encode())
    except AlreadyExistsError as error:
        raise ConfigError(
            f"name: {storage.where} holds another run.json for {job.name!r}; choose another name"
        ) from error
    key = commit_tensors(
        storage,
        _read(job, files, architecture),
        origin,
        generation=generation,
        owner=f"{socket.gethostname()}:{os.getpid()}:import",
        codec=job.checkpoint.codec,
    )
    found = {"run": job.name, "step": 0, "manifest": key, "tensors": len(parameter_table(job.model))}
    return {**found, **({"note": note} if note else {})}


def _refuse_unfinite(job: JobConfig, files: Files, architecture: str) -> None:
    """Training from NaN or infinity is lost from its first step; nothing is written before this."""
    dtype = master_type(job)
    for held in names.tensors(job.model, architecture, files.names):
        for name, values in _values(held, files, dtype):
            if not np.isfinite(values).all():
                raise ConfigError(
                    f"tensor {name}: saw NaN or infinite values as {dtype}, expected finite ones; the"
                    " checkpoint is damaged, or its values are beyond that type"
                )


def _read(job: JobConfig, files: Files, architecture: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    dtype = master_type(job)
    shapes = {spec.name: spec.shape for spec in parameter_table(job.model)}
    for held in names.tensors(job.model, architecture, files.names):
        parts = [values for _, values in _values(held, files, dtype)]
        yield from zip(held.ours, ours_of(held, parts, shapes), strict=True)


def _values(held: Held, files: Files, dtype: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Tensors of a checkpoint by name, in ``dtype``; of packed ones what they stand for, by the first's."""
    if held.packed:
        blocks, scales = (files.read(name, "uint8") for name in held.theirs)
        yield held.theirs[0], unpacked(blocks, scales, dtype)
        return
    for name in held.theirs:
        yield name, files.read(name, dtype)
