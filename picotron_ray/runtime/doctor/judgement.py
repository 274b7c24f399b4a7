"""Judgement of machines' reports: pure functions from what was seen to findings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from picotron_ray.runtime.doctor.finding import Finding, Status
from picotron_ray.runtime.doctor.gpu_health import GpuHealth
from picotron_ray.runtime.doctor.machine_report import MachineReport
from picotron_ray.runtime.ray_cluster import open_files
from picotron_ray.runtime.worker.nccl_settings import nccl_problems

LEAST_TASKS = 4096  # processes and threads: Ray alone starts hundreds on a node
LEAST_SHM_BYTES = 256 << 20  # Docker's default is 64 MiB, and writing past it is SIGBUS
SKEW_S, WORST_SKEW_S = 1.0, 30.0
"""Clocks: deadlines of drains are wall-clock times, and the shortest notice is 30 s."""
STORE_SKEW_S = 300.0  # S3 refuses requests that are 900 s off
BUSY_SHARE = 0.1  # of a GPU's memory that somebody else holds


def judge(
    report: MachineReport, planned: bool, local: bool, unauthenticated: bool = False
) -> Iterator[Finding]:
    """Judge one machine.

    Args:
        planned: a config was given, whose plan says how much room snapshots need.
        local: Ray is started by launch on this machine, with a token of its own.
        unauthenticated: the config lets Ray take calls from anybody.
    """
    for check, why in report.troubles.items():
        yield Finding(check, "failed", why, _TROUBLE.get(check, ""), report.host)
    judged = {
        "ports": _ports(report),
        "interface": _interface(report),
        "auth": _auth(report, local, unauthenticated),
        "snapshot folder": _snapshots(report, 0 if planned else LEAST_SHM_BYTES),
        "ulimits": _limits(report),
        "nccl": _nccl(report),
        "gpus": _gpus(report),
    }
    for check, findings in judged.items():
        if check not in report.troubles:
            for status, seen, mend in findings:
                yield Finding(check, status, seen, mend, report.host)


_TROUBLE = {
    "snapshot folder": "set snapshot.folder to a memory file system that this user may write to",
    "overflow folder": "set snapshot.overflow_folder to a folder that this user may write to",
    "gpus": "look at `nvidia-smi` and the kernel's log there; restart the machine or take it out",
}
Judged = Iterator[tuple[Status, str, str]]


def _ports(report: MachineReport) -> Judged:
    for key, why in report.taken.items():
        yield "failed", f"metrics.{key}: cannot listen at {why}", "choose another port, or 0 for a free one"
    if not report.taken:
        yield "ok", "the ports of the config are free", ""


def _interface(report: MachineReport) -> Judged:
    if report.interface_problem:
        seen, _, mend = report.interface_problem.partition("; ")
        yield "failed", seen, mend


def _auth(report: MachineReport, local: bool, unauthenticated: bool) -> Judged:
    mode = report.auth_mode or "not set"
    if mode == "token" or (local and not report.auth_mode):
        yield "ok", "Ray takes calls with a token only", ""
    elif mode == "disabled" and not unauthenticated:
        mend = "unset it, or set cluster.allow_unauthenticated=true; launch refuses it as it is"
        yield "failed", "RAY_AUTH_MODE is disabled: whoever reaches Ray's ports can run code", mend
    else:
        mend = "set RAY_AUTH_MODE=token on every node and for every driver before `ray start`"
        yield "warning", f"RAY_AUTH_MODE is {mode}: whoever reaches Ray's ports can run code there", mend


def _snapshots(report: MachineReport, least: int) -> Judged:
    free, total = (f"{size / 1e9:.3g} GB" for size in (report.free_bytes, report.total_bytes))
    mend = "enlarge it (docker run --shm-size, an emptyDir of medium Memory), or set snapshot.folder"
    if report.free_bytes < least <= (report.overflow_bytes or 0):
        seen = f"{free} of {total} are free, expected {least / 1e9:.3g} GB"
        yield "warning", seen, "snapshot.overflow_folder has room and takes over; slower"
    elif report.free_bytes < least:
        yield "failed", f"{free} of {total} are free, expected {least / 1e9:.3g} GB", mend
    else:
        yield "ok", f"{free} of {total} are free", ""


def _limits(report: MachineReport) -> Judged:
    files, fine = report.limits["nofile"], True
    if 0 <= files < open_files.GOOD_FILES:
        status: Status = "failed" if open_files.too_few(files) else "warning"
        yield status, f"open files: {files}, expected {open_files.GOOD_FILES}", open_files.MEND
        fine = False
    tasks = [most for most in (report.limits["nproc"], report.pids_max) if most >= 0]
    if tasks and min(tasks) < LEAST_TASKS:
        mend = "raise `ulimit -u`, or the container's limit of pids"
        yield "warning", f"processes: {min(tasks)}, expected {LEAST_TASKS}", mend
        fine = False
    if report.limits["fsize"] >= 0:
        yield "failed", f"files may have {report.limits['fsize']} bytes", "set `ulimit -f unlimited`"
        fine = False
    if report.gpus and report.limits["memlock"] >= 0 and _infiniband(report):
        seen = f"locked memory: {report.limits['memlock']} bytes, which InfiniBand cannot work with"
        yield "failed", seen, "set `ulimit -l unlimited`"
        fine = False
    if fine:
        yield "ok", "open files, processes, file sizes and locked memory are enough", ""


def _infiniband(report: MachineReport) -> bool:
    return any(name.startswith("ib") for name in report.interfaces)


def _nccl(report: MachineReport) -> Judged:
    if not report.gpus and not report.environment:
        yield "skipped", "no GPU", ""
        return
    fine = True
    wanted = report.environment.get("NCCL_SOCKET_IFNAME", "").lstrip("^=")
    missing = [
        name for name in wanted.split(",") if name and not any(i.startswith(name) for i in report.interfaces)
    ]
    if missing:
        seen = f"NCCL_SOCKET_IFNAME names {', '.join(missing)}, there are {', '.join(report.interfaces)}"
        yield "failed", seen, "name an interface that every machine has"
        fine = False
    for seen, mend in nccl_problems(report.environment):
        yield "failed", seen, mend
        fine = False
    if fine:
        yield "ok", f"{len(report.environment)} variables are set, none in the way", ""


def _gpus(report: MachineReport) -> Judged:
    if not report.gpus:
        yield "skipped", report.driver, ""
        return
    sick = [(gpu, *found) for gpu in report.gpus for found in _sick(gpu)]
    for gpu, status, seen, mend in sick:
        yield status, f"{gpu.name} {gpu.uuid}: {seen}", mend
    if not sick:
        names = Counter(gpu.name for gpu in report.gpus)
        yield "ok", f"{', '.join(f'{n} x {name}' for name, n in names.items())}, driver {report.driver}", ""


def _sick(gpu: GpuHealth) -> Judged:
    if gpu.ecc_errors:
        yield "failed", f"{gpu.ecc_errors} uncorrected memory errors", "reset it, or take the machine out"
    if gpu.rows_failed:
        yield "failed", "a damaged memory row could not be replaced", "have the GPU exchanged"
    if gpu.pending:
        yield "warning", "memory rows wait to be replaced", "reset the GPU while nobody uses it"
    if gpu.slowed:
        yield "warning", "the hardware slows it down for heat or power", "look at its cooling and power"
    elif gpu.celsius is not None and gpu.slow_celsius and gpu.celsius >= gpu.slow_celsius - 5:
        yield "warning", f"{gpu.celsius} °C, it slows down at {gpu.slow_celsius} °C", "look at its cooling"
    if gpu.used_bytes is not None and gpu.memory_bytes and gpu.used_bytes > BUSY_SHARE * gpu.memory_bytes:
        seen = f"{gpu.used_bytes / 1e9:.3g} of {gpu.memory_bytes / 1e9:.3g} GB are in use"
        yield "warning", seen, "end what `nvidia-smi` shows there before a run starts"


def judge_together(reports: Sequence[MachineReport], offsets_s: Mapping[str, float]) -> Iterator[Finding]:
    """Judge what must be the same on all machines.

    Args:
        offsets_s: by host, how far its clock is ahead of the command's own.
    """
    differing: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted({name for report in reports for name in report.environment}):
        for report in reports:
            differing[name][report.environment.get(name, "not set")].append(report.host)
    for name, values in differing.items():
        if len(values) > 1:
            text = ", ".join(f"{value} ({_some(hosts)})" for value, hosts in values.items())
            yield Finding("nccl", "failed", f"{name} differs: {text}", "set it alike on every machine")
    if offsets_s:
        yield _clocks(offsets_s)


def _clocks(offsets_s: Mapping[str, float]) -> Finding:
    ordered = sorted(offsets_s.values())
    middle = ordered[len(ordered) // 2]
    host, worst = max(((h, abs(o - middle)) for h, o in offsets_s.items()), key=lambda pair: pair[1])
    if worst <= SKEW_S:
        return Finding("clocks", "ok", f"at most {worst:.2g} s apart")
    status: Status = "failed" if worst > WORST_SKEW_S else "warning"
    mend = "let every machine follow a time server (chronyd, systemd-timesyncd)"
    return Finding("clocks", status, f"{host} is {worst:.3g} s off the others", mend)


def _some(hosts: list[str]) -> str:
    return ", ".join(hosts[:2]) + (f" and {len(hosts) - 2} more" if len(hosts) > 2 else "")


def judge_store_clock(offset_s: float) -> Finding:
    """Judge how far storage's clock is ahead of this machine's."""
    if abs(offset_s) <= STORE_SKEW_S:
        return Finding("storage clock", "ok", f"{abs(offset_s):.2g} s from this machine's")
    seen = f"{abs(offset_s):.3g} s from this machine's, expected at most {STORE_SKEW_S:g} s"
    return Finding("storage clock", "failed", seen, "let this machine follow a time server")
