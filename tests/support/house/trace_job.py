"""Trace a config from the command line to the worker: ``python tests/support/house/trace_job.py [TREE ...]``.

Launches the recipe ``tiny`` from the sources in TREE (default: the tree that this file stands in) with a
profile function in every process, and prints where the config went. It needs the package's dependencies, and
runs on any commit that has ``python -m picotron_ray.launch``.

Definitions, the same for every tree:

* A *config* is a ``JobConfig``, the raw mapping of one (it has the keys ``model`` and ``data``), or a tuple,
  a list or a frozen record that holds one of these.
* The config *passes* a file where a function of that file takes it as an argument, or gets it returned.
* The *way* is what leads on: functions that hand it to the next process, or were given it and called those;
  functions that return it to one that is on the way; and those that a process begins with. The driver's part
  ends where the coordinator is handed the config, the coordinator's where the first worker is, the worker's
  in its constructor.
* What takes the config and gives something else back (a check, an estimate, a plan, an agent) lies *beside*
  the way, and is counted apart.
* A *step back up* is a move to a file where the way has been before: the config is returned to its caller in
  another file, or called into a file again that it had left. Each process begins with no file seen.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

OUT, ROOT = "TRACE_JOB_OUT", "TRACE_JOB_ROOT"
HAND_OVER, TAKE, GIVE = "hand over", "take", "give"
HOOK = """import sys
sys.path.insert(0, {folder!r})
import trace_job
trace_job.record()
"""
TIMEOUT_S = 400.0


# --- in every process of the run ---------------------------------------------------------------------------


def is_config(value: Any, depth: int = 0) -> bool:
    """True for a config, and for what holds one directly."""
    if type(value).__name__ == "JobConfig":
        return True
    if isinstance(value, dict):
        return "model" in value and "data" in value
    if depth:
        return False
    if isinstance(value, tuple | list):
        return any(is_config(item, 1) for item in value)
    fields = getattr(type(value), "__dataclass_fields__", None)
    if fields is None or not type(value).__dataclass_params__.frozen:
        return False
    return any(is_config(getattr(value, name, None), 1) for name in fields)


def arguments(frame: FrameType) -> Iterator[Any]:
    """All that a call was given, ``self`` and ``*arguments`` included."""
    code = frame.f_code
    starred = bool(code.co_flags & 4) + bool(code.co_flags & 8)
    count = code.co_argcount + code.co_kwonlyargcount + starred
    values = frame.f_locals
    yield from (values[name] for name in code.co_varnames[:count] if name in values)


@functools.cache
def entry(code: CodeType) -> int:
    """Offset up to which a call begins; a generator that goes on stands behind it."""
    return next((at.offset for at in dis.get_instructions(code) if at.opname == "RESUME"), 0)


def is_actor_start(frame: FrameType) -> bool:
    """True where Ray is asked for an actor that is given a config."""
    code = frame.f_code
    if code.co_name != "_remote" or not code.co_filename.endswith("ray/actor.py"):
        return False
    return is_config(list(frame.f_locals.get("args") or ()))


class Recorder:
    """A profile function that writes a JSON line for each config that is taken, given back or handed over."""

    def __init__(self, folder: Path, package: str) -> None:
        self._package = package
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        name = frame.f_code.co_filename
        if name.startswith(self._package):
            if event == "call" and frame.f_lasti <= entry(frame.f_code):
                if any(map(is_config, arguments(frame))):
                    self._write(TAKE, frame)
            elif event == "return" and is_config(value):
                self._write(GIVE, frame)
        elif event == "call" and is_actor_start(frame):
            self._write(HAND_OVER, frame.f_back)

    def _write(self, what: str, frame: FrameType | None) -> None:
        stack = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(self._package):
                stack.append((code.co_filename[len(self._package) :], code.co_qualname, id(frame)))
            frame = frame.f_back
        if stack:
            line = {"what": what, "thread": threading.get_ident(), "stack": stack}
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the record."""
        self._file.close()


def record() -> None:
    """Begin in this process; called at its start-up."""
    recorder = Recorder(Path(os.environ[OUT]), os.path.join(os.environ[ROOT], "picotron_ray", ""))
    threading.setprofile(recorder)
    sys.setprofile(recorder)


