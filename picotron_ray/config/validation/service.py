"""Rules between keys of what surrounds the steps: machines, snapshots, storage, scripted faults."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.chaos import FAULT_STRENGTHS, FAULT_TARGETS, ChaosFault, FaultTarget
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import PHASES
from picotron_ray.config.storage_urls import server_problems, url_problems

LABEL_KEY = re.compile(
    r"(?=.{1,316}$)([A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
"""Key of a node's label, as Ray takes them: a name of at most 63 characters, after a domain and a slash."""


def _cluster(job: JobConfig) -> Iterator[Problem]:
    cluster, elastic = job.cluster, job.elastic
    if cluster.min_workers > cluster.max_workers:
        yield Problem(
            "cluster.min_workers",
            f"saw {cluster.min_workers}, expected at most cluster.max_workers={cluster.max_workers}",
            ("cluster.max_workers",),
        )
    elif (
        cluster.local_cpus is not None and cluster.min_workers * cluster.cpus_per_worker > cluster.local_cpus
    ):
        yield Problem(
            "cluster.local_cpus",
            f"saw {cluster.local_cpus}, too few for cluster.min_workers={cluster.min_workers} at"
            f" cluster.cpus_per_worker={cluster.cpus_per_worker:g}",
            ("cluster.min_workers", "cluster.cpus_per_worker"),
        )
    if elastic.node_timeout_s < 2 * elastic.heartbeat_s:
        yield Problem(
            "elastic.node_timeout_s",
            f"saw {elastic.node_timeout_s:g}, expected at least twice"
            f" elastic.heartbeat_s={elastic.heartbeat_s:g}",
            ("elastic.heartbeat_s",),
        )
    if elastic.max_skipped_steps >= elastic.skip_window_steps:
        yield Problem(
            "elastic.max_skipped_steps",
            f"saw {elastic.max_skipped_steps}, expected less than"
            f" elastic.skip_window_steps={elastic.skip_window_steps}, or every step may be skipped",
            ("elastic.skip_window_steps",),
        )
    if elastic.max_rewinds >= elastic.skip_window_steps:
        yield Problem(
            "elastic.max_rewinds",
            f"saw {elastic.max_rewinds}, expected less than"
            f" elastic.skip_window_steps={elastic.skip_window_steps}, or the run may go back for ever",
            ("elastic.skip_window_steps",),
        )
    label = cluster.failure_domain_label
    if label is not None and not LABEL_KEY.fullmatch(label):
        yield Problem(
            "cluster.failure_domain_label",
            f"saw {label!r}, which no label of a Ray node is called; expected letters, digits, dots, dashes"
            " or underscores, such as ray.io/availability-zone",
        )


def _snapshot(job: JobConfig) -> Iterator[Problem]:
    snapshot = job.snapshot
    if snapshot.interval_steps != "auto" and snapshot.interval_steps < 1:
        yield Problem(
            "snapshot.interval_steps", f"saw {snapshot.interval_steps}, expected auto or at least 1"
        )
    for key, folder in (("folder", snapshot.folder), ("overflow_folder", snapshot.overflow_folder)):
        if folder is not None and not folder.startswith("/"):
            yield Problem(
                f"snapshot.{key}", f"saw {folder!r}, expected an absolute path, the same on every node"
            )


def _checkpoint(job: JobConfig) -> Iterator[Problem]:
    checkpoint = job.checkpoint
    every = checkpoint.keep_every_steps
    if every is not None and every % checkpoint.interval_steps:
        yield Problem(
            "checkpoint.keep_every_steps",
            f"saw {every}, expected a multiple of checkpoint.interval_steps={checkpoint.interval_steps},"
            " or no commit would be kept",
            ("checkpoint.interval_steps",),
        )
    if checkpoint.resume_step is not None and checkpoint.resume_step > job.steps:
        yield Problem(
            "checkpoint.resume_step",
            f"saw {checkpoint.resume_step}, expected at most steps={job.steps}",
            ("steps",),
        )


