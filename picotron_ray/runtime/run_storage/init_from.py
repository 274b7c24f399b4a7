"""``init_from``: finding the other run's commit, and whether this run can start from it.

Settled once, at the first launch: the step that was taken, and the digest of its manifest, go into
run.json, and every later launch means exactly that commit, however far the other run has got meanwhile.
"""

from __future__ import annotations

from typing import Any

from picotron_ray.checkpoint.storage.base import Storage, get_json
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store import import_commit
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.export import flatten, public_dict
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError, CorruptError, NotFoundError, StorageError
from picotron_ray.runtime.run_storage.hf_assets import load, source_note

FREE = frozenset({"model.init_std", "model.freeze"})
"""Keys of the model that a commit's weights do not depend on."""
ADAPTERS = "model.lora."


def open_origin(job: JobConfig) -> Storage:
    """The storage of the run that ``init_from`` names."""
    assert job.init_from.run is not None
    url = job.init_from.url or job.storage.url
    return open_storage(job.storage.model_copy(update={"url": url}), job.init_from.run)


def find_start(
    job: JobConfig, storage: Storage, verify: bool = False
) -> tuple[int | None, dict[str, Any] | None]:
    """The step of ``init_from`` that the run means, and the commit's record for a new run's run.json.

    A run that exists keeps the step that its run.json holds; the record is then None.

    Args:
        verify: read the whole commit; without it, what is damaged is found when it is taken over.

    Raises:
        ConfigError: there is no such run or step, it does not verify, or its model is another one.
    """
    try:
        saved = get_json(storage, "run.json")["config"].get("init_from") or {}
    except NotFoundError:
        found = _find(job, verify)
        return found.manifest.step, found.origin()
    if job.init_from.step is None and saved.get("run") == job.init_from.run:
        return saved["step"], None
    return job.init_from.step, None


def imported_note(job: JobConfig, storage: Storage) -> str | None:
    """Warning about a run whose weights come from Hugging Face, or about the one that it starts from.

    Raises ConfigError where the data is not of their tokenizer, or the import was cut off before its commit:
    the run would begin with random weights.
    """
    found, other = load(storage), job.init_from.run
    if found is None and other is not None:
        found = load(open_origin(job))
    elif found is not None and other is None:
        log = RunLog(storage)
        log.refresh()
        if not log.commits():
            raise ConfigError(
                f"name: the import into run {job.name!r} in {storage.where} was cut off, there is no commit;"
                " import again under another name"
            )
    return source_note(job, found)


def _find(job: JobConfig, verify: bool) -> import_commit.FoundCommit:
    source = open_origin(job)
    try:
        theirs = get_json(source, "run.json")["config"]
        _refuse_other_model(job, theirs)
        found = import_commit.find(source, job.init_from.step, verify)
    except NotFoundError as error:
        raise ConfigError(f"init_from: {error}; check init_from.run, .url and .step") from error
    except CorruptError as error:
        raise ConfigError(f"init_from: {error}; choose another init_from.step") from error
    except StorageError as error:
        raise ConfigError(f"init_from: {error}") from error
    if job.init_from.optimizer_state and import_commit.weights_only(found.manifest):
        raise ConfigError(
            f"init_from.optimizer_state: saw true, but the commit of step {found.manifest.step} of run"
            f" {job.init_from.run!r} holds weights alone; leave it out, or take a later step"
        )
    return found


def compatible_precision(was: str, now: str, optimizer_state: bool) -> bool:
    """True where a run of one precision can start from another's state: all but fp64 keep fp32 masters.

    fp16 has a loss scale in its optimizer state, which the others do not. ``auto`` is judged once settled.
    """
    if now == "auto":
        return was != "fp64"
    return "fp64" not in (was, now) and not (optimizer_state and "fp16" in (was, now))


def _refuse_other_model(job: JobConfig, theirs: dict[str, Any]) -> None:
    before = flatten({key: theirs.get(key) for key in ("model", "precision", "optimizer")})
    defaults = flatten(public_dict(JobConfig()))
    problems = []
    for key, value in flatten(public_dict(job)).items():
        needed = key.startswith("model.") or key == "precision"
        needed |= key == "optimizer.name" and job.init_from.optimizer_state
        was = before.get(key, defaults.get(key))
        same = key == "precision" and compatible_precision(
            str(was), str(value), job.init_from.optimizer_state
        )
        free = key in FREE or (key.startswith(ADAPTERS) and not before.get(f"{ADAPTERS}rank"))
        free &= not job.init_from.optimizer_state or key == "model.init_std"  # moments are of what trains
        if needed and not free and was != value and not same:
            problems.append(
                f"{key}: run {job.init_from.run!r} in init_from has {was!r}, saw {value!r}; make them equal"
            )
    if problems:
        raise ConfigError(*problems)
