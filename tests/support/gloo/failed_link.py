"""Two ranks, each in a network namespace, that sum over a link until it carries nothing.

``python -m tests.support.gloo.failed_link HOST PORT RANK`` is one rank. It prints a line once it steps; for
each line of its input it prints what it tells of itself, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from tests.support.gloo.shaped_link import IP, Link, command


class LinkedRank:
    """One rank's process, from outside."""

    def __init__(self, link: Link, rank: int) -> None:
        inside = ["ip", "netns", "exec", link.names[rank]]
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", __name__, IP.format(1), "29500", str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "link0", "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def told(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("tell\n")
        self.process.stdin.flush()
        entry: dict[str, Any] = self.line()
        return entry

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def linked_ranks(link: Link) -> Iterator[list[LinkedRank]]:
    """Both ranks, once they step."""
    ranks = [LinkedRank(link, rank) for rank in range(2)]
    try:
        for rank in ranks:
            assert rank.line() == "steps"
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def cut(link: Link) -> None:
    """Take the far end of the link down."""
    command("ip", "-n", link.names[1], "link", "set", "link0", "down")


def main(host: str, port: str, rank: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from picotron_ray.comm.operation_record import OPERATIONS
    from tests.support.gloo.planted_hangs import Witness
    from tests.support.gloo.pool import Job

    torch.set_num_threads(1)
    job = Job(host, int(port), "linked", int(rank), 2)
    OPERATIONS.keep(100)
    if job.rank == 0:
        limit = timedelta(seconds=60)
        _store = TCPStore(host, int(port), is_master=True, wait_for_workers=False, timeout=limit)
    else:
        time.sleep(1.0)
    groups = job.groups(timeout_s=300.0)
    groups.connect()
    witness = Witness(job, groups, True)

    def tell() -> None:
        for _ in sys.stdin:
            print(json.dumps(witness.told()), flush=True)

    threading.Thread(target=tell, daemon=True).start()
    dist.all_reduce(torch.ones(2**18))
    print(json.dumps("steps"), flush=True)
    while True:
        dist.all_reduce(torch.ones(2**18))


if __name__ == "__main__":
    main(*sys.argv[1:])
