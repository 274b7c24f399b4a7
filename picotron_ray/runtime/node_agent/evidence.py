"""Evidence of why workers of a node hang, asked of them before one is killed; bounded in size and time.

A worker that does not answer in ``ANSWER_S`` is told of by what the kernel knows: whether it is stopped, or
where it sleeps. It is killed all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picotron_ray.runtime.heartbeat import PageView, process_alive
from picotron_ray.runtime.worker.testimony import ASK, COLLECTIVES, SIGNAL, STACKS

ANSWER_S = 0.5
SETTLED_S = 0.03
"""A file that tells of the thread that writes it, and has not grown for so long, is complete."""
WRITER = b"Current thread 0x"
"""How `faulthandler` begins the stack of the thread that got the signal: the main one, told last."""
POLL_S = 0.005
MOST_BYTES = 64 << 10
"""Of one worker's stacks, and of its operations."""
ANSWER_BYTES = 16 << 20
"""Of what a worker has written of its operations."""
STOPPED = "TtZX"


@dataclass(slots=True)
class _AskedWorker:
    """One worker that was asked.

    Fields:
        before: length of its stacks' file by then.
        grew_s: when that was last seen to grow.
    """

    page: PageView
    stacks: Path
    collectives: Path
    state: str
    before: int = 0
    length: int = 0
    grew_s: float = 0.0

    def complete(self, now_s: float) -> bool:
        if self.state in STOPPED or not self.stacks.exists():
            return True
        length = self.stacks.stat().st_size
        if length != self.length:
            self.length, self.grew_s = length, now_s
        if self.length <= self.before or now_s - self.grew_s < SETTLED_S or not self.collectives.exists():
            return False
        told = self.stacks.read_bytes()[self.before :]
        return WRITER in told and told.endswith(b"\n")


def ask_workers(
    folder: Path, pages: Sequence[PageView], now_s: float, most_bytes: int = MOST_BYTES
) -> list[dict[str, Any]]:
    """Ask these workers where they are; returns an entry for each, within about ``ANSWER_S`` seconds.

    Args:
        now_s: of the node's monotonic clock.
        most_bytes: of each one's stacks, and of its operations.
    """
    asked = [_ask(folder, page) for page in pages]
    until = time.monotonic() + ANSWER_S
    while not all(each.complete(time.monotonic()) for each in asked) and time.monotonic() < until:
        time.sleep(POLL_S)
    return [_entry(each, now_s, most_bytes) for each in asked]


def _ask(folder: Path, page: PageView) -> _AskedWorker:
    found = _AskedWorker(
        page, folder / (page.worker + STACKS), folder / (page.worker + COLLECTIVES), _state(page.pid)
    )
    if found.state in STOPPED or not found.stacks.exists():  # the signal would be its end
        return found
    found.before = found.length = found.stacks.stat().st_size
    found.collectives.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it ends meanwhile
        pipe = os.open(folder / (page.worker + ASK), os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, b"?")
        os.close(pipe)
    if process_alive(page.pid, page.start_ticks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(page.pid, SIGNAL)
    return found


def _entry(asked: _AskedWorker, now_s: float, most_bytes: int) -> dict[str, Any]:
    page = asked.page
    stacks = _read(asked.stacks, asked.before, most_bytes)
    with contextlib.suppress(OSError):  # it appends: the file begins anew
        os.truncate(asked.stacks, 0)
    return {
        "worker": page.worker,
        "rank": page.rank,
        "pid": page.pid,
        "phase": page.phase,
        "for_s": round(_stands_s(page, now_s), 3),
        "step": page.step,
        "step_s": page.step_time_s,
        "state": asked.state,
        "debugged": bool(page.debugged),
        "sleeps_in": _read(Path(f"/proc/{page.pid}/wchan"), 0, 100),
        "stacks": stacks or f"no answer in {ANSWER_S:g} s",
        "collectives": newest_entries(_read(asked.collectives, 0, ANSWER_BYTES), most_bytes),
    }


def _stands_s(page: PageView, now_s: float) -> float:
    """Seconds in the phase; of a hold, which is entered anew all the time, those since the step's end."""
    if page.phase == "hold" and page.step_at_s:
        return max(0.0, time.time() - page.step_at_s)
    return now_s - page.phase_since_s


def newest_entries(text: str, most_bytes: int) -> str:
    """Drop the oldest entries and messages of an answer until it has at most so many bytes."""
    if len(text) <= most_bytes:
        return text
    try:
        found = json.loads(text)
    except ValueError:
        return text[:most_bytes]  # more than anybody asks for: it is of no use
    while len(text) > most_bytes:
        longest = max(("entries", "messages", "connections"), key=lambda name: len(found[name]))
        if not found[longest]:
            break
        found[longest] = _halved(found[longest])
        text = json.dumps(found, separators=(",", ":"))
    return text


def _halved(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave the older half out of what is done; where nothing is, of all."""
    done = [at for at, one in enumerate(told) if one.get("retired") or one.get("done")]
    left_out = set((done or list(range(len(told))))[: (len(done or told) + 1) // 2])
    return [one for at, one in enumerate(told) if at not in left_out]


def _state(pid: int) -> str:
    """State of a process as the kernel's letter: R runs, S sleeps, D waits for a disk, T is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _read(path: Path, start: int, most_bytes: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""
