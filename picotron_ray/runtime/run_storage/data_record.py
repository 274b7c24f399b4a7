"""The run's own record of its data, and the checks that need it.

``data.json`` holds the fingerprint of the data that the run began with (``data.dataset``). A later launch,
and every worker, must see the same. It is put once, by the first coordinator, and never changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage, encode_json, get_json
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.dataset import DataSplits
from picotron_ray.data.ledger import check
from picotron_ray.data.plan.sample_plan import UniformPlan
from picotron_ray.data.tasks.open_tasks import open_data
from picotron_ray.errors import AlreadyExistsError, DataError, NotFoundError
from picotron_ray.runtime.ray_cluster.names import cache_folder

log = logging.getLogger(__name__)
KEY = "data.json"
MOST_TOKENS, MOST_SAMPLES = 250_000_000, 500_000
"""Size of a run up to which its end, which a user waits for, recomputes all digests; ``ledger verify`` does
at any size."""
MOST_WRONG = 10


def recorded_data(storage: Storage) -> str:
    """Fingerprint of the run's data; "" where it has no record yet."""
    try:
        return str(get_json(storage, KEY)["fingerprint"])
    except NotFoundError:
        return ""


def settle_data(storage: Storage, run: str, seen: str) -> str:
    """Record the data that the first launch saw; returns the run's fingerprint, "" where nobody looked.

    Raises:
        DataError: the launch saw other data than the run began with.
    """
    if seen:
        try:
            storage.put_if_absent(KEY, encode_json({"fingerprint": seen}))
        except AlreadyExistsError:
            check_data(storage, run, seen)
    return recorded_data(storage)


def check_data(storage: Storage, run: str, seen: str) -> None:
    """Raise DataError where the data seen is not what the run began with."""
    problem = data_problem(recorded_data(storage), seen)
    if problem:
        raise DataError(f"{problem}; restore the files of run {run}, or choose another name")


def data_problem(expected: str, seen: str) -> str:
    """Say why data is not the run's; "" where it is, or nobody knows.

    >>> data_problem("aa", "bb")
    'data.path: the files hold other samples: fingerprint bb, expected aa'
    """
    if not expected or seen == expected:
        return ""
    return f"data.path: the files hold other samples: fingerprint {seen}, expected {expected}"


class _Tally:
    """Sums over a ledger's lines, taken as they pass by."""

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        self._lines = lines
        self._begun = False
        self.tokens = 0
        self.first_loss: float | None = None  # of the first step that was not passed over
        self.final_loss: float | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self._lines:
            self.tokens += line["tokens"]
            self.final_loss = line["loss"]
            if not self._begun and "passed_over" not in line:
                self._begun, self.first_loss = True, line["loss"]
            yield line


def ledger_figures(
    job: JobConfig,
    lines: Iterable[dict[str, Any]],
    steps: int,
    expected: str,
    passed: Sequence[range] = (),
) -> dict[str, Any]:
    """Check a whole ledger at the end of its run; returns what the summary says of it.

    ``checked`` is ``tokens`` where every digest was made again from the data; ``rows`` where only the rows
    were checked that each step says it fed: of a long run, or where this node does not have the data.

    Args:
        lines: in order; each is looked at once, and none is kept.
        steps: number of lines that there should be, from which follows whether the run was a long one.
    """
    samples = steps * job.data.global_batch
    short = samples * job.data.sequence_length <= MOST_TOKENS and samples <= MOST_SAMPLES
    data = _opened(job, expected) if short else None
    tally = _Tally(lines)
    plan = data.plan if data else UniformPlan(job.seed, job.data.global_batch, 0)
    report = check(tally, plan, data.train if data else None, passed=passed)
    for line in report.wrong[:MOST_WRONG]:
        log.error("ledger: %s", line)
    ledger = {
        "samples": report.samples,
        "lost": report.lost,
        "repeated": report.repeated,
        "skipped": report.skipped,
        "passed_over": report.passed_over,
        "checked": "rows" if data is None else "tokens",
        "wrong": list(report.wrong[:MOST_WRONG]),
    }
    return {
        "tokens": tally.tokens,
        "first_loss": tally.first_loss,
        "final_loss": tally.final_loss,
        "ledger": ledger,
    }


def _opened(job: JobConfig, expected: str) -> DataSplits | None:
    """The run's data; None where it is not to be had here."""
    try:
        data = open_data(job, cache_folder())
    except DataError as error:
        log.warning("the ledger's digests are not checked here: %s", error)
        return None
    return data if data.fingerprint == expected else None
