"""Parts of a bundle: what a run's coordinator, its storage and this machine know of it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import islice
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage, get_bounded, get_json
from picotron_ray.errors import ConfigError, NotFoundError, PicotronError
from picotron_ray.observability.logs.query import Query
from picotron_ray.observability.logs.store import tail
from picotron_ray.observability.nvml import Gpus
from picotron_ray.observability.redaction import HIDDEN, is_secret_name
from picotron_ray.runtime.coordinator.event_log import files
from picotron_ray.runtime.driver import control, ended_run, find_stored, follow_run, run_agents, run_logs
from picotron_ray.runtime.ray_cluster.host_memory import host_bytes
from picotron_ray.runtime.ray_cluster.names import event_folder

NEWEST_ENTRIES = 200
"""Entries of the run's log in storage, and events of the coordinator's log."""
NEWEST_EVENTS = 2000
NEWEST_EVIDENCE = 5
MOST_OBJECTS = 5000
MOST_LINES = 20_000
OBJECT_BYTES = 4 << 20
STACK_BYTES = 64 << 10
ANSWER_S = 15.0
_PACKAGES = (
    *("picotron-ray", "torch", "ray", "numpy", "pydantic", "boto3", "botocore", "pyarrow", "transformers"),
    *("torchao", "flash-attn", "triton", "nvidia-nccl-cu12", "nvidia-ml-py", "psutil", "prometheus-client"),
)
_VARIABLES = (
    *("PICOTRON", "RAY", "CUDA", "NCCL", "GLOO", "TORCH", "PYTORCH", "TRITON", "OMP", "MKL", "NVIDIA", "AWS"),
    *(
        "KUBERNETES",
        "POD",
        "XDG",
        "PYTHON",
        "LD_",
        "PATH",
        "HOME",
        "HF_",
        "WANDB",
        "MLFLOW",
        "SLURM",
        "TMPDIR",
    ),
)
"""Begins of the names of environment variables that say something of a run; others are named alone."""


class BundleSource:
    """Knowledge of one run."""

    def __init__(self, run: str) -> None:
        """
        Args:
            run: its name, or its address in storage.

        Raises:
            ConfigError: nothing is known of it.
        """
        self.asked = run
        self._coordinator: Any = None
        self._storage: Storage | None = None
        if find_stored.is_address(run):
            self.run, self._storage = find_stored.at_address(run)
        else:
            control.refuse_no_name(run)
            self.run = run
            self._find()

    def _find(self) -> None:
        try:
            self._coordinator, _ = control.connect_to_run(self.run)
        except PicotronError as error:
            self._storage = find_stored.of_name(self.run)
            if self._storage is None:
                raise ConfigError(
                    f"{error}; a run that is over is found by its address in storage (storage.url/NAME)"
                ) from error
            return
        job = ended_run.last_job(self.run)
        self._storage = None if job is None else find_stored.storage_of(job)

    def parts(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """(name, how to get it) of all parts; the small ones that matter most come first."""
        yield "versions.json", versions
        yield "environment.json", lambda: environment(dict(os.environ))
        yield "config.json", self.config
        yield "status.json", self.status
        yield "summary.json", lambda: self._object("summary.json")
        yield "failures.json", self.failures
        yield "events.jsonl", self.events
        yield "run_log.jsonl", self.log_entries
        yield "stacks_now.json", self.stacks
        yield "evidence.json", self.evidence
        yield "objects.json", self.objects
        yield "coordinator_events.jsonl", self.replayed
        yield "logs.jsonl", self.logs

    def _seen(self) -> dict[str, Any]:
        """The run's status with all events; as of its end where it is over."""
        if self._coordinator is not None:
            seen = follow_run.poll(self._coordinator, 0)
            if seen is None:
                raise follow_run.LostRunError("the coordinator does not answer")
            return seen
        end = None if find_stored.is_address(self.asked) else ended_run.find_end(self.run)
        return end or {}

    def status(self) -> dict[str, Any] | None:
        """Status without its events, which are a part of their own."""
        return {name: value for name, value in self._seen().items() if name != "events"} or None

    def events(self) -> list[dict[str, Any]] | None:
        """Events for people, of a run that goes on; others have them in their log lines."""
        return self._seen().get("events")

    def failures(self) -> Any:
        """Failures, of the status or of the summary."""
        seen = self._seen()
        return seen.get("failures") or (self._object("summary.json") or {}).get("failures")

    def config(self) -> Any:
        """The config of the newest launch, and the code that wrote it."""
        found = {name: self._object(name) for name in ("run.json", "launch.json")}
        if self._coordinator is not None:
            import ray

            found["running"] = ray.get(self._coordinator.config.remote(), timeout=ANSWER_S)
        return {name: value for name, value in found.items() if value is not None} or None

    def stacks(self) -> Any:
        """Stacks and collectives of all ranks as they are now; of a run that goes on."""
        if self._coordinator is None:
            return None
        return run_agents.ask_evidence(self.run, self._seen(), STACK_BYTES) or None

    def evidence(self) -> Any:
        """Stacks that were taken of hangs."""
        if self._storage is None:
            return None
        newest = sorted(self._storage.list("evidence/"), key=lambda entry: entry.mtime_s)[-NEWEST_EVIDENCE:]
        return {entry.key: json.loads(self._bounded(entry.key)) for entry in newest} or None

    def log_entries(self) -> Any:
        """Newest entries of the run's log: terms, generations, commits."""
        if self._storage is None:
            return None
        newest = list(self._storage.list("log/"))[-NEWEST_ENTRIES:]
        return [json.loads(self._bounded(entry.key)) for entry in newest] or None

    def objects(self) -> Any:
        """Keys and sizes of what storage has."""
        if self._storage is None:
            return None
        found = [(entry.key, entry.size) for entry in islice(self._storage.list(""), MOST_OBJECTS + 1)]
        return {"objects": found[:MOST_OBJECTS], "more": len(found) > MOST_OBJECTS}

    def replayed(self) -> Any:
        """Newest lines of the coordinator's event log, where it is on this machine; it replays."""
        newest = files.log_files(event_folder(self.run))[-1:]
        lines = [line.decode(errors="replace") for path in newest for line in tail(path, OBJECT_BYTES)]
        return [_read(line) for line in lines[-NEWEST_EVENTS:]] or None

    def logs(self) -> Any:
        """Newest lines of all processes."""
        found: list[dict[str, Any]] = []
        for entry in run_logs.log_lines(self.asked, Query(), say=lambda line: None):
            found.append(entry)
            if len(found) > 2 * MOST_LINES:
                del found[:MOST_LINES]
        return found[-MOST_LINES:] or None

    def _object(self, key: str) -> Any:
        with contextlib.suppress(NotFoundError):
            return None if self._storage is None else get_json(self._storage, key)
        return None

    def _bounded(self, key: str) -> bytes:
        assert self._storage is not None
        return get_bounded(self._storage, key, OBJECT_BYTES)


def _read(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line


def versions() -> dict[str, Any]:
    """Packages, Python and hardware of this machine."""
    found: dict[str, Any] = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {
        "packages": found,
        "python": sys.version,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "memory_bytes": host_bytes(),
        "gpus": [card._asdict() for card in Gpus().cards()],
    }


def environment(variables: dict[str, str]) -> dict[str, Any]:
    """The environment of this command: values of what concerns a run, names of the rest."""
    shown = {name: value for name, value in sorted(variables.items()) if name.startswith(_VARIABLES)}
    return {
        "of": "this command, not the run's processes",
        "values": {name: HIDDEN if is_secret_name(name) else value for name, value in shown.items()},
        "others": sorted(set(variables) - set(shown)),
    }
