"""Checkpoints in Hugging Face's format (safetensors, in shards) into a run's storage, and out of it.

Both stream: an import has one tensor of ours in memory at a time, an export one file. Everything is checked
before the first byte is written: the config, and the name, shape and type of every tensor, from the headers
of the files alone.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from picotron_ray.checkpoint.adopt import find
from picotron_ray.checkpoint.canonical import Shard
from picotron_ray.checkpoint.commit_source import CommitSource
from picotron_ray.checkpoint.manifest import Manifest
from picotron_ray.checkpoint.storage import Storage, open_storage
from picotron_ray.checkpoint.whole import commit_whole
from picotron_ray.config.export import flatten
from picotron_ray.config.job import JobConfig
from picotron_ray.config.layout import Layout
from picotron_ray.config.model import ModelConfig
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Source
from picotron_ray.errors import ConfigError, NotFoundError
from picotron_ray.models import hf
from picotron_ray.models.hf_gpt2 import Held
from picotron_ray.models.plan import parameter_table
from picotron_ray.runtime.archive import generation_body
from picotron_ray.runtime.run import saved_config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = {"F64", "F32", "F16", "BF16"}


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise ConfigError(
            "safetensors is not installed; pip install 'picotron-ray[hf]' for checkpoints of Hugging Face"
        ) from error
    return safetensors


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint. Raises ConfigError where it is missing or no JSON object."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder}: expected a folder with config.json and safetensors files: {error}"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{folder}/config.json: saw a {type(found).__name__}, expected an object")
    return found


def model_section(folder: Path) -> dict[str, Any]:
    """The ``model`` section of a config that takes this checkpoint. Raises ConfigError."""
    return hf.model_keys(read_config(folder))


# --- import ----------------------------------------------------------------------------------------------


class Files:
    """The tensors of a checkpoint, read one by one.

    Raises ConfigError where a file is missing or no safetensors file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._open = folder, _safetensors().safe_open
        index = folder / INDEX
        names = (
            sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [SINGLE]
        )
        self._where: dict[str, str] = {}
        for name in names:
            if not (folder / name).exists():
                raise ConfigError(f"{folder}: {name} is missing; expected safetensors files")
            with self._file(name) as file:
                self._where.update(dict.fromkeys(file.keys(), name))

    def _file(self, name: str) -> Any:
        try:
            return self._open(str(self._folder / name), framework="pt")
        except Exception as error:
            raise ConfigError(f"{self._folder / name}: is no safetensors file: {error}") from error

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and type of a tensor, from its file's header."""
        with self._file(self._where[name]) as file:
            part = file.get_slice(name)
            return tuple(part.get_shape()), str(part.get_dtype())

    def read(self, name: str, dtype: str) -> np.ndarray[Any, Any]:
        import torch

        with self._file(self._where[name]) as file:
            found: np.ndarray[Any, Any] = file.get_tensor(name).to(getattr(torch, dtype)).numpy()
            return found


def master_type(job: JobConfig) -> str:
    """Type in which a run of this config keeps its weights."""
    return "float64" if job.precision == "fp64" else "float32"


def check_import(job: JobConfig, folder: Path) -> Files:
    """Everything that can be wrong with an import, before anything is written.

    Raises ConfigError: one line per key of the model that differs, or per tensor that is missing, of another
    shape or type, or not expected.
    """
    config = read_config(folder)
    wanted = ModelConfig.model_validate(hf.model_keys(config))
    _same_model(job.model, wanted)
    files, problems = Files(folder), []
    expected: set[str] = set()
    shapes = {spec.name: spec.shape for spec in parameter_table(job.model)}
    for held in hf.tensors(job.model, config["architectures"][0], files.names):
        shape = _their_shape(held, shapes)
        for name in held.theirs:
            expected.add(name)
            if name not in files.names:
                problems.append(f"{folder}: tensor {name} is missing")
                continue
            found, dtype = files.describe(name)
            if found != shape:
                problems.append(f"{folder}: {name}: saw shape {list(found)}, expected {list(shape)}")
            if dtype not in _FLOATS:
                problems.append(f"{folder}: {name}: saw type {dtype}, expected one of {sorted(_FLOATS)}")
    extra = sorted(files.names - expected - hf.ignored(job.model, files.names))
    problems += [f"{folder}: tensor {name} is not of this model" for name in extra]
    if problems:
        raise ConfigError(*problems[:20])
    return files


