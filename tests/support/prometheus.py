"""A real Prometheus of a test's own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listed(file: Path) -> list[dict[str, Any]]:
    """Targets that a file lists, read anew each second, as ``file_sd_configs``."""
    return [{"files": [str(file)], "refresh_interval": "1s"}]


class PrometheusServer:
    """Prometheus with these settings, beside which its scrapes are a second apart, on a port of its own."""

    def __init__(self, program: Path, folder: Path, settings: dict[str, Any]) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.config = folder / "prometheus.yml"
        seconds = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        self.config.write_text(json.dumps({"global": seconds, **settings}))  # JSON is YAML
        options = {
            "config.file": self.config,
            "storage.tsdb.path": folder / "tsdb",
            "web.listen-address": self.url.removeprefix("http://"),
        }
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [program, *(f"--{name}={value}" for name, value in options.items())],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=30)
