"""Resolve a job: an ordered list of named steps from a user's config to what runs.

Every door (``launch``, a Ray job, ``ElasticTrainer``, a sweep, the benchmarks, ``validate``) takes steps from
the lists below, in their order; a step that refuses raises the error that its door shows, with the step's
name in ``error.step``. Nothing else changes a job: the modules beside this one answer questions about it.

A step is pure unless its docstring says what it touches. Neither torch nor Ray is imported before a step
needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage, try_storage
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.check import check as broken_rules
from picotron_ray.errors import ConfigError, naming
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.driver.consent import NOT_ASKED, Consent
from picotron_ray.runtime.driver.elsewhere import await_silence
from picotron_ray.runtime.driver.resolve_start import settled_start
from picotron_ray.runtime.driver.submission import Submission
from picotron_ray.runtime.driver.time_left import check_deadline
from picotron_ray.runtime.driver.user_paths import absolute_paths, is_relative
from picotron_ray.runtime.ray_cluster import cleanup, local_ray, open_files

if TYPE_CHECKING:
    from picotron_ray.data.dataset import DataSplits

Say = Callable[[str], None]
CONFIG = "config"
"""Name of what comes before all steps: reading and validating the user's words."""


def _silent(line: str) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True)
class ResolvedJob:
    """A job on its way to what runs, with what its steps found.

    Fields:
        job: the config as it stands.
        submission: the Ray job that this process runs in.
        relative_url: ``storage.url`` as the user wrote it, where that depends on the present folder; else "".
        owns_ray: the Ray that the run gets was started for it alone.
        say: told one line per fact that the user may want to see.
        consent: what the user agrees to, and hears, where the launch would be refused or wait.
        storage: the run's, once a step opened it.
        data: the opened dataset.
        layout: the cheapest one on the machines that the run may use.
        slot_bytes: of one snapshot slot of a worker in that layout; 0: not looked at.
        follows: newest term of the run that is over; None: nobody looked, or the user wants any to be ended.
        start: record of the commit that ``init_from`` names, for a new run's run.json.
        notes: lines about what was settled, or differs from an earlier launch.
    """

    job: JobConfig
    submission: Submission | None = None
    relative_url: str = ""
    owns_ray: bool = False
    say: Say = _silent
    consent: Consent = NOT_ASKED
    storage: Storage | None = None
    data: DataSplits | None = None
    layout: Layout | None = None
    slot_bytes: int = 0
    follows: int | None = None
    start: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def noting(self, *lines: str | None) -> ResolvedJob:
        """Add those of the lines that say something."""
        return replace(self, notes=(*self.notes, *filter(None, lines)))


class ResolveStep(NamedTuple):
    """One step: its name, and what it makes of a job."""

    name: str
    take: Callable[[ResolvedJob], ResolvedJob]


def changed(job: JobConfig, **sections: Any) -> JobConfig:
    """The job with other values at these keys."""
    return job.model_copy(update=sections)


def resolve(resolved: ResolvedJob, steps: Sequence[ResolveStep]) -> ResolvedJob:
    """Take the steps in their order.

    >>> resolve(ResolvedJob(JobConfig(steps=3)), (OWN_MODEL,)).job.steps
    3

    Raises:
        PicotronError: a step refuses; ``error.step`` names it.
    """
    for step in steps:
        with naming(step.name):
            resolved = step.take(resolved)
    return resolved


def resolve_words(
    source: str,
    overrides: Sequence[str],
    steps: Sequence[ResolveStep] = (),
    submission: Submission | None = None,
    say: Say = _silent,
) -> ResolvedJob:
    """Read what a user typed (a YAML file or recipe, and dotted overrides), then take the steps.

    >>> resolve_words("tiny", ["steps=3"]).job.steps
    3

    Raises:
        PicotronError: a step refuses; ``error.step`` names it (``config``: the words themselves are bad).
    """
    with naming(CONFIG):
        job = load_job(source, overrides)
    return resolve(ResolvedJob(job, submission, say=say), steps)


