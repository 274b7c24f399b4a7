"""A commit as a checkpoint of Hugging Face (safetensors, in shards); one file is in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage, decode_json, get_or_none
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.commit_source import CommitSource
from picotron_ray.checkpoint.store.import_commit import find, weights_only
from picotron_ray.checkpoint.store.manifest import Manifest
from picotron_ray.config.resume import changes, show, verdict
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError, CorruptError, NotFoundError, StorageError
from picotron_ray.layout.shards import Shard
from picotron_ray.models.families.registry import finetuned_table, is_adapter
from picotron_ray.models.huggingface import names as hf
from picotron_ray.runtime.run_storage import hf_assets
from picotron_ray.runtime.run_storage.commit_weights import stored_names
from picotron_ray.runtime.run_storage.hf_assets import IMPORTED
from picotron_ray.runtime.run_storage.hf_files import INDEX, SINGLE, safetensors
from picotron_ray.runtime.run_storage.peft_export import layers_in_peft, merged, write_adapter
from picotron_ray.runtime.run_storage.tokenizer_record import load_tokenizer


def export_hf(
    job: JobConfig,
    folder: Path,
    step: int | None,
    dtype: str,
    shard_bytes: int,
    weights: str = "trained",
    *,
    adapter: bool = False,
) -> dict[str, Any]:
    """Write a commit as a checkpoint that transformers loads, what LoRA trained added to the weights.

    Args:
        step: of the commit; None: the newest.
        dtype: ``float32`` or ``bfloat16``.
        shard_bytes: most tensor bytes per file (a larger tensor has a file of its own).
        weights: ``trained``, or ``ema``: their moving average (what no gradient moves has none).
        adapter: write LoRA's matrices alone, as PEFT loads them.

    Raises:
        ConfigError: the folder is not empty, there is no such commit, it has no averages, or transformers has
            no such model.
        CorruptError: the commit does not verify.
    """
    hf.architecture_of(job.model)
    if adapter:
        layers_in_peft(job)
    safetensors()
    _check_target(folder)
    storage = open_storage(job.storage, job.name)
    try:
        found = find(storage, step, verify=False)
    except NotFoundError as error:
        raise ConfigError(f"{error}; check name and storage.url") from error
    _check_same_model(job, found.manifest, storage)
    stored = stored_names(finetuned_table(job.model), found.manifest, weights)
    kept = hf_assets.load(storage)
    if adapter and len(_adapters(found.manifest, stored)) < sum(map(is_adapter, stored)):
        raise ConfigError(
            f"--step: the commit of step {found.manifest.step} is what was imported, and has no adapters yet;"
            " take a later one"
        )
    tokenizer = load_tokenizer(storage)
    end = job.data.document_end if tokenizer is None else tokenizer.end
    config = hf.hf_config(job.model, job.data.sequence_length, dtype, kept.config if kept else None, end)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--to: {folder} cannot be made: {error}; name another folder") from error
    try:
        if adapter:
            written = _write_adapter(job, folder, found.manifest, storage, dtype, kept, stored)
        else:
            written = _write_files(folder, _tensors(job, found.manifest, storage, dtype, stored), shard_bytes)
            hf_assets.write(folder, kept, tokenizer.files if tokenizer else None)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except (OSError, safetensors().SafetensorError) as error:
        raise StorageError(f"{folder}: cannot be written: {error}; what is there is incomplete") from error
    done = {"run": job.name, "step": found.manifest.step, "folder": str(folder), "files": written}
    return done if tokenizer is None else {**done, "tokenizer": tokenizer.digest}


def _check_target(folder: Path) -> None:
    """Check that an export may be written there. Raises ConfigError."""
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--to: saw the file {folder}, expected a new or empty folder")
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder}: saw files there, expected a new or empty folder")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--to: {folder} cannot be used: {error}; name another folder") from error


def _check_same_model(job: JobConfig, manifest: Manifest, storage: Storage) -> None:
    """Check that the config's model is the one that the run was trained with, in every key.

    Shapes alone do not say it: how many heads there are, or how positions are turned, leaves no trace.
    """
    saved = get_or_none(storage, "run.json")
    if saved is None:
        raise ConfigError(f"{storage.where}: run.json is missing, which says what model the run is of")
    before = decode_json("run.json", saved).get("config")
    if not isinstance(before, dict):
        raise CorruptError(f"{storage.where}: run.json holds no config", where="run.json")
    problems = [
        f"{key}: saw {show(now)}, expected {show(was)}, as run {job.name!r} was trained; give its config"
        for key, was, now in changes(before, job)
        if key.startswith("model.") and verdict(key) == "refuse"
    ]
    if problems:
        raise ConfigError(*problems)
    stored = {name: parts[0].shard.global_shape for name, parts in manifest.tensors().items()}
    for spec in finetuned_table(job.model):
        if weights_only(manifest) and is_adapter(spec.name) and spec.name not in stored:
            continue  # an import: no step has been trained
        if stored.get(spec.name) != spec.shape:
            raise CorruptError(
                f"{storage.where}: {spec.name}: saw shape {stored.get(spec.name)}, expected {spec.shape}, as"
                " run.json's model has it"
            )


def _tensors(
    job: JobConfig, manifest: Manifest, storage: Storage, dtype: str, stored: Mapping[str, str]
) -> Iterator[tuple[str, Any]]:
    """Name and tensor, in Hugging Face's terms."""
    import torch

    shards: dict[str, Shard] = {name: parts[0].shard for name, parts in manifest.tensors().items()}
    adapters = _adapters(manifest, stored)
    for held in hf.tensors(job.model, hf.architecture_of(job.model)):
        ours = _values({name: shards[stored[name]] for name in held.ours}, storage, manifest)
        stems = {name.removesuffix(".weight") for name in held.ours}
        added = {name: shard for name, shard in adapters.items() if name.rpartition(".")[0] in stems}
        if added:
            ours = merged(job, ours, _values(added, storage, manifest))
        parts = [ours[name].to(getattr(torch, dtype)) for name in held.ours]
        if held.in_turns:
            whole = torch.stack(parts, dim=2).flatten(1, 2)
        else:
            whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        if held.rows is not None:
            whole = torch.empty_like(whole).index_copy_(0, torch.tensor(held.rows), whole)
        whole = whole.transpose(-1, -2) if held.transposed and whole.dim() > 1 else whole
        for name, part in zip(held.theirs, whole if held.stacked else [whole], strict=True):
            yield name, part.contiguous()


