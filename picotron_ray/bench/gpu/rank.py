"""Process of ``bench gpu``: a worker without Ray, which takes part in one generation after the other.

``python -m picotron_ray.bench.gpu.rank JOB.json FOLDER NAME KIND`` reads one order a line from stdin and
answers each with one line on stdout. An order is ``{"spec", "host", "port", "told"}``; ``told`` names a file
whose appearance stands for the coordinator's order to abort.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from picotron_ray.checkpoint.shard_service.channel import Endpoint
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.comm.device_claim import claim_device
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.codec import decode_spec
from picotron_ray.data.dataset import build_dataset
from picotron_ray.errors import SlotUnreachableError
from picotron_ray.runtime.heartbeat import Page
from picotron_ray.runtime.ray_cluster.names import cache_folder
from picotron_ray.runtime.worker.generation import GenerationRun
from picotron_ray.runtime.worker.nccl_settings import prepare_nccl
from picotron_ray.runtime.worker.resources import WorkerResources

POLL_S = 0.002
NODE = "node"


def main(job_file: str, folder: str, name: str, kind: str) -> None:
    """Serve orders until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")  # what else prints must not look like an answer
    os.dup2(2, 1)
    torch.set_num_threads(1)  # as the service's workers do
    job = JobConfig.model_validate_json(Path(job_file).read_text())
    if kind == "cuda":
        prepare_nccl(os.environ)
    device = claim_device(kind, os.getppid())
    page = Page(Path(folder) / f"{name}.page", job.elastic)
    resources = WorkerResources(
        job=job,
        worker=name,
        node=NODE,
        folder=Path(folder),
        device=device,
        data=build_dataset(job.data, job.model.vocab_size, job.seed, cache_folder()),
        page=page,
        storage=partial(open_storage, job.storage, job.name),
        find_service=_no_service,
    )
    _answer(answers, device=str(device))
    for line in sys.stdin:
        _answer(answers, **_generation(resources, json.loads(line)))


def _answer(answers: TextIO, **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


def _no_service(node: str, meanwhile: Any) -> Endpoint:
    raise SlotUnreachableError(f"{node}: all slots are on this machine")


def _generation(resources: WorkerResources, order: dict[str, Any]) -> dict[str, Any]:
    """Take part; returns the outcome, when each step began by this machine's clock, and the page's sums."""
    began: dict[int, float] = {}
    resources.page.on_phase = partial(_note, began)
    run = GenerationRun(resources, decode_spec(order["spec"]), (order["host"], order["port"]))
    threading.Thread(target=_watch, args=(run, Path(order["told"])), daemon=True).start()
    outcome = run.run()
    page = resources.page
    return {
        "kind": str(outcome.kind),
        "detail": outcome.detail,
        "began_s": sorted(began.items()),
        "first_step_at_s": outcome.first_step_at_s,
        "restored_at_s": page.value("restored_at_s"),
        "wait_s": page.value("wait_s"),
        "snapshot_s": page.value("snapshot_s"),
        "skipped": page.value("skipped"),
        "copies": [times._asdict() for times in (run.copies.taken if run.copies else ())],
    }


def _note(began: dict[int, float], step: int, phase: str) -> None:
    if phase == "data":
        began[step] = time.time()


def _watch(run: GenerationRun, told: Path) -> None:
    while not run.done.is_set():
        if told.exists():
            run.interrupt(None)
            return
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