def check_machine(
    job: JobConfig, own_ray: bool, relative_url: str = "", consent: Consent = NOT_ASKED
) -> ResolvedJob:
    """Take the steps that ask no node of a cluster; what was checked, its ``job``, is what has to run.

    Args:
        own_ray: the run gets a Ray of its own on this machine, so that it has to have room for all workers;
            else the cluster is connected.
        relative_url, consent: as `ResolvedJob` has them.

    Raises:
        ConfigError, StorageError: one line per problem; only the token cache was changed.
    """
    asked = ResolvedJob(job, relative_url=relative_url, owns_ray=own_ray, consent=consent)
    return resolve(asked, (KNOWN_RUN, *ON_THE_MACHINE, ELSEWHERE))


# --- the words ---------------------------------------------------------------------------------------------


def _paths(at: ResolvedJob) -> ResolvedJob:
    """Make the user's paths absolute. Touches: reads the present folder's name."""
    if at.submission is not None:
        at.say(f"run {at.job.name} in {at.submission}")
    url = at.job.storage.url if is_relative(at.job.storage.url) else ""
    return replace(at, job=changed(at.job, **absolute_paths(at.job, at.submission)), relative_url=url)


def _deadline(at: ResolvedJob) -> ResolvedJob:
    """Refuse a ``cluster.deadline`` that has passed. Touches: reads the clock."""
    check_deadline(at.job.cluster.deadline)
    return at


def _own_model(at: ResolvedJob) -> ResolvedJob:
    """Fill ``model.built`` in where the job names a builder. Touches: builds it, in a process of its own."""
    if at.job.model.builder is None or at.job.model.built is not None:
        return at
    from picotron_ray.runtime.driver.custom_model import inspect_model

    built, facts = inspect_model(at.job)
    job = changed(at.job, model=at.job.model.model_copy(update={"built": built}))
    if problems := broken_rules(job):
        raise ConfigError(*(f"{problem.key}: {problem.text}" for problem in problems))
    for line in facts:
        at.say(line)
    return replace(at, job=job)


# --- the machine -------------------------------------------------------------------------------------------


def _known_run(at: ResolvedJob) -> ResolvedJob:
    """Refuse to begin anew where this machine knows better. Touches: reads its event logs and storage; asks
    every node of a cluster for its logs.
    """
    from picotron_ray.runtime.driver.known_run import check_known_run

    if at.consent.begin_anew:
        return at
    relative, options = bool(at.relative_url), at.consent.options
    return at.noting(check_known_run(at.job, _opened(at), at.owns_ray, relative, options))


def _nodes(at: ResolvedJob) -> ResolvedJob:
    """Refuse what machines rule out by their number and devices. Touches: asks NVML, or a cluster's Ray."""
    from picotron_ray.runtime.driver.preflight import cards_here, check_nodes

    if at.owns_ray:
        cards_here(at.job)
    else:
        check_nodes(at.job, at.relative_url)
    return at


def _data(at: ResolvedJob) -> ResolvedJob:
    """Open the dataset. Touches: reads the data, writes the token cache."""
    from picotron_ray.data.tasks.open_tasks import open_data
    from picotron_ray.runtime.ray_cluster.names import cache_folder

    job = at.job
    data = open_data(job, cache_folder(), job.steps, evaluated=True)
    return replace(at, data=data).noting(*(f"data: {note}" for note in data.notes))


def _layout(at: ResolvedJob) -> ResolvedJob:
    """Choose the layout of a run with a Ray of its own. Touches: asks NVML for this machine's GPUs."""
    from picotron_ray.runtime.driver.preflight import plan_here

    if not at.owns_ray:
        return at
    plan = plan_here(at.job)
    return replace(at, layout=plan.planned.layout, slot_bytes=plan.slot_bytes)


