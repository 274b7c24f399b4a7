"""Run of picotron_ray, seen from outside: its workers' heartbeat pages, and its committed ledger."""

from __future__ import annotations

from pathlib import Path

from picotron_ray.bench.common.statistics import Rows
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import latest_good, read_ledger
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.ledger_line import parse_line
from picotron_ray.errors import PicotronError
from picotron_ray.runtime.heartbeat import PageView, read_page
from picotron_ray.runtime.ray_cluster.names import run_folder


def pages(job: JobConfig) -> list[PageView]:
    """Read all heartbeat pages of the run on this machine, the dead workers' included."""
    folder: Path = run_folder(job.snapshot.folder, job.name)
    found = (read_page(path) for path in folder.glob("*/*.page"))
    return [page for page in found if page is not None]


def id_of(page: PageView) -> str:
    return f"{page.term}.{page.n}"


def generation_of(found: list[PageView], generation: str) -> list[PageView]:
    return [page for page in found if id_of(page) == generation]


def leader_of(members: list[PageView]) -> PageView | None:
    return next((page for page in members if page.rank == 0), None)


def committed_rows(job: JobConfig) -> dict[int, list[Rows]]:
    """Read the rows fed in each step, from the ledger lines of the newest commit that count."""
    storage = open_storage(job.storage, job.name)
    log = RunLog(storage)
    log.refresh()
    good = latest_good(storage, log)
    if good is None:
        raise PicotronError("bench recovery: the run ended without a commit that verifies")
    wrong: list[str] = []
    rows: dict[int, list[Rows]] = {}
    newest: dict[int, tuple[int, int]] = {}
    for at, raw in enumerate(read_ledger(storage, good.manifest)):
        line = parse_line(raw, at, wrong)
        if line is not None and line.generation >= newest.get(line.step, (0, 0)):
            newest[line.step] = line.generation
            rows[line.step] = [(first, last) for first, last, *_ in line.rows]
    return rows
