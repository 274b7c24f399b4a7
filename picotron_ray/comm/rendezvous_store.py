"""The standing rendezvous store: one TCPStore server in a process that outlives workers.

With a server that is already listening, ``init_process_group`` takes 1-4 ms. With a new one per generation it
takes 0.4-0.6 s, nearly all of it clients backing off. So a node agent starts the server once, as ``python -m
picotron_ray.comm.rendezvous_store --parent-pid PID``. It prints one line of JSON, ``{"host": ..., "port":
...}``, and ends when that process ends. It waits on a pidfd rather than on PR_SET_PDEATHSIG, because the
kernel sends that signal when the *thread* that started the child ends. Each generation has a key prefix of
its own. Nothing is ever deleted (some hundred bytes per generation).

With ``--record FILE`` it writes that line, and who it is, into a file too, and ends once the file is gone or
another's. So it can be found again by whoever takes over from the process that started it, and its life is
the file's: the parent is then the node's Ray, which outlives agents. As long as it answers its own questions
it touches the file, so a frozen one is known by the file's age.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

POLL_S = 0.2
ALIVE = "alive"
"""Key that the server sets for itself; generations have prefixes, so it meets none of theirs."""
BACKLOG = 2048
CONNECT_TIMEOUT = timedelta(seconds=60)


def wait_for_exit(pid: int, wanted: Callable[[], bool] = lambda: True) -> None:
    """Return once the process ``pid`` is gone, or nobody wants the server any more."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # a kernel or sandbox without pidfd
        while os.path.exists(f"/proc/{pid}") and wanted():
            time.sleep(POLL_S)
        return
    gone = select.poll()  # not select(), which knows no more than 1,024 files
    gone.register(handle, select.POLLIN)
    while wanted() and not gone.poll(POLL_S * 1000):
        pass
    os.close(handle)


def read_record(path: Path) -> dict[str, Any] | None:
    """``{"host", "port", "pid", "start_ticks", "owner"}`` of a server; None where no file names one."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return record


def _write_record(path: Path, address: dict[str, Any], owner: str) -> dict[str, Any]:
    start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    record = {**address, "pid": os.getpid(), "start_ticks": start_ticks, "owner": owner}
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    create = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, create, 0o600), "w") as file:
        json.dump(record, file)
    temporary.rename(path)
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the process of ``--parent-pid`` ends, or the record is no longer this server's."""
    parser = argparse.ArgumentParser(prog="picotron_ray.comm.rendezvous_store", description=__doc__)
    parser.add_argument("--parent-pid", type=int, required=True, help="end when this process ends")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at, and to announce to clients"
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: any free one")
    parser.add_argument("--record", type=Path, help="file to write the address to; end when it is gone")
    parser.add_argument("--owner", default="", help="noted in the record: whose server it is")
    options = parser.parse_args(arguments)

    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # here: importing takes a second

    # by itself a TCPStore listens at all addresses of the machine, and it asks nobody who they are
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
    port = listener.getsockname()[1]
    server = TCPStore(
        options.host, port, is_master=True, timeout=CONNECT_TIMEOUT, master_listen_fd=listener.detach()
    )
    address = {"host": options.host, "port": server.port}
    print(json.dumps(address), flush=True)
    if options.record is None:
        wait_for_exit(options.parent_pid)
    else:
        mine = _write_record(options.record, address, options.owner)

        def wanted() -> bool:
            if read_record(options.record) != mine:
                return False
            server.set(ALIVE, "")
            with contextlib.suppress(FileNotFoundError):  # removed since: the next look ends it
                os.utime(options.record)
            return True

        wait_for_exit(options.parent_pid, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