def _snapshot_room(at: ResolvedJob) -> ResolvedJob:
    """Find room for that layout's snapshot slots. Touches: looks at the free space of their folders."""
    from picotron_ray.runtime.driver.snapshot_folder import overflow_here

    if at.layout is None:
        return at
    in_overflow, note = overflow_here(at.job, at.layout.world_size, at.slot_bytes)
    return _moved(at, in_overflow).noting(note)


def _moved(at: ResolvedJob, in_overflow: bool) -> ResolvedJob:
    """The slots in ``snapshot.overflow_folder`` where they have room there alone."""
    from picotron_ray.runtime.driver import snapshot_folder

    if not in_overflow:
        return at
    return replace(at, job=changed(at.job, snapshot=snapshot_folder.in_overflow(at.job.snapshot)))


def _services(at: ResolvedJob) -> ResolvedJob:
    """Check authentication, metrics' ports and trackers. Touches: binds the ports for a moment."""
    from picotron_ray.runtime.driver.preflight import check_services

    check_services(at.job)
    return at


def _storage(at: ResolvedJob) -> ResolvedJob:
    """Open the run's storage and try it. Touches: writes and removes one object, and the folders for it."""
    try_storage(at.job.storage, at.job.name)
    return replace(at, storage=open_storage(at.job.storage, at.job.name))


def _start(at: ResolvedJob) -> ResolvedJob:
    """Verify the commit that the run starts from, whole. Touches: reads both runs' storage."""
    from picotron_ray.runtime.run_storage.init_from import imported_note

    at = _init_from(at, verify=True)
    return at.noting(imported_note(at.job, _opened(at)))


def _same_run(at: ResolvedJob) -> ResolvedJob:
    """Compare with the run of that name. Touches: reads its storage; asks every node what it keeps."""
    from picotron_ray.runtime.driver.preflight import check_kept_elsewhere, check_resume_step

    check_kept_elsewhere(at.job, _opened(at), at.owns_ray)
    check_resume_step(at.job, _opened(at))
    return _running_run(at)


def _running_run(at: ResolvedJob) -> ResolvedJob:
    """Compare with the run of that name, which goes on, so at any step. Touches: reads its storage."""
    from picotron_ray.runtime.driver.preflight import check_same_run
    from picotron_ray.runtime.run_storage.data_record import check_data

    notes = check_same_run(at.job, _opened(at))
    if at.data is not None:
        check_data(_opened(at), at.job.name, at.data.fingerprint)
    return at.noting(*notes)


def _elsewhere(at: ResolvedJob) -> ResolvedJob:
    """Wait until no coordinator of the run lives elsewhere. Touches: reads storage, writes an object."""
    return replace(at, follows=await_silence(at.job.name, _opened(at), at.consent))


def _own_precision(at: ResolvedJob) -> ResolvedJob:
    """Settle ``precision: auto`` for this machine's ``cluster.device``. Touches: asks torch for its GPUs."""
    from picotron_ray.runtime.driver.resolve_precision import precision_here

    auto = at.job.precision == "auto"
    return replace(at, job=changed(at.job, precision=precision_here(at.job.cluster))) if auto else at


def _own_ray(at: ResolvedJob) -> ResolvedJob:
    """Check this machine where a Ray has to be started on it. Touches: what a dead Ray of the run left there
    is removed; and all that ``ON_THE_MACHINE`` does.
    """
    if os.environ.get("RAY_ADDRESS"):
        return at
    open_files.refuse_few_files()
    with local_ray.locked(at.job.name):
        found = local_ray.find(at.job.name)
        if found is not None and found.alive:
            return at
        at = resolve(replace(at, owns_ray=True), (KNOWN_RUN,))
        cleanup.clear(at.job, found)
        at = resolve(at, ON_THE_MACHINE)
    return resolve(at, (ELSEWHERE,))  # may wait: not with the lock, which `stop` needs