def _adapters(manifest: Manifest, stored: Mapping[str, str]) -> dict[str, Shard]:
    """One stored shard of every matrix of LoRA, by the parameter's name; none of an import."""
    there, names = manifest.tensors(), filter(is_adapter, stored)
    return {name: there[stored[name]][0].shard for name in names if stored[name] in there}


def _values(shards: Mapping[str, Shard], storage: Storage, manifest: Manifest) -> dict[str, Any]:
    """Whole tensors by the names that shards have here, which may not be those that they are stored by."""
    from picotron_ray.checkpoint.torch_state import uncut

    found = uncut(shards.values(), CommitSource(storage, manifest))
    return {name: found[shard.name] for name, shard in shards.items()}


def _write_adapter(
    job: JobConfig,
    folder: Path,
    manifest: Manifest,
    storage: Storage,
    dtype: str,
    kept: hf_assets.HfAssets | None,
    stored: Mapping[str, str],
) -> int:
    """Write PEFT's files; returns how many hold tensors."""
    import torch

    found = _values(_adapters(manifest, stored), storage, manifest)
    values = {name: tensor.to(getattr(torch, dtype)) for name, tensor in found.items()}
    base = kept.origin.removeprefix(IMPORTED) if kept else None
    write_adapter(job, folder, values, base, transposed=job.model.family == "gpt2")
    return 1


def _write_files(folder: Path, tensors: Iterator[tuple[str, Any]], shard_bytes: int) -> int:
    """Write numbered files as they fill, then name them all; returns how many there are."""
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
