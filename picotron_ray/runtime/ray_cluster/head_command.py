"""Command line of a local Ray's head."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

OBJECT_STORE_BYTES = 128 * 2**20
"""Next to nothing goes through Ray's object store; 30 % of memory, Ray's default, is for others."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def head_command(folder: Path, cpus: int, gpus: int | None) -> list[str]:
    """Return the command that starts a head in the foreground, on ephemeral ports.

    Args:
        folder: Ray's own temporary one.
        gpus: None: as many as Ray finds.
    """
    options = {
        "port": 0,
        # Its default is fixed, and a second Ray that finds it taken goes down whole.
        "ray-client-server-port": _free_port(),
        "num-cpus": cpus,
        "include-dashboard": "false",
        "include-log-monitor": "false",
        "dashboard-agent-listen-port": 0,
        "object-store-memory": OBJECT_STORE_BYTES,
        "temp-dir": folder,
    }
    if gpus is not None:
        options["num-gpus"] = gpus
    start = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
    ]
    return [*start, *(f"--{name}={value}" for name, value in options.items())]