# --- the cluster -------------------------------------------------------------------------------------------


def _precision(at: ResolvedJob) -> ResolvedJob:
    """Settle ``precision: auto``. Touches: reads storage; asks every node for its GPUs."""
    from picotron_ray.runtime.driver.resolve_precision import settled_precision

    precision, note = settled_precision(at.job, _opened(at))
    return replace(at, job=changed(at.job, precision=precision)).noting(note)


def _room(at: ResolvedJob) -> ResolvedJob:
    """Check room, kernels and precision of the connected cluster. Touches: asks its nodes."""
    from picotron_ray.runtime.driver.preflight import check_cluster

    plan = check_cluster(at.job, at.owns_ray)
    if plan is None:
        return at
    at = replace(at, layout=plan.planned.layout, slot_bytes=plan.slot_bytes).noting(*plan.left_out)
    return _moved(at, plan.in_overflow)


def _init_from(at: ResolvedJob, verify: bool = False) -> ResolvedJob:
    """Settle the commit that the run starts from. Touches: reads both runs' storage."""
    step, record = settled_start(at.job, _opened(at), verify)
    init_from = at.job.init_from.model_copy(update={"step": step})
    return replace(at, job=changed(at.job, init_from=init_from), start=record)


def _addresses(at: ResolvedJob) -> ResolvedJob:
    """Serve this machine alone where Ray was started for the run alone."""
    if not at.owns_ray:
        return at
    cluster, metrics = at.job.cluster, at.job.metrics
    cluster = cluster.model_copy(update={"interface": cluster.interface or "lo"})
    metrics = metrics.model_copy(update={"host": metrics.host or "127.0.0.1"})
    return replace(at, job=changed(at.job, cluster=cluster, metrics=metrics))


def _opened(at: ResolvedJob) -> Storage:
    """The run's storage, opened where no step did so before."""
    return at.storage or open_storage(at.job.storage, at.job.name)


PATHS = ResolveStep("paths", _paths)
DEADLINE = ResolveStep("deadline", _deadline)
OWN_MODEL = ResolveStep("own model", _own_model)
NODES = ResolveStep("nodes", _nodes)
DATA = ResolveStep("data", _data)
ROOM_HERE = (ResolveStep("layout", _layout), ResolveStep("snapshot room", _snapshot_room))
STORAGE = ResolveStep("storage", _storage)
START = ResolveStep("start", _start)
INIT_FROM = ResolveStep("init_from", _init_from)
SAME_RUN = ResolveStep("same run", _same_run)
RUNNING_RUN = ResolveStep("same run", _running_run)
"""In place of ``SAME_RUN`` where the run goes on and is attached to."""
OWN_PRECISION = ResolveStep("precision", _own_precision)
"""For a benchmark, whose workers are this machine's and no Ray's."""

FROM_WORDS = (PATHS, DEADLINE, OWN_MODEL)
"""From a valid config to a job that any process can read."""
KNOWN_RUN = ResolveStep("known run", _known_run)
"""Before ``ON_THE_MACHINE``, and before what a dead Ray left is removed."""
ON_THE_MACHINE = (NODES, *ROOM_HERE, ResolveStep("services", _services), STORAGE, DATA, START, SAME_RUN)
"""Everything that can be refused before a process of the run is started; what takes long comes late."""
ELSEWHERE = ResolveStep("elsewhere", _elsewhere)
"""Comes last before a process of the run is started."""
OWN_RAY = ResolveStep("own ray", _own_ray)
"""``ON_THE_MACHINE`` where nobody but the run uses its Ray, and that is still to be started."""
ON_THE_CLUSTER = (
    OWN_MODEL,
    ResolveStep("precision", _precision),
    ResolveStep("room", _room),
    DATA,
    INIT_FROM,
    ResolveStep("addresses", _addresses),
)
"""What is settled once the run's Ray is connected, before its coordinator exists."""
