"""Shard service in a process of its own, for tests that freeze it or measure memory.

``python -m tests.support.checkpoint.slot_service FOLDER`` prints its address and token as JSON, and serves
until its input ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from picotron_ray.checkpoint.shard_service.channel import Endpoint
from picotron_ray.checkpoint.shard_service.server import ShardServer


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Endpoint, int]]:
    """Serve a folder's slots meanwhile; yields the service's address and process id."""
    command = [sys.executable, "-m", "tests.support.checkpoint.slot_service", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Endpoint(**json.loads(process.stdout.readline())), process.pid
        finally:
            process.kill()


if __name__ == "__main__":
    server = ShardServer(Path(sys.argv[1]), "127.0.0.1", timeout_s=30.0)
    print(json.dumps(asdict(server.endpoint)), flush=True)
    sys.stdin.read()