# --- afterwards --------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """One function's call on a stack."""

    file: str
    function: str
    frame: int


class Event(NamedTuple):
    """One line of a record; the stack has the innermost call first."""

    what: str
    thread: int
    stack: tuple[Place, ...]


class Move(NamedTuple):
    """The way comes to a file, by a call or by a return."""

    file: str
    how: str
    up: bool


def events_of(path: Path) -> list[Event]:
    """Read a process's record up to where it handed the config on; empty where it is not on the way."""
    lines = map(json.loads, path.read_text().splitlines())
    events = [Event(at["what"], at["thread"], tuple(Place(*frame) for frame in at["stack"])) for at in lines]
    for count, event in enumerate(events, 1):
        if event.what == HAND_OVER and event.stack[0].function != "start_agent":
            return [each for each in events[:count] if each.thread == event.thread or each is events[0]]
    for count, event in enumerate(events, 1):
        if event.stack[0].function == "Worker.__init__":
            return events[:count]
    return []


def way(events: Sequence[Event]) -> list[Event]:
    """Find the events that lead on, from the end: what hands over, what called that, what returned to it."""
    found: list[Event] = []
    leading: set[Place] = set()  # with its function: another one may have had that frame's id before
    for event in reversed(events):
        here, caller = event.stack[0], event.stack[1] if len(event.stack) > 1 else None
        if event.what == HAND_OVER:
            leading |= set(event.stack)
        elif event.what == GIVE and caller is not None and caller in leading:
            leading.add(here)
            found.append(event)
        elif event.what == TAKE and (here in leading or event is events[0] or event is events[-1]):
            leading.discard(here)  # before its call another one of it may have had that id
            found.append(event)
    return found[::-1]


def moves(events: Sequence[Event]) -> list[Move]:
    """The files that the way comes to, in order."""
    seen: list[str] = []
    found = []

    def come(file: str, how: str) -> None:
        if not seen or file != seen[-1]:
            found.append(Move(file, how, file in seen))
            seen.append(file)

    for event in events:
        here = event.stack[0]
        come(here.file, f"{here.function}()")
        if event.what == GIVE:
            come(event.stack[1].file, f"back in {event.stack[1].function}()")
    return found


def launch(tree: Path, folder: Path) -> None:
    """Run ``tiny`` to its end on a Ray of its own, recorded into ``folder``/out."""
    hook, out = folder / "hook", folder / "out"
    for path in (hook, out):
        path.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK.format(folder=str(Path(__file__).resolve().parent)))
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= {OUT: str(out), ROOT: str(tree), "PYTHONPATH": f"{hook}{os.pathsep}{tree}"}
    words = [f"name=trace-job-{os.getpid()}", f"storage.url={folder / 'runs'}", "cluster.device=cpu"]
    command = [sys.executable, "-m", "picotron_ray.launch", "tiny", *words, "cluster.max_workers=1"]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"the launch in {tree} ended with {done.returncode}: {done.stdout}{done.stderr}")


def report(tree: Path) -> Iterator[str]:
    """Launch in a tree; the lines to print."""
    with tempfile.TemporaryDirectory(prefix="trace-job-", ignore_cleanup_errors=True) as name:
        launch(tree, Path(name))
        records = [found for path in sorted((Path(name) / "out").iterdir()) if (found := events_of(path))]
    parts = [moves(way(events)) for events in records]
    passed = {move.file for part in parts for move in part}
    beside = {event.stack[0].file for events in records for event in events} - passed
    ups = sum(move.up for part in parts for move in part)
    yield f"{len(passed)} files on the way, {ups} steps back up; {len(beside)} files beside it"
    for part in parts:
        yield ""
        for move in part:
            yield f"  {'up ' if move.up else '   '}{move.file}: {move.how}"
    yield ""
    yield f"beside it: {', '.join(sorted(beside))}"


def main(trees: Sequence[str]) -> None:
    """Trace in one tree after the other."""
    for tree in trees or [str(Path(__file__).parents[3])]:
        root = Path(tree).resolve()
        print(f"{root.name}: ", end="", flush=True)
        with contextlib.suppress(BrokenPipeError):
            print("\n".join(report(root)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
