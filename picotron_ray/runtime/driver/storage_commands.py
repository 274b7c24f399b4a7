"""Commands on a run's storage, from outside the run: commits, their soundness, collection, the ledger."""

from __future__ import annotations

import os
import socket
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.best import FIGURES, best_commit
from picotron_ray.checkpoint.store.gc import collect, rewind_reach
from picotron_ray.checkpoint.store.lineage import newest_generation
from picotron_ray.checkpoint.store.manifest import Manifest, committed_manifest
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import latest_good, stream_ledger, verify_all
from picotron_ray.config.resume import check_resume
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.evaluation import EVAL_LOSS
from picotron_ray.coordinator.fenced_end import GARBAGE
from picotron_ray.coordinator.messages import GenerationSpec
from picotron_ray.data.ledger import check
from picotron_ray.data.tasks.open_tasks import open_data
from picotron_ray.errors import ConfigError, CorruptError, DataError, naming
from picotron_ray.runtime.driver.elsewhere import refuse_living
from picotron_ray.runtime.driver.follow_run import find_coordinator
from picotron_ray.runtime.driver.preflight import check_resume_step
from picotron_ray.runtime.driver.resolve_job import (
    INIT_FROM,
    PATHS,
    SAME_RUN,
    STORAGE,
    ResolvedJob,
    resolve,
)
from picotron_ray.runtime.ray_cluster import local_ray
from picotron_ray.runtime.ray_cluster.names import cache_folder
from picotron_ray.runtime.run_storage.data_record import check_data
from picotron_ray.runtime.run_storage.generation_entries import spec_of, step_owed
from picotron_ray.runtime.run_storage.run_json import newest_config


def _open(job: JobConfig, blocks: bool = True) -> tuple[Storage, RunLog]:
    """The run's storage and log; ConfigError where nothing of that run is there."""
    storage = open_storage(job.storage, job.name)
    log = RunLog(storage, blocks=blocks)
    log.refresh()
    if not log.entries() and not log.complaints():
        raise ConfigError(
            f"name: there is no run {job.name!r} in {storage.where}; check name and storage.url"
        )
    return storage, log


def list_commits(job: JobConfig) -> list[dict[str, Any]]:
    """Every commit that is kept, oldest first, with the size of its training state in bytes."""
    storage, log = _open(job)
    rows = []
    metric = job.checkpoint.keep_best or EVAL_LOSS
    newest = newest_generation(log)
    best = best_commit(log, log.commits(), newest, metric) if job.checkpoint.keep_best and newest else None
    for entry in log.commits():
        row = {"seq": entry.seq, "step": entry.body["step"], "generation": _generation(entry.body)}
        row |= {metric: entry.body.get(FIGURES, {}).get(metric), "best": entry is best}
        try:
            manifest = committed_manifest(storage, entry.body)
        except CorruptError as error:
            rows.append({**row, "tensors": 0, "bytes": 0, "chunks": 0, "manifest": str(error)})
            continue
        tensors = {stored.shard.name for stored in manifest.shards}
        size = sum(stored.shard.nbytes for stored in manifest.shards)
        counts = {"tensors": len(tensors), "bytes": size, "chunks": len(manifest.chunks)}
        rows.append({**row, **counts, "manifest": entry.body["manifest"]})
    return rows


def verify_commits(job: JobConfig) -> list[dict[str, Any]]:
    """Every commit, newest first, with what is wrong with it, and the log's own damage."""
    storage, log = _open(job, blocks=False)  # each entry is read where it lies
    rows = [{"step": "-", "generation": "-", "problems": [line]} for line in log.complaints()]
    for report in verify_all(storage, log):
        body = report.entry.body
        problems = list(report.problems)
        rows.append({"step": body["step"], "generation": _generation(body), "problems": problems})
    return rows


def _generation(body: dict[str, Any]) -> str:
    return f"{body['term']}.{body['n']}"


