"""Ray Train's ``Result``, filled from the run's storage, as ``ElasticTrainer.fit`` returns it.

Nothing is copied: a checkpoint is a commit of the run where it lies. Its directory is the run's folder, since
commits share chunks; ``CommitCheckpoint.tensors`` reads the uncut, unfused tensors of that commit alone,
every one checked against its digest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import pandas
import pyarrow.fs
from ray.train import Checkpoint
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError
from ray.train.v2.api.result import Result

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.lineage import newest_commit
from picotron_ray.checkpoint.store.manifest import committed_manifest
from picotron_ray.checkpoint.store.run_log import Entry, RunLog
from picotron_ray.checkpoint.store.verify import stream_ledger
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import FencedError, PicotronError, StorageError

if TYPE_CHECKING:
    import torch


def filesystem_of(storage: StorageConfig) -> tuple[pyarrow.fs.FileSystem, str]:
    """Arrow's view of ``storage.url`` and the path in it; credentials from the environment, as boto3 does."""
    if not storage.url.startswith("s3://"):
        return pyarrow.fs.LocalFileSystem(), str(Path(storage.url.removeprefix("file://")).absolute())
    options: dict[str, Any] = {"region": storage.region} if storage.region else {}
    if storage.endpoint_url:
        parts = urlsplit(storage.endpoint_url)
        options |= {"scheme": parts.scheme, "endpoint_override": parts.netloc}
        options["force_virtual_addressing"] = not storage.path_style
    return pyarrow.fs.S3FileSystem(**options), storage.url.removeprefix("s3://").strip("/")


class CommitCheckpoint(Checkpoint):
    """One commit of a run; ``step`` says which. It cannot be changed.

    ``as_directory`` and ``to_directory`` give the run's folder (config, log, manifests, chunks), which can
    serve as another run's ``storage.url``; ``tensors`` gives the commit's contents.
    """

    def __init__(self, storage: StorageConfig, run: str, commit: dict[str, Any]) -> None:
        filesystem, path = filesystem_of(storage)
        super().__init__(f"{path}/{run}", filesystem)
        self._storage, self._run, self._commit = storage, run, commit

    @property
    def step(self) -> int:
        """Optimizer steps that went into it."""
        return int(self._commit["step"])

    def get_metadata(self) -> dict[str, Any]:
        return {"run": self._run, **{key: self._commit[key] for key in ("step", "manifest", "digest")}}

    def set_metadata(self, metadata: dict[str, Any]) -> NoReturn:
        raise PicotronError(f"checkpoint of step {self.step}: a commit is immutable; keep metadata elsewhere")

    def update_metadata(self, metadata: dict[str, Any]) -> NoReturn:
        self.set_metadata(metadata)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights by their name in the uncut model, on the CPU, with moments and averages beside them.

        A moment is ``exp_avg/<name>``, an average of weights ``ema/<name>``.

        Raises:
            CorruptError: the manifest or a chunk does not match its digest.
            StorageError: it is gone, as after ``checkpoint.keep_last`` newer commits.
        """
        from picotron_ray.checkpoint.store.commit_source import CommitSource
        from picotron_ray.checkpoint.torch_state import uncut

        storage = open_storage(self._storage, self._run)
        manifest = committed_manifest(storage, self._commit)
        shards = {stored.shard.name: stored.shard for stored in manifest.shards}
        return uncut(shards.values(), CommitSource(storage, manifest))


def result_of(job: JobConfig, summary: dict[str, Any]) -> Result:
    """The run as Ray's ``Result``: ``metrics`` is its summary, with ``loss`` and ``step`` as short names.

    ``metrics_dataframe`` and ``best_checkpoints`` have a row per commit that is kept, oldest first.
    """
    storage = open_storage(job.storage, job.name)
    log = RunLog(storage)
    log.refresh()
    commits = log.commits()
    newest = newest_commit(log)
    rows = _rows(storage, commits, newest)
    found: list[tuple[Checkpoint, dict[str, Any]]] = [
        (CommitCheckpoint(job.storage, job.name, entry.body), row)
        for entry, row in zip(commits, rows, strict=True)
    ]
    filesystem, path = filesystem_of(job.storage)
    return Result(
        metrics={**summary, "loss": summary.get("final_loss"), "step": summary["steps"]},
        checkpoint=CommitCheckpoint(job.storage, job.name, newest.body) if newest else None,
        error=_error(summary),
        path=f"{path}/{job.name}",
        metrics_dataframe=pandas.DataFrame(rows) if rows else None,
        best_checkpoints=found,
        _storage_filesystem=filesystem,
    )


def _rows(storage: Storage, commits: list[Entry], newest: Entry | None) -> list[dict[str, Any]]:
    """Figures of each commit's step, from the ledger of the one on which the run stands."""
    manifest = committed_manifest(storage, newest.body) if newest else None
    steps = [int(entry.body["step"]) for entry in commits]
    every = map(json.loads, stream_ledger(storage, manifest) if manifest else ())
    wanted = frozenset(steps)
    lines = {line["step"]: line for line in every if line["step"] in wanted}
    absent: dict[str, Any] = {}  # of a commit that a later one, resumed from before it, left behind
    return [
        {"step": step, **{key: lines.get(step, absent).get(key) for key in ("loss", "tokens")}}
        for step in steps
    ]


def _error(summary: dict[str, Any]) -> TrainingFailedError | None:
    status, detail = summary["status"], summary.get("detail", "")
    if status == "storage":
        return ControllerError(StorageError(detail))
    if status == "fenced":
        return ControllerError(FencedError(detail))
    return WorkerGroupError(detail, {}) if status == "failed" else None
