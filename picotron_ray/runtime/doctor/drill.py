"""Drill: a run of seconds on the machines at hand, one of whose workers is killed, and its proof.

It is a run like any other, in a process of its own with a deadline, under a name and in folders of its own.
Whatever its end, its actors, objects and files are removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.runtime.doctor.finding import Finding
from picotron_ray.runtime.doctor.storage_rights import tidied
from picotron_ray.runtime.ray_cluster.local_ray import default_temp_folder

DRILL_S = 120.0
"""Longest time from the start of the run to its end."""
VERIFY_S = 60.0
STEPS, KILLED_AT = 40, 12
WORKERS = 2


@dataclass(frozen=True, slots=True)
class DrillRun:
    """Name, words and environment of one drill."""

    name: str
    words: tuple[str, ...]
    environment: dict[str, str]


def prepared(job: JobConfig, folder: Path) -> DrillRun:
    """Return the drill's run, with storage, device, network and slots of ``job``; state below ``folder``."""
    name = f"doctor-{uuid.uuid4().hex[:8]}"
    storage = {
        k: v for k, v in job.storage.model_dump(mode="json").items() if k in _STORAGE and v is not None
    }
    words = {
        "name": name,
        "steps": STEPS,
        "checkpoint.interval_steps": STEPS // 2,
        "evaluate.interval_steps": STEPS,
        "metrics.enabled": False,
        "cluster.device": job.cluster.device,
        "cluster.cpus_per_worker": job.cluster.cpus_per_worker,
        "cluster.max_workers": WORKERS,
        "cluster.interface": job.cluster.interface,
        "cluster.allow_unauthenticated": job.cluster.allow_unauthenticated,
        "cluster.start_timeout_s": DRILL_S / 4,
        "snapshot.folder": job.snapshot.folder,
        "snapshot.overflow_folder": job.snapshot.overflow_folder,
        "chaos": [{"fault": "kill", "target": "worker:1", "step": KILLED_AT}],
        **{f"storage.{key}": value for key, value in storage.items()},
    }
    environment = {
        **os.environ,
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return DrillRun(name, tuple(f"{k}={json.dumps(v)}" for k, v in words.items()), environment)


_STORAGE = ("url", "endpoint_url", "region", "path_style")


def judge_drill(
    job: JobConfig, own_storage: bool, forget: Callable[[JobConfig, str], None] | None = None
) -> Iterator[Finding]:
    """Train, kill a worker, and verify what was committed.

    Args:
        own_storage: use a temporary folder of this machine for storage, not the job's.
        forget: deletes what a run of that name left on other machines.
    """
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        if own_storage:
            job = job.model_copy(update={"storage": StorageConfig(url=str(Path(folder) / "runs"))})
        drill = prepared(job, Path(folder))
        began = time.monotonic()
        with _removed(job, drill, forget), tidied(job.storage, drill.name):
            summary, problem = _train(drill)
            if summary is None:
                yield Finding("drill", "failed", problem, f"try {_command(drill)}")
                return
            yield judge_summary(summary)
            yield _verified(drill, time.monotonic() - began)


def _command(drill: DrillRun) -> str:
    """The same by hand, as far as the job's own words go."""
    own = ("storage.", "cluster.interface=", "cluster.allow_unauthenticated=")
    words = (word for word in drill.words if word.startswith(own) and not word.endswith(("=null", "=false")))
    return f"`picotron-ray train tiny {' '.join(words)}`"


def _train(drill: DrillRun) -> tuple[dict[str, Any] | None, str]:
    """Run it to its end: its summary, or None and why there is none."""
    code, out, error = _run(drill, DRILL_S, "picotron_ray.launch", "tiny", *drill.words, "--json")
    if code is None:
        _run(drill, VERIFY_S, "picotron_ray.cli", "stop", drill.name, "--discard")
        return None, f"the run did not end within {DRILL_S:g} s"
    with contextlib.suppress(ValueError, IndexError):
        last = json.loads(out.splitlines()[-1])
        if "steps" in last:
            return last, ""
        error = str(last.get("error", error))
    text = [line for line in error.splitlines() if line.strip()]
    return None, f"the run ended with exit code {code}: {text[-1] if text else 'without a word'}"


def _run(drill: DrillRun, limit_s: float, module: str, *words: str) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of a module; no code where it was killed for its time."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        env=drill.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        out, error = _kill(process)
        return None, out, error
    except BaseException:
        _kill(process)
        _stop(drill)
        raise
    return process.returncode, out, error


def _kill(process: subprocess.Popen[str]) -> tuple[str, str]:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()


def _stop(drill: DrillRun) -> None:
    """Take the run down after an interrupt; a second one is not waited for."""
    command = [sys.executable, "-m", "picotron_ray.cli", "stop", drill.name, "--discard"]
    subprocess.run(command, env=drill.environment, capture_output=True, timeout=VERIFY_S, check=False)


def judge_summary(summary: dict[str, Any]) -> Finding:
    """Judge how the run went: it lost a worker, recovered, and finished."""
    failures, layouts = summary["failures"], summary["generations"]
    if summary["status"] != "finished":
        seen = f"the run ended as {summary['status']}: {summary.get('detail', '')}"
        return Finding("drill", "failed", seen, "see the other lines; `picotron-ray train tiny` shows more")
    if len(layouts[0]["members"]) < WORKERS:
        seen = f"only one worker had room, so that none was killed; {summary['steps']} steps were trained"
        return Finding("drill", "warning", seen, f"free room for {WORKERS} workers")
    if not failures or failures[0]["recovered_s"] is None:
        return Finding("drill", "failed", "the killed worker was not noticed", "report this with the summary")
    recovered_s, lost = failures[0]["recovered_s"], failures[0]["lost_steps"]
    after = f"{recovered_s:.2g} s after that was seen training went on"
    seen = f"a worker was killed; {after}, {lost} steps were lost"
    return Finding("drill", "ok", seen)


def _verified(drill: DrillRun, took_s: float) -> Finding:
    words = ("ledger", "verify", "tiny", *drill.words, "--json")
    code, out, error = _run(drill, VERIFY_S, "picotron_ray.cli", *words)
    if code != 0:
        last = (out or error or "no answer").strip().splitlines()[-1]
        return Finding("drill ledger", "failed", last, "report this: samples were lost or repeated")
    found = json.loads(out.splitlines()[-1])
    seen = f"{found['steps']} steps, {found['samples']} samples: each once, as the source data has them"
    return Finding("drill ledger", "ok", f"{seen} ({took_s:.0f} s in all)")


@contextlib.contextmanager
def _removed(
    job: JobConfig, drill: DrillRun, forget: Callable[[JobConfig, str], None] | None
) -> Iterator[None]:
    """Remove in the end what a run leaves for later reading."""
    try:
        yield
    finally:
        states = Path(drill.environment["XDG_STATE_HOME"]) / "picotron_ray"
        shutil.rmtree(default_temp_folder(drill.name, states), ignore_errors=True)
        if forget is not None:
            forget(job, drill.name)
