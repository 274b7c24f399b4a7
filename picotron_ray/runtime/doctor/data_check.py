"""Check of the job's data: opened on each machine as a worker opens it, and compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.tasks import open_tasks
from picotron_ray.errors import ConfigError, DataError, StorageError
from picotron_ray.runtime.doctor.finding import Finding, timed
from picotron_ray.runtime.driver import submission
from picotron_ray.runtime.driver.user_paths import absolute_paths
from picotron_ray.runtime.ray_cluster.names import cache_folder
from picotron_ray.runtime.run_storage.data_record import check_data

DATA_S = 60.0
"""Longest wait for the data to be read on a machine; what is tokenised by then stays in its cache."""


@dataclass(frozen=True, slots=True)
class DataReport:
    """A machine's view of the data; ``problem``: a line, or empty."""

    problem: str = ""
    samples: int = 0
    held_out: int = 0
    fingerprint: str = ""
    slow: bool = False


def asked_job(job: JobConfig) -> JobConfig:
    """The job with the path that a launch from here would give to its workers.

    Raises:
        ConfigError: a launch would refuse it.
    """
    return job.model_copy(update={"data": absolute_paths(job, submission.current())["data"]})


def open_data(job: dict[str, Any]) -> DataReport:
    """Open the data on this machine; in a thread that is left behind where that hangs."""
    asked = JobConfig.model_validate(job)
    try:
        found = timed(DATA_S, open_tasks.open_data, asked, cache_folder())
    except TimeoutError:
        return DataReport(slow=True)
    except DataError as error:
        return DataReport(str(error))
    except OSError as error:
        return DataReport(f"data.path: cannot be read: {error}")
    return DataReport("", found.train.samples, found.held_out.samples, found.fingerprint)


def judge_data(job: JobConfig, reports: Iterable[tuple[str, DataReport]]) -> Iterator[Finding]:
    """Judge what machines (host, report) saw, and compare it with one another and with the run in storage."""
    seen: dict[str, list[str]] = {}
    whole: DataReport | None = None
    for host, report in reports:
        if report.slow:
            what, mend = f"not read within {DATA_S:g} s", "ask again: what was tokenised by then is cached"
            yield Finding("data", "warning", what, mend, host)
        elif report.problem:
            yield Finding("data", "failed", report.problem, "", host)
        else:
            whole = report
            seen.setdefault(report.fingerprint, []).append(host)
    if len(seen) > 1:
        parts = [f"{fingerprint} on {', '.join(hosts)}" for fingerprint, hosts in sorted(seen.items())]
        what = f"machines hold different samples: fingerprint {'; '.join(parts)}"
        yield Finding("data", "failed", what, "put the same files on all of them")
    elif whole is not None:
        yield _judged(job, whole)


def _judged(job: JobConfig, report: DataReport) -> Finding:
    compared = ""
    try:
        check_data(open_storage(job.storage, job.name), job.name, report.fingerprint)
    except DataError as error:
        return Finding("data", "failed", str(error))
    except (StorageError, ConfigError):
        compared = "; not compared with the run's record, as storage did not answer"
    text = (
        f"{report.samples} samples for training, {report.held_out} held out, {report.fingerprint}{compared}"
    )
    if report.samples < job.data.global_batch:
        mend = "give more data, or lower data.global_batch"
        return Finding("data", "warning", f"{text}: fewer than the {job.data.global_batch} of a step", mend)
    return Finding("data", "ok", text)
