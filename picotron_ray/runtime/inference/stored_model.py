"""A commit's weights as one module in this process: no cluster, no process group.

The run's newest launch says which model it is. Adapters of LoRA are added to the weights. A mixture of
experts drops nothing here: capacity counts rows of training's length, and a short row would lose most of its
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import ValidationError

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.store.commit_source import CommitSource
from picotron_ray.checkpoint.store.lineage import newest_commit
from picotron_ray.checkpoint.store.manifest import Manifest, committed_manifest
from picotron_ray.checkpoint.store.run_log import Entry, RunLog
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import LoraConfig, ModelConfig
from picotron_ray.errors import ConfigError, CorruptError
from picotron_ray.layout.shards import Shard, whole
from picotron_ray.models.families.registry import finetuned_table, is_adapter
from picotron_ray.planner.model_sizes import stage_bounds
from picotron_ray.runtime.driver.find_stored import find_storage
from picotron_ray.runtime.run_storage.commit_weights import TRAINED, stored_names
from picotron_ray.runtime.run_storage.run_json import newest_config

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class CommittedModel:
    """A commit whose weights can be loaded.

    Fields:
        job: as the run's newest launch had it.
        step: of the commit.
        names: stored tensor of each parameter that the commit holds, adapters included.
    """

    job: JobConfig
    storage: Storage
    manifest: Manifest
    names: Mapping[str, str]

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def positions(self) -> int:
        """Tokens that the model sees at once: those that it learned positions of, else those of a sample."""
        return self.job.model.max_positions or self.job.data.sequence_length


def find_model(word: str, step: int | None = None, weights: str = TRAINED) -> CommittedModel:
    """Find a commit of a run; nothing but its manifest is read.

    Args:
        word: as for `find_storage`: the run's name, its address, or its config.
        step: of the commit; None: the newest.
        weights: ``trained``, or ``ema``: their moving average.

    Raises:
        ConfigError: there is no such run or commit, or it has no averages.
        CorruptError: the manifest is damaged, or of another model.
    """
    name, storage = find_storage(word)
    job = job_of_run(name, storage)
    log = RunLog(storage)
    log.refresh()
    manifest = committed_manifest(storage, _commit(name, log, step).body)
    table = finetuned_table(job.model)
    stored = stored_names(table, manifest, weights)
    there = manifest.tensors()
    kept = {}
    for spec in table:
        found = there.get(stored[spec.name])
        if found is None and is_adapter(spec.name):
            continue  # an import, of which no step has been trained
        shape = None if found is None else found[0].shard.global_shape
        if shape != spec.shape:
            raise CorruptError(
                f"{storage.where}: {spec.name}: saw shape {shape}, expected {spec.shape}, as the model of the"
                " run's newest launch has it",
                where=manifest.key,
            )
        kept[spec.name] = stored[spec.name]
    return CommittedModel(job, storage, manifest, kept)


def job_of_run(name: str, storage: Storage) -> JobConfig:
    """Return the config of a stored run's newest launch."""
    config = newest_config(storage)
    if config is None:
        raise ConfigError(f"run: {storage.where} holds no run {name!r} (its run.json is missing)")
    try:
        return JobConfig.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"run: {name!r} was launched by a version whose config this one does not read: {key}:"
            f" {first['msg']}; take the version that launched it"
        ) from error


def _commit(name: str, log: RunLog, step: int | None) -> Entry:
    commits = log.commits()
    if step is None:
        found = newest_commit(log) or (commits[-1] if commits else None)
    else:
        found = next((entry for entry in reversed(commits) if entry.body["step"] == step), None)
    if found is None:
        steps = sorted({int(entry.body["step"]) for entry in commits})
        there = f"those of steps {', '.join(map(str, steps))}" if steps else "no commit yet"
        wanted = "a commit" if step is None else f"the commit of step {step}"
        raise ConfigError(f"--step: expected {wanted} of run {name!r}, which has {there}")
    return found


def load_model(found: CommittedModel, device: torch.device) -> nn.Module:
    """Build the whole model with the commit's weights, in the type that they are stored in.

    Returns: a module of tokens ``[batch, seq]`` to logits ``[batch, seq, vocab]``.

    Raises:
        CorruptError: a chunk does not match its digest.
        ConfigError: a module of the user's cannot be built here.
    """
    import torch

    from picotron_ray.checkpoint.torch_state import StateTensor, restore
    from picotron_ray.models.build import definition_of

    config = _for_inference(found.job.model)
    definition = definition_of(config, found.job.seed)
    there = found.manifest.tensors()
    dtype = there[found.names[definition.table[0].name]][0].shard.dtype
    module = definition.stage(stage_bounds(config, 1), 0).to(getattr(torch, dtype))
    definition.materialise(module, device)
    with torch.no_grad():
        state = [
            StateTensor(_whole(there[found.names[name]][0].shard), parameter.data)
            for name, parameter in module.named_parameters()
        ]
        restore(state, CommitSource(found.storage, found.manifest))
        _add_adapters(found, module)
    return module.requires_grad_(False).eval()


def _whole(shard: Shard) -> Shard:
    return replace(shard, box=whole(shard.global_shape))


def _for_inference(model: ModelConfig) -> ModelConfig:
    """The model without adapters, which are added to the weights, and without a capacity of experts."""
    moe = model.moe.model_copy(update={"capacity_factor": None})
    return model.model_copy(update={"lora": LoraConfig(), "moe": moe})


def _add_adapters(found: CommittedModel, module: nn.Module) -> None:
    """Add to each weight what its adapter gives, ``W + alpha / rank · B A``."""
    from picotron_ray.checkpoint.torch_state import uncut
    from picotron_ray.runtime.run_storage.peft_export import merged

    there = found.manifest.tensors()
    names = {name: found.names[name] for name in found.names if is_adapter(name)}
    if not names:
        return
    source = CommitSource(found.storage, found.manifest)
    read = uncut([there[stored][0].shard for stored in names.values()], source)
    values = {name: read[stored] for name, stored in names.items()}
    stems = {name.rpartition(".")[0] for name in values}
    parameters = {n: p for n, p in module.named_parameters() if n.removesuffix(".weight") in stems}
    weights = {name: parameter.data.cpu() for name, parameter in parameters.items()}
    for name, weight in merged(found.job, weights, values).items():
        parameters[name].data.copy_(weight)
