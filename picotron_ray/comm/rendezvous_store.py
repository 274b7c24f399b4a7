"""The standing rendezvous store: one TCPStore server in a process that outlives workers.

With a server that is already listening, ``init_process_group`` takes 1-4 ms. With a new one per generation it
takes 0.4-0.6 s, nearly all of it clients backing off. So a node agent starts the server once, as ``python -m
picotron_ray.comm.rendezvous_store --parent-pid PID``. It prints one line of JSON, ``{"host": ..., "port":
...}``, and ends when that process ends. It waits on a pidfd rather than on PR_SET_PDEATHSIG, because the
kernel sends that signal when the *thread* that started the child ends. Each generation has a key prefix of
its own. Nothing is ever deleted (some hundred bytes per generation).
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

POLL_S = 0.2
CONNECT_TIMEOUT = timedelta(seconds=60)


def wait_for_exit(pid: int) -> None:
    """Return once the process ``pid`` is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # a kernel or sandbox without pidfd
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(POLL_S)
        return
    select.select([handle], [], [])
    os.close(handle)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the process of ``--parent-pid`` ends."""
    parser = argparse.ArgumentParser(prog="picotron_ray.comm.rendezvous_store", description=__doc__)
    parser.add_argument("--parent-pid", type=int, required=True, help="end when this process ends")
    parser.add_argument("--host", default="127.0.0.1", help="address to announce to clients")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: any free one")
    options = parser.parse_args(arguments)

    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # here: importing takes a second

    server = TCPStore(options.host, options.port, is_master=True, timeout=CONNECT_TIMEOUT)
    print(json.dumps({"host": options.host, "port": server.port}), flush=True)
    wait_for_exit(options.parent_pid)
    return 0


if __name__ == "__main__":
    sys.exit(main())
