"""``picotron-ray doctor``: all checks in order, on this machine or over the cluster of ``RAY_ADDRESS``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.runtime.doctor.data_check import DataReport, asked_job, judge_data, open_data
from picotron_ray.runtime.doctor.drill import judge_drill
from picotron_ray.runtime.doctor.finding import Finding
from picotron_ray.runtime.doctor.judgement import judge, judge_together
from picotron_ray.runtime.doctor.machine_report import MachineReport, Question, look
from picotron_ray.runtime.doctor.state_folder import judge_state_folder, judge_temporary_folder
from picotron_ray.runtime.doctor.storage_rights import judge_storage

DRILL_MEND = "mend that first"


def examine(job: JobConfig, configured: bool, drill: bool) -> Iterator[list[Finding]]:
    """Do all checks; the findings come in three parts, each as soon as it is known.

    Args:
        job: the config; without one, a small job of defaults.
        configured: the user gave it: its storage is looked at and used.
        drill: also train, kill a worker and verify.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    found = list(_over_a_cluster(address, job, configured) if address else _here(job, configured))
    found += [judge_state_folder(local=not address), judge_temporary_folder(local=not address)]
    yield found
    if configured:
        stored = list(judge_storage(job.storage))
    else:
        stored = [
            Finding("storage", "skipped", "no config was given", "give one: picotron-ray doctor CONFIG")
        ]
    yield stored
    broken = [finding.check for finding in (*found, *stored) if finding.status == "failed"]
    yield list(_drilled(job, configured, bool(address), broken, drill))


def _question(job: JobConfig, local: bool) -> Question:
    metrics = job.metrics
    ports = {"port": metrics.port, "coordinator_port": metrics.coordinator_port} if metrics.enabled else {}
    host = metrics.host or ("127.0.0.1" if local else "")
    snapshot = job.snapshot
    return Question(snapshot.folder, host, ports, snapshot.overflow_folder, job.cluster.interface)


def _here(job: JobConfig, configured: bool) -> Iterator[Finding]:
    report = look(_question(job, local=True))
    yield from judge(report, configured, True, job.cluster.allow_unauthenticated)
    if configured and "snapshot folder" not in report.troubles:
        yield from _with_its_model(job, _planned_here)
    if configured:
        yield from _data(job, lambda asked: [("", open_data(asked.model_dump(mode="json")))])


def _data(job: JobConfig, ask: Callable[[JobConfig], list[tuple[str, DataReport]]]) -> Iterator[Finding]:
    """Open the data where workers would, and judge it; ``ask`` returns what machines saw, by host."""
    try:
        asked = asked_job(job)
    except ConfigError as error:
        yield from (Finding("data", "failed", line) for line in error.problems)
        return
    yield from judge_data(job, ask(asked))


def _with_its_model(job: JobConfig, planned: Callable[[JobConfig], Iterator[Finding]]) -> Iterator[Finding]:
    """Plan the job once a model of the user's own was built, as a launch builds it: that tells its sizes."""
    from picotron_ray.runtime.driver.resolve_job import OWN_MODEL, ResolvedJob, resolve

    try:
        asked = resolve(ResolvedJob(job), (OWN_MODEL,)).job
    except ConfigError as error:
        yield from (Finding("model", "failed", line) for line in error.problems)
        return
    if asked.model.builder is not None:
        yield Finding("model", "ok", f"{asked.model.builder} was built")
    yield from planned(asked)


def _planned_here(job: JobConfig) -> Iterator[Finding]:
    """Plan the job for this machine, and find room for its slots, by the steps of a launch."""
    from picotron_ray.runtime.driver.resolve_job import ROOM_HERE, ResolvedJob, resolve

    try:
        found = resolve(ResolvedJob(job, owns_ray=True), ROOM_HERE)
    except ConfigError as error:
        yield from (Finding("plan", "failed", line) for line in error.problems)
        return
    yield from (Finding("plan", "warning", line) for line in found.notes)
    yield Finding("plan", "ok", f"{found.layout}")


def _over_a_cluster(address: str, job: JobConfig, configured: bool) -> Iterator[Finding]:
    from picotron_ray.runtime.doctor.node_probe import Probes
    from picotron_ray.runtime.ray_cluster.connect import connect_to
    from picotron_ray.runtime.ray_cluster.placement import living_nodes

    try:
        connect_to(address)
    except PicotronError as error:
        yield Finding("cluster", "failed", str(error), "see docs/ray-jobs.md")
        return
    nodes = living_nodes()
    yield Finding("cluster", "ok", f"{len(nodes)} nodes at {address}")
    with Probes(nodes) as probes:
        reports: dict[str, MachineReport] = probes.ask("look", _question(job, local=False))
        yield from probes.silent(reports)
        for report in reports.values():
            yield from judge(report, configured, False, job.cluster.allow_unauthenticated)
        yield from judge_together(list(reports.values()), probes.offsets_s(reports))
        yield from probes.judge_reach()
        yield from probes.judge_versions(job)
        if configured:
            yield from _data(job, probes.open_data)
    if configured:
        yield from _with_its_model(job, _planned)


def _planned(job: JobConfig) -> Iterator[Finding]:
    """Let the doors plan the job for these nodes, as a launch does."""
    from picotron_ray.runtime.driver.preflight import check_cluster

    try:
        plan = check_cluster(job)
    except ConfigError as error:
        for line in error.problems:
            yield Finding("plan", "failed", line)
        return
    if plan is None:
        yield Finding("plan", "skipped", "nodes are still to come (cluster.autoscale)")
        return
    for line in plan.left_out:
        yield Finding("plan", "warning", line)
    yield Finding("plan", "ok", f"{plan.planned.layout}")


def _drilled(
    job: JobConfig, configured: bool, cluster: bool, broken: list[str], drill: bool
) -> Iterator[Finding]:
    """Do the drill where it can be done."""
    if not drill:
        yield Finding("drill", "skipped", "not asked for (--no-drill)")
    elif broken:
        yield Finding("drill", "skipped", f"failed before: {', '.join(dict.fromkeys(broken))}", DRILL_MEND)
    elif cluster and not configured:
        mend = "give a config: picotron-ray doctor CONFIG"
        yield Finding("drill", "skipped", "on a cluster it needs storage that all nodes reach", mend)
    else:
        yield from judge_drill(job, own_storage=not configured, forget=_forget if cluster else None)


def _forget(job: JobConfig, run: str) -> None:
    """Delete what a run left on the disks of the cluster's nodes."""
    from picotron_ray.runtime.doctor.node_probe import Probes
    from picotron_ray.runtime.ray_cluster.placement import living_nodes

    with Probes(living_nodes()) as probes:
        probes.ask("forget", job.snapshot.folder, run)
