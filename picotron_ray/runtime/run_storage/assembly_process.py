"""Assembler's process, as the coordinator sees it: parts go there as bytes, a manifest in storage comes back.

Parsing the parts of a state of 100,000 chunks, checking and encoding its manifest hold Python's lock for
seconds, which the coordinator needs for heartbeats. So states above ``INLINE_BYTES`` of parts are assembled
in a process of its own (``assembly_server``); it is started for the first of them. The thread that makes the
commit waits for it. While it works it says so each second; a process that dies, or says nothing for
``SILENT_S``, is replaced, and the work is done again: what it stored is found there. After ``MOST_TRIES`` the
commit fails as in an outage, and the machine tries it again later. It ends with its input, or its parent.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.store.assembly import Assembler, Stored
from picotron_ray.checkpoint.store.commit import Assembling
from picotron_ray.checkpoint.store.manifest import segment_row
from picotron_ray.checkpoint.store.outline import Outline, decode_outline
from picotron_ray.checkpoint.store.upload_part import decode_part
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import StorageUnavailableError
from picotron_ray.runtime import child_process
from picotron_ray.runtime.run_storage.assembly_frames import (
    decode_frames,
    encode_frame,
    outline_from,
    raise_told,
    stored_from,
)

log = logging.getLogger(__name__)
INLINE_BYTES = 256 << 10
"""Parts, or a manifest, up to which the work is done here: some 1,200 chunks, which take 40 ms."""
SILENT_S = 60.0
MOST_TRIES = 3
COMMAND = (sys.executable, "-m", "picotron_ray.runtime.run_storage.assembly_server")
T = TypeVar("T")
Frame = tuple[dict[str, Any], list[bytes]]


class AssemblerGoneError(Exception):
    """The assembler's process ended, or was silent for too long."""


class AssemblyProcess:
    """The process; any thread may use it, one at a time."""

    def __init__(self, job: JobConfig, command: Sequence[str] = COMMAND, silent_s: float = SILENT_S) -> None:
        self._head = {"job": job.model_dump(mode="json")}
        self._command, self._silent_s = tuple(command), silent_s
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = bytearray()
        self._closed = False

    def assembling(
        self, storage: Storage, parts: Sequence[bytes], grace_s: float, unproven: bool = False
    ) -> Assembling:
        """Return the assembly of a commit: here where it is small.

        Args:
            storage: of this process.
            unproven: ledger lines that nobody has are left out.
        """
        if sum(map(len, parts)) <= INLINE_BYTES:
            return Assembler(storage, [decode_part(part) for part in parts], grace_s, unproven)
        return _Remote(self, parts, grace_s, unproven)

    def outline(self, key: str, data: bytes) -> Outline:
        """Outline of an encoded manifest; raises as `decode_manifest`."""
        if len(data) <= INLINE_BYTES:
            return decode_outline(key, data)
        return self.tried(lambda: outline_from(*self.ask({"do": "outline", "key": key}, [data])))

    def tried(self, work: Callable[[], T]) -> T:
        """Do some work with the process, again with a new one where it ends meanwhile."""
        problem: Exception | None = None
        for _ in range(MOST_TRIES):
            try:
                return work()
            except (AssemblerGoneError, OSError) as error:
                if self._closed:
                    raise StorageUnavailableError("the run ends; nothing is assembled any more") from error
                log.warning("the assembler's process is replaced: %s", error)
                problem = error
        raise StorageUnavailableError(f"the assembler's process failed {MOST_TRIES} times ({problem})")

    def ask(self, question: dict[str, Any], blobs: Sequence[bytes] = ()) -> Frame:
        """Put a question and wait for its answer.

        Raises:
            AssemblerGoneError: it ended, or was silent for too long; it is replaced for the next question.
            PicotronError: what the process met.
        """
        with self._turn:
            try:
                process = self._up()
                self._write(process, encode_frame(question, blobs))
                answer, found = self._read(process)
            except BaseException:
                self._end()
                raise
        raise_told(answer)
        return answer, found

    def _up(self) -> subprocess.Popen[bytes]:
        """Return the living process, or a new one that knows the job."""
        if self._closed:
            raise AssemblerGoneError("it was closed")
        if self._process is None:
            self._unread.clear()
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)  # one that is frozen takes nothing
            if self._closed:  # just now
                raise AssemblerGoneError("it was closed")
            self._write(self._process, encode_frame(self._head))
        return self._process

    def _write(self, process: subprocess.Popen[bytes], frame: Sequence[bytes]) -> None:
        assert process.stdin is not None
        pipe = process.stdin.fileno()
        for piece in frame:
            left = memoryview(piece)
            while left:
                if not child_process.writable(pipe, self._silent_s):
                    raise AssemblerGoneError(f"it took nothing for {self._silent_s:g} s")
                left = left[os.write(pipe, left) :]

    def _read(self, process: subprocess.Popen[bytes]) -> Frame:
        """Read frames until an answer comes."""
        assert process.stdout is not None
        until = time.monotonic() + self._silent_s
        while True:
            for answer, blobs in decode_frames(self._unread):
                if "beat" not in answer:
                    return answer, blobs
            left_s = until - time.monotonic()
            if left_s <= 0 or not child_process.readable(process.stdout.fileno(), left_s):
                raise AssemblerGoneError(f"it said nothing for {self._silent_s:g} s")
            found = os.read(process.stdout.fileno(), 1 << 20)
            if not found:
                raise AssemblerGoneError(f"it ended with {process.wait()}")
            self._unread += found
            until = time.monotonic() + self._silent_s

    def close(self) -> None:
        """End the process; who waits for it hears StorageUnavailableError."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._turn:  # who waits for it hears of its end at once
            self._end()

    @property
    def pid(self) -> int | None:
        """Process id, for drills; None while there is none."""
        return None if self._process is None else self._process.pid

    def _end(self) -> None:
        """Kill the process, and reap it."""
        process, self._process = self._process, None
        if process is not None:
            child_process.end(process)


class _Remote:
    """Assembly of one commit in that process."""

    def __init__(
        self, process: AssemblyProcess, parts: Sequence[bytes], grace_s: float, unproven: bool
    ) -> None:
        self._process, self._parts = process, parts
        self._how = {"grace_s": grace_s, "unproven": unproven}
        self._parent: Outline | None = None
        self._pid: int | None = None  # of the process that has it

    def assemble(self, parent: Outline | None) -> Outline:
        self._parent = parent
        return self._process.tried(self._assemble)

    def _assemble(self) -> Outline:
        known = None
        if self._parent is not None:
            rows = [segment_row(one) for one in self._parent.ledger]
            known = {"step": self._parent.step, "ledger": rows}
        question = {"do": "assemble", "parent": known, **self._how}
        outline = outline_from(*self._process.ask(question, self._parts))
        self._pid = self._process.pid
        return outline

    def store(self) -> Stored:
        def store() -> Stored:
            if self._process.pid != self._pid:  # it died with what it had made
                self._assemble()
            answer, _ = self._process.ask({"do": "store"})
            return stored_from(answer)

        return self._process.tried(store)
