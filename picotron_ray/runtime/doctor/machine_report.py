"""Facts of one machine that a run depends on, looked up in place, each with a deadline. No torch, no Ray."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from picotron_ray.observability.ports import port_taken
from picotron_ray.runtime.doctor.finding import timed
from picotron_ray.runtime.doctor.gpu_health import GpuHealth, gpu_health
from picotron_ray.runtime.ray_cluster.interfaces import interface_problem

LOOK_S = 10.0
"""Longest that one look may take."""
LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "memlock": resource.RLIMIT_MEMLOCK,
}
LIMITS["fsize"] = resource.RLIMIT_FSIZE
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")


@dataclass(frozen=True, slots=True)
class Question:
    """Request of a look: the folders of snapshots, host and ports of metrics (0: any free one), and the
    interface that carries the run.
    """

    snapshot_folder: str = "/dev/shm"
    metrics_host: str = ""
    ports: dict[str, int] = field(default_factory=dict)
    overflow_folder: str | None = None
    interface: str | None = None


@dataclass(slots=True)
class MachineReport:
    """Report of one machine.

    Fields:
        limits: soft limits of a process by name; -1: none.
        pids_max: most processes and threads in its control group; -1: no limit is known.
        free_bytes: free bytes of the snapshot folder; total_bytes: of its file system.
        overflow_bytes: free bytes of the folder that takes over; None: none is named.
        interface_problem: why the run cannot listen at the interface that it names.
        environment: variables that NCCL, torch and gloo read.
        troubles: what could not be looked at, by check, and why.
    """

    host: str
    limits: dict[str, int] = field(default_factory=dict)
    pids_max: int = -1
    free_bytes: int = 0
    total_bytes: int = 0
    auth_mode: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    interfaces: list[str] = field(default_factory=list)
    taken: dict[str, str] = field(default_factory=dict)  # key of a port: why nothing can listen there
    gpus: list[GpuHealth] = field(default_factory=list)
    driver: str = ""  # version of the GPU driver, or why there is none
    troubles: dict[str, str] = field(default_factory=dict)
    overflow_bytes: int | None = None
    interface_problem: str = ""


def look(question: Question) -> MachineReport:
    """Look at this machine; what hangs or fails is a trouble of its report."""
    report = MachineReport(socket.gethostname(), auth_mode=os.environ.get("RAY_AUTH_MODE", ""))
    looks: dict[str, Callable[[MachineReport, Question], Any]] = {
        "ulimits": _limits,
        "snapshot folder": _snapshot_folder,
        "overflow folder": _overflow_folder,
        "interface": _interface,
        "ports": _ports,
        "nccl": _environment,
        "gpus": _gpus,
    }
    for check, one in looks.items():
        try:
            timed(LOOK_S, one, report, question)
        except TimeoutError:
            report.troubles[check] = f"gave no answer for {LOOK_S:g} s"
        except (OSError, RuntimeError, ValueError) as error:
            report.troubles[check] = str(error)
    return report


def _limits(report: MachineReport, _: Question) -> None:
    soft = {name: resource.getrlimit(kind)[0] for name, kind in LIMITS.items()}
    report.limits = {name: -1 if most == resource.RLIM_INFINITY else most for name, most in soft.items()}
    for path in ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"):
        if Path(path).exists():
            text = Path(path).read_text().strip()
            report.pids_max = -1 if text == "max" else int(text)


def _snapshot_folder(report: MachineReport, question: Question) -> None:
    """Measure the folder, and write into it: beyond a quota a write fails where the sizes promise room."""
    report.free_bytes, report.total_bytes = _room(question.snapshot_folder)


def _overflow_folder(report: MachineReport, question: Question) -> None:
    if question.overflow_folder is not None:
        report.overflow_bytes, _ = _room(question.overflow_folder)


def _room(folder: str) -> tuple[int, int]:
    usage = shutil.disk_usage(folder)
    with tempfile.TemporaryFile(dir=folder) as file:  # it never has a name
        if size := min(1 << 20, usage.free // 2):
            os.posix_fallocate(file.fileno(), 0, size)
    return usage.free, usage.total


def _interface(report: MachineReport, question: Question) -> None:
    report.interface_problem = interface_problem(question.interface, report.host)


def _ports(report: MachineReport, question: Question) -> None:
    for key, port in question.ports.items():
        if port and (why := port_taken(question.metrics_host, port)):
            report.taken[key] = f"port {port}: {why}"


def _environment(report: MachineReport, _: Question) -> None:
    report.environment = {k: v for k, v in os.environ.items() if k.startswith(PREFIXES)}
    report.interfaces = [name for _, name in socket.if_nameindex()]


def _gpus(report: MachineReport, _: Question) -> None:
    report.gpus, report.driver = gpu_health()
