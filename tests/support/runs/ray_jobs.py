"""A two-node Ray as a user starts one, with token authentication, and its job API."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from picotron_ray.runtime.ray_cluster import processes

HEAD = ("--head", "--include-log-monitor=false", "--disable-usage-stats", "--block")
NO_ANSWER = (urllib.error.URLError, http.client.HTTPException, OSError)
STORE_BYTES = 100 * 2**20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class TwoNodes:
    """The head offers two CPUs; the other node two, and ``side``."""

    token: str = field(default_factory=lambda: secrets.token_hex(32))
    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    port: int = field(default_factory=free_port)
    api_port: int = field(default_factory=free_port)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="pr-")))
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Of the nodes, and of a user who has the token."""
        # a package out of an uploaded folder is gone by the time coverage looks for its source
        kept = {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE_")}
        api = f"http://127.0.0.1:{self.api_port}"
        kept |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_API_SERVER_ADDRESS": api}
        return kept

    def start(self, timeout_s: float = 120.0) -> None:
        head = [
            "--port",
            self.port,
            "--dashboard-port",
            self.api_port,
            "--ray-client-server-port",
            free_port(),
        ]
        self._node("head", *HEAD, *head)
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            assert self.nodes[0].poll() is None, self._log("head")
            assert time.monotonic() < deadline, self._log("head")
            time.sleep(0.2)
        self._node("side", *HEAD[1:], "--address", self.address, "--resources", '{"side": 1}')

    def _node(self, name: str, *options: Any) -> None:
        # Two nodes of one machine need two temporary folders, or one unpacks over what the other one uses.
        common = ("--num-cpus", 2, "--object-store-memory", STORE_BYTES, "--temp-dir", self.folder / name)
        ports = ("--dashboard-agent-listen-port", free_port())
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *common, *ports]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.nodes.append(
                subprocess.Popen(
                    [str(word) for word in command],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**self.environment, processes.MARK: self.mark},
                    start_new_session=True,
                )
            )

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-2000:]

    def _answers(self) -> bool:
        try:
            self.api("version")
        except NO_ANSWER:
            return False
        return True

    def stop(self) -> None:
        for node in self.nodes:
            processes.end_all(self.mark, node.pid, grace_s=0.0)
            node.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- jobs ------------------------------------------------------------------------------------------

    def api(self, path: str, method: str = "GET") -> Any:
        """A call of Ray's REST API for jobs."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.api_port}/api/{path}",
            method=method,
            headers={"Authorization": f"Bearer {self.token}"},
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.loads(reply.read())

    def submit(self, name: str, project: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
        """``ray job submit`` in the foreground; ``options``: further ones of it, values as JSON."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--submission-id", name]
        command += ["--working-dir", str(project)]
        for key, value in options.items():
            command += [f"--{key.replace('_', '-')}", json.dumps(value)]
        command += ["--", sys.executable, "-m", "picotron_ray.launch", *words]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment
        )

    def log(self, job: str) -> str:
        """What a job's driver has written, on whichever node; the API looks on the head's folder alone."""
        found = self.folder.glob(f"*/session_latest/logs/job-driver-{job}.log")
        return "".join(path.read_text() for path in sorted(found))

    def wait_for(self, job: str, reached: Callable[[str], Any], timeout_s: float = 200.0) -> Any:
        """Wait until a job's log fulfils a condition; returns what that found."""
        deadline = time.monotonic() + timeout_s
        while not (found := reached(log := self.log(job))):
            assert time.monotonic() < deadline, log
            time.sleep(0.3)
        return found

    def run(self, *command: str, cwd: Path, expect: int = 0, **environment: str) -> str:
        """A command of the CLI on this cluster; returns stdout, or stderr where it is refused."""
        done = subprocess.run(
            [sys.executable, "-m", *command],
            capture_output=True,
            text=True,
            timeout=200,
            cwd=cwd,
            env={**self.environment, "RAY_ADDRESS": self.address, **environment},
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout if expect == 0 else done.stderr