def _storage(job: JobConfig) -> Iterator[Problem]:
    for key, text in url_problems(job.storage):
        yield Problem(f"storage.{key}", text, ("storage.url",))
    limit, retries = job.storage.call_timeout_s, job.storage.retry_deadline_s
    if limit is not None and limit <= retries:
        yield Problem(
            "storage.call_timeout_s",
            f"saw {limit:g}, expected more than storage.retry_deadline_s={retries:g}, which it cuts off",
            ("storage.retry_deadline_s",),
        )


def _init_from(job: JobConfig) -> Iterator[Problem]:
    asked = job.init_from
    if asked.run is None:
        given = [key for key, value in asked if value not in (None, False)]
        for key in given:
            yield Problem(f"init_from.{key}", "saw a value without init_from.run; name the run, or drop it")
        return
    if asked.run == job.name and asked.url in (None, job.storage.url):
        text = f"saw {asked.run!r}, which is this run itself; give this one another name"
        yield Problem("init_from.run", text, ("name",))
    if asked.url is not None:
        theirs = job.storage.model_copy(update={"url": asked.url})
        yield from (Problem("init_from.url", text) for key, text in url_problems(theirs) if key == "url")


def _trackers(job: JobConfig) -> Iterator[Problem]:
    for index, tracker in enumerate(job.trackers):
        for text in () if tracker.url is None else server_problems(tracker.url):
            yield Problem(f"trackers.{index}.url", text)


TARGET_FORMS: dict[FaultTarget, str] = {
    "worker": "worker:<rank>",
    "node": "node:<index>",
    "coordinator": "coordinator",
}


STRENGTHS = {
    "row_s": "the seconds that slow sleeps per row, or that it comes late",
    "factor": "what scale or scale-gradients multiplies by",
    "pass_bytes": "the bytes that leak keeps at each pass",
}


def _strength(fault: ChaosFault, at: str) -> Iterator[Problem]:
    """Ask for the key that says how much a fault disturbs, and for no other such key."""
    wanted = FAULT_STRENGTHS.get(fault.fault)
    for key, means in STRENGTHS.items():
        value = getattr(fault, key)
        if key == wanted and value is None:
            yield Problem(f"{at}.{key}", f"saw nothing, expected {means}")
        elif key != wanted and value is not None:
            users = " or ".join(name for name, own in FAULT_STRENGTHS.items() if own == key)
            text = f"saw {value:g} with fault {fault.fault}, which has no {key}; drop it or use {users}"
            yield Problem(f"{at}.{key}", text, (f"{at}.fault",))


def _chaos(job: JobConfig) -> Iterator[Problem]:
    for index, fault in enumerate(job.chaos):
        at = f"chaos.{index}"
        kind, _, number = fault.target.partition(":")
        if fault.phase not in PHASES:
            yield Problem(f"{at}.phase", f"saw {fault.phase!r}, expected one of {', '.join(PHASES)}")
        elif fault.phase == "commit" and kind != "coordinator":
            yield Problem(
                f"{at}.phase", f"saw commit with target {fault.target}; only the coordinator commits"
            )
        if kind == "worker" and int(number) >= job.cluster.max_workers:
            yield Problem(
                f"{at}.target",
                f"saw {fault.target}, expected a rank below cluster.max_workers={job.cluster.max_workers}",
                ("cluster.max_workers",),
            )
        if kind not in FAULT_TARGETS[fault.fault]:
            expected = " or ".join(TARGET_FORMS[target] for target in FAULT_TARGETS[fault.fault])
            text = f"saw {fault.target}, expected {expected} for fault {fault.fault}"
            yield Problem(f"{at}.target", text, (f"{at}.fault",))
        yield from _strength(fault, at)
        if fault.fault == "slow" and job.kernels.cuda_graphs:
            text = "saw slow with kernels.cuda_graphs=true, whose replays know of no sleep; use false"
            yield Problem(f"{at}.fault", text, ("kernels.cuda_graphs",))
        if fault.step > job.steps:
            text = f"saw {fault.step}, expected at most steps={job.steps}; make it earlier, or drop the fault"
            yield Problem(f"{at}.step", f"{text} (chaos=[] drops all)", ("steps",))


RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (
    _cluster,
    _snapshot,
    _checkpoint,
    _storage,
    _init_from,
    _trackers,
    _chaos,
)