def changed_keys(job: JobConfig) -> list[str]:
    """One line per key in which the stored run of that name differs, as its newest launch had it, or one that
    says that there is no such run.

    Raises:
        ConfigError: one line for each key that may not change, or ``checkpoint.resume_step`` is no commit.
        DataError: the files hold other samples than the run began with.
    """
    with naming(STORAGE.name):
        storage = open_storage(job.storage, job.name)
        saved = newest_config(storage)
    with naming(SAME_RUN.name):
        check_resume_step(job, storage)
    if saved is None:
        return [
            f"no run {job.name!r} is in {storage.where}: a launch begins it; check name and storage.url if it"
            " is to go on"
        ]
    here = resolve(ResolvedJob(job, storage=storage), (PATHS, INIT_FROM)).job
    if not os.path.isabs((saved.get("data") or {}).get("path") or "/"):  # of a Ray job's working_dir
        here = here.model_copy(update={"data": job.data})
    with naming(SAME_RUN.name):
        changed = check_resume(saved, here) or ["nothing changed"]
        return [*changed, *_compared_data(storage, here)]


def _compared_data(storage: Storage, job: JobConfig) -> list[str]:
    """Compare the data with the run's; one line where the files are not to be had here."""
    try:
        data = open_data(job, cache_folder())
    except DataError as error:
        return [f"data: not compared here: {error}"]
    check_data(storage, job.name, data.fingerprint)
    return []


def collect_garbage(job: JobConfig, force: bool = False) -> dict[str, Any]:
    """Collect as the coordinator would; needs a term of its own, so the run must not go on.

    Args:
        force: collect also where storage alone says that the run goes on, which ends it.

    Raises:
        ConfigError: the run goes on (its coordinator collects by itself, and would be fenced off).
    """
    _refuse_running(job.name)
    storage, log = _open(job)
    if not force:
        refuse_living(job.name, storage)
    log.claim_term(f"{socket.gethostname()}:{os.getpid()}{GARBAGE}")
    owed = step_owed(job, log.entries())
    report = collect(storage, log, job.checkpoint, rewind_reach(job), owed_step=owed)
    return {
        "retired": len(report.retired),
        "condemned": report.condemned,
        "deleted": report.deleted,
        "deleted_bytes": report.deleted_bytes,
        "postponed": report.postponed,
        "damaged": list(report.damaged),
    }


def _refuse_running(run: str) -> None:
    local = local_ray.find(run)
    running = local is not None and local.alive
    if os.environ.get("RAY_ADDRESS"):
        from picotron_ray.runtime.ray_cluster import connect

        connect.connect_to(os.environ["RAY_ADDRESS"])
        running = find_coordinator(run) is not None
    if running:
        raise ConfigError(
            f"run {run!r} goes on and collects by itself; stop it first: `picotron-ray stop {run}`"
        )


def newest_good(job: JobConfig) -> tuple[Storage, RunLog, Manifest] | None:
    """Return a run's storage, its log and the manifest of its newest commit that verifies.

    None where nothing is committed. Sizes of its chunks are looked at, not what they hold.
    """
    storage = open_storage(job.storage, job.name)
    log = RunLog(storage)
    log.refresh()
    found = latest_good(storage, log, read_chunks=False) if log.entries() else None
    return None if found is None else (storage, log, found.manifest)


def generation_of(log: RunLog, term: int, n: int) -> GenerationSpec:
    """Return a generation as the log holds it; its entry comes before those of its commits."""
    bodies = [entry.body for entry in log.entries() if entry.kind == "generation"]
    found = next(body for body in bodies if (body["term"], body["n"]) == (term, n))
    return spec_of(found, with_lineage=False)


def verify_ledger(job: JobConfig) -> dict[str, Any]:
    """Recompute every token digest of the newest good commit's ledger from the source data.

    Raises:
        ConfigError: nothing is committed yet. DataError: the source data cannot be read any more, or is
            not what the run began with.
        StorageError: no commit verifies.
    """
    storage, log = _open(job)
    good = latest_good(storage, log)
    if good is None:
        raise ConfigError(f"name: run {job.name!r} has no commit yet, so no ledger to verify")
    data = open_data(job, cache_folder())
    check_data(storage, job.name, data.fingerprint)
    manifest = good.manifest
    report = check(
        stream_ledger(storage, good.manifest),
        data.plan,
        data.train,
        last_step=manifest.step,
        passed=[rewind.passed for rewind in generation_of(log, manifest.term, manifest.n).rewinds],
    )
    return {"commit": good.manifest.step, "complaints": list(good.complaints), **report.to_dict()}
