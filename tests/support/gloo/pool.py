"""A pool of living worker processes that re-mesh from test to test.

Starting a process and importing torch takes seconds; re-meshing takes milliseconds. So the tests of this
folder share processes that are started once per session and given functions to run. A function runs as
``function(job, *arguments)`` on each of the first ``n`` processes, ``job`` saying its rank and how to open
the process groups. A process that a test kills is replaced when it is next needed; all are forked from one
that has imported what they need.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

REPLY_S = 100.0
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.gloo.preload"])


@dataclass(frozen=True)
class Job:
    """What a function needs to open its generation."""

    host: str
    port: int
    prefix: str
    rank: int
    world_size: int

    def groups(self, **options: Any) -> Any:
        from picotron_ray.comm.process_groups import ProcessGroups

        options.setdefault("timeout_s", 30.0)
        return ProcessGroups(self.host, self.port, self.prefix, self.rank, self.world_size, **options)


class WorkerError(AssertionError):
    """The function failed in a worker; the message carries its traceback."""


class Worker:
    """One process and the pipe to it."""

    def __init__(self) -> None:
        self.pipe, theirs = FORKS.Pipe()
        self.stacks = tempfile.NamedTemporaryFile("r", prefix="stacks-")  # noqa: SIM115 - closed in close
        self.process = FORKS.Process(target=serve, args=(theirs, self.stacks.name), daemon=True)
        self.process.start()
        theirs.close()
        self.busy = False

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, job: Job, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.busy = True
        self.pipe.send((function.__module__, function.__name__, job, arguments))

    def receive(self, timeout_s: float = REPLY_S) -> Any:
        """The function's value; raises WorkerError, or EOFError where the process died."""
        if not self.pipe.poll(timeout_s):
            raise WorkerError(f"process {self.pid} did not answer within {timeout_s} s:\n{self.where()}")
        ok, value = self.pipe.recv()
        self.busy = False
        if not ok:
            raise WorkerError(value)
        return value

    def where(self) -> str:
        """The stacks of the process's threads, newest call first."""
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self.stacks.read()

    def close(self) -> None:
        self.stacks.close()
        self.pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


class Pool:
    """Processes and the standing store; see the module."""

    def __init__(self) -> None:
        self.store = subprocess.Popen(
            [sys.executable, "-m", "picotron_ray.comm.rendezvous_store", "--parent-pid", str(os.getpid())],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.store.stdout is not None
        address = json.loads(self.store.stdout.readline())
        self.host, self.port = address["host"], address["port"]
        self.workers: list[Worker] = []
        self.generation = 0
        self.reply_s = REPLY_S  # a test whose ranks run a compiler waits longer

    def need(self, count: int) -> list[Worker]:
        """The first ``count`` workers, started or replaced as needed, and all ready to work."""
        self.drop([worker for worker in self.workers if worker.busy])  # a test that failed left them so
        self.workers = [worker for worker in self.workers if worker.process.is_alive()]
        fresh = [Worker() for _ in range(count - len(self.workers))]
        for worker in fresh:
            assert worker.receive() == "ready"
        self.workers += fresh
        return self.workers[:count]

    def start(self, members: list[Worker], function: Callable[..., Any], *arguments: Any) -> None:
        """Let ``members`` begin the function as the ranks of a new generation."""
        self.generation += 1
        for rank, worker in enumerate(members):
            job = Job(self.host, self.port, f"generation-{self.generation}", rank, len(members))
            worker.send(job, function, arguments)

    def run(self, count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run the function on ``count`` ranks; return their values in the order of ranks."""
        members = self.need(count)
        self.start(members, function, *arguments)
        try:
            waiting: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(members)}
            values: list[Any] = [None] * count
            while waiting:  # in the order of arrival: the first error is the cause of the others
                arrived = wait(list(waiting), self.reply_s)
                if not arrived:
                    silent = {rank: members[rank] for rank in waiting.values()}
                    raise WorkerError(silence(silent, self.reply_s))
                for pipe in arrived:
                    rank = waiting.pop(pipe)
                    values[rank] = members[rank].receive(0)
            return values
        except BaseException:
            self.drop(members)  # a failed rank leaves its peers blocked
            raise

    def drop(self, members: list[Worker]) -> None:
        for worker in [worker for worker in self.workers if worker in members]:  # not dropped before
            worker.process.kill()
            worker.close()
            self.workers.remove(worker)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.store.terminate()
        self.store.wait()
        assert self.store.stdout is not None
        self.store.stdout.close()


def silence(members: dict[int, Worker], waited_s: float) -> str:
    """Says of each rank that did not answer where it is stuck."""
    parts = [f"no answer for {waited_s:g} s from the ranks {', '.join(map(str, members))}"]
    parts += [f"rank {rank}, process {worker.pid}:\n{worker.where()}" for rank, worker in members.items()]
    return "\n\n".join(parts)


def serve(pipe: Connection, stacks: str) -> None:
    """The life of a worker process."""
    import faulthandler
    import gc
    import importlib
    import warnings

    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "20000")  # tests ask for the order of operations
    import torch
    from sitecustomize import follow_context  # of tests/support, or this process has not started as it should

    # as in the process of the tests, but for the compiler's
    warnings.filterwarnings("error", module=r"picotron_ray|tests|torch\.distributed")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what lives for ever need not be looked at by every collection
    shown = open(stacks, "w")  # noqa: SIM115 - for the life of the process
    faulthandler.register(signal.SIGUSR1, shown)  # shows where a process is stuck
    pipe.send((True, "ready"))
    while True:
        try:
            module, name, job, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        follow_context()
        try:
            function = getattr(importlib.import_module(module), name)
            reply = (True, function(job, *arguments))
        except Exception:  # noqa: BLE001 - handed to the test, which raises it
            reply = (False, traceback.format_exc())
        pipe.send(reply)