def _their_shape(held: Held, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Shape that a tensor of the checkpoint must have."""
    first, *rest = shapes[held.ours[0]]
    if held.stacked:
        return tuple(rest)
    joined = (sum(shapes[name][0] for name in held.ours), *rest) if len(held.ours) > 1 else (first, *rest)
    return joined[::-1] if held.transposed else joined


def _same_model(ours: ModelConfig, theirs: ModelConfig) -> None:
    """Whether the job's model is the checkpoint's; what only concerns training may differ."""
    free = ("init_std", "moe.loss_coefficient", "moe.z_coefficient", "moe.capacity_factor", "plan", "built")
    mine, wanted = flatten(ours.model_dump(mode="json")), flatten(theirs.model_dump(mode="json"))
    idle = {"intermediate_size"} if ours.moe.experts else set()
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
    files = check_import(job, folder)
    storage = open_storage(job.storage, job.name)
    if any(storage.list("log/")):
        raise ConfigError(f"name: run {job.name!r} exists in {storage.where}; choose another name")
    origin = {"from": f"Hugging Face checkpoint {folder.resolve()}", "step": 0, "manifest": "", "digest": ""}

    def generation(term: int) -> dict[str, Any]:
        return generation_body(
            GenerationSpec(GenerationId(term, 0), (), Layout(), Source("init"), str(origin["from"]))
        )

    key = commit_whole(
        storage,
        _read(job, files, read_config(folder)["architectures"][0]),
        origin,
        generation=generation,
        owner=f"{socket.gethostname()}:{os.getpid()}:import",
        codec=job.checkpoint.codec,
    )
    storage.put_if_absent("run.json", json.dumps(saved_config(job), indent=1).encode())
    return {"run": job.name, "step": 0, "manifest": key, "tensors": len(parameter_table(job.model))}


def _read(job: JobConfig, files: Files, architecture: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    dtype = master_type(job)
    shapes = {spec.name: spec.shape for spec in parameter_table(job.model)}
    for held in hf.tensors(job.model, architecture, files.names):
        parts = [files.read(name, dtype) for name in held.theirs]
        whole = np.stack(parts) if held.stacked else parts[0]
        whole = whole.T if held.transposed else whole
        ends = np.cumsum([shapes[name][0] for name in held.ours])
        yield from zip(held.ours, np.split(whole, ends[:-1]), strict=True)


# --- export ----------------------------------------------------------------------------------------------


def export_hf(job: JobConfig, folder: Path, step: int | None, dtype: str, shard_bytes: int) -> dict[str, Any]:
    """Write a commit as a checkpoint that transformers loads.

    Args:
        step: of the commit; None: the newest.
        dtype: ``float32`` or ``bfloat16``.
        shard_bytes: most tensor bytes per file (a larger tensor has a file of its own).

    Raises:
        ConfigError: the folder is not empty, there is no such commit, or transformers has no such model.
        CorruptError: the commit does not verify.
    """
    config = hf.hf_config(job.model, job.data.sequence_length, dtype)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: saw files there, expected a new or empty folder")
    storage = open_storage(job.storage, job.name)
    try:
        found = find(storage, step, verify=False)
    except NotFoundError as error:
        raise ConfigError(f"{error}; check name and storage.url") from error
    _same_tensors(job.model, found.manifest, storage)
    folder.mkdir(parents=True, exist_ok=True)
    written = _write_files(folder, _tensors(job, found.manifest, storage, dtype), shard_bytes)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return {"run": job.name, "step": found.manifest.step, "folder": str(folder), "files": written}


def _same_tensors(model: ModelConfig, manifest: Manifest, storage: Storage) -> None:
    stored = {name: parts[0].shard.global_shape for name, parts in manifest.tensors().items()}
    for spec in parameter_table(model):
        if stored.get(spec.name) != spec.shape:
            raise ConfigError(
                f"model: {storage.where} holds {spec.name} as {stored.get(spec.name)}, expected {spec.shape};"
                " give the config that the run was trained with"
            )


def _tensors(job: JobConfig, manifest: Manifest, storage: Storage, dtype: str) -> Iterator[tuple[str, Any]]:
    """Name and tensor, in Hugging Face's terms."""
    import torch

    from picotron_ray.checkpoint.dcp import uncut

    shards: dict[str, Shard] = {name: parts[0].shard for name, parts in manifest.tensors().items()}
    for held in hf.tensors(job.model, hf.architecture_of(job.model)):
        ours = uncut([shards[name] for name in held.ours], CommitSource(storage, manifest))
        parts = [ours[name].to(getattr(torch, dtype)) for name in held.ours]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        whole = whole.T if held.transposed else whole
        for name, part in zip(held.theirs, whole if held.stacked else [whole], strict=True):
            yield name, part.contiguous()


def _write_files(folder: Path, tensors: Iterator[tuple[str, Any]], shard_bytes: int) -> int:
    """Write numbered files as they fill, then name them all; returns how many there are."""
    _safetensors()
    from safetensors.torch import save_file

    places: dict[str, int] = {}
    waiting: dict[str, Any] = {}
    files = total = held = 0

    def close() -> None:
        nonlocal files, held
        files += 1
        save_file(waiting, str(folder / f"part-{files}"), metadata={"format": "pt"})
        places.update(dict.fromkeys(waiting, files))
        waiting.clear()
        held = 0

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if waiting and held + size > shard_bytes:
            close()
        waiting[name] = tensor
        held, total = held + size, total + size
    close()
    names = _rename(folder, files)
    if files > 1:
        weight_map = {name: names[number] for name, number in places.items()}
        index: Mapping[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return files


def _rename(folder: Path, files: int) -> dict[int, str]:
    """Names that transformers looks for, by number; the total is known only at the end."""
    names = {
        number: SINGLE if files == 1 else f"model-{number:05d}-of-{files:05d}.safetensors"
        for number in range(1, files + 1)
    }
    for number, name in names.items():
        (folder / f"part-{number}").rename(folder / name)
    return names
