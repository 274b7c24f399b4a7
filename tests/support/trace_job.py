"""A config's way from the command line to the worker, traced: ``python tests/support/trace_job.py [TREE]``.

Launches the recipe ``tiny`` from the sources in TREE (default: the tree that this file stands in) with a
profile function in every process, and prints where the config goes. Needs the package's dependencies, and
nothing else; it runs on any commit that has ``python -m picotron_ray.launch``.

Definitions, the same for every tree:

* A *config* is a ``JobConfig``, the raw mapping of one (it has the keys ``model`` and ``data``), or a tuple,
  a frozen record or a list of arguments that holds one of these.
* The config *passes* a file where a function of that file takes it as an argument or gets it returned.
* The *way* is that part which leads on: functions that hand it to the next process, that called those with
  it, or that return it to a function on the way. The driver's part ends where the coordinator is handed the
  config, the coordinator's where the first worker is, the worker's where its constructor is entered.
* What takes the config and gives something else back (a check, an estimate, a plan) lies *beside* the way:
  counted too, on its own line.
* A *step back up* is a move to a file where the way has been before: a return of the config to its caller
  in another file, or a second call into a file that it had left. Each process begins with no file seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

OUT, ROOT = "TRACE_JOB_OUT", "TRACE_JOB_ROOT"
RUN = "trace-job"


# --- in every process of the run ---------------------------------------------------------------------------


def is_config(value: Any, depth: int = 0) -> bool:
    """Whether a value is a config, or holds one directly."""
    if type(value).__name__ == "JobConfig":
        return True
    if isinstance(value, dict):
        return "model" in value and "data" in value
    if depth:
        return False
    if isinstance(value, tuple | list):
        return any(is_config(item, 1) for item in value)
    fields = getattr(type(value), "__dataclass_fields__", None)
    frozen = fields is not None and type(value).__dataclass_params__.frozen
    return bool(frozen) and any(is_config(getattr(value, name, None), 1) for name in fields)


def arguments(frame: FrameType) -> Iterator[Any]:
    """What a call was given, ``self`` included."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    values = frame.f_locals
    yield from (values[name] for name in code.co_varnames[:count] if name in values)


class Recorder:
    """A profile function that writes one JSON line per config that is taken, returned or handed over."""

    def __init__(self, folder: Path, package: str) -> None:
        self._package = package
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._done = False

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        if self._done or event not in ("call", "return"):
            return
        name = frame.f_code.co_filename
        if name.endswith("ray/actor.py") and frame.f_code.co_name == "_remote" and event == "call":
            if any(is_config(given) for given in frame.f_locals.get("args") or ()):
                self._write("hand over", frame)
        elif name.startswith(self._package):
            if event == "call" and frame.f_lasti <= 2 and any(map(is_config, arguments(frame))):
                self._write("take", frame)
            elif event == "return" and is_config(value):
                self._write("give", frame)

    def _write(self, what: str, frame: FrameType) -> None:
        stack, at = [], frame if what != "hand over" else frame.f_back
        while at is not None:
            if at.f_code.co_filename.startswith(self._package):
                name = at.f_code.co_filename[len(self._package) :]
                stack.append([name, at.f_code.co_qualname, id(at)])
            at = at.f_back
        self._file.write(json.dumps({"what": what, "thread": threading.get_ident(), "stack": stack}) + "\n")
        self._done = what == "take" and stack[0][1] == "Worker.__init__"


def record() -> None:
    """Called at start-up of each process."""
    recorder = Recorder(Path(os.environ[OUT]), os.path.join(os.environ[ROOT], "picotron_ray", ""))
    threading.setprofile(recorder)
    sys.setprofile(recorder)


# --- afterwards --------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """One line of a process's record; ``stack`` has (file, function, frame), innermost first."""

    what: str
    thread: int
    stack: list[tuple[str, str, int]]


def events_of(path: Path) -> list[Event]:
    lines = map(json.loads, path.read_text().splitlines())
    return [Event(at["what"], at["thread"], [tuple(frame) for frame in at["stack"]]) for at in lines]


if __name__ == "__main__":
    tree = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2]).resolve()
    folder = Path(tempfile.mkdtemp(prefix="trace-job-"))
    (folder / "hook").mkdir()
    (folder / "out").mkdir()
    hook = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nimport trace_job\ntrace_job.record()\n"
    (folder / "hook" / "sitecustomize.py").write_text(hook)
    env = {
        **os.environ,
        OUT: str(folder / "out"),
        ROOT: str(tree),
        "PYTHONPATH": f"{folder / 'hook'}:{tree}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "picotron_ray.launch",
            "tiny",
            f"name={RUN}",
            f"storage.url={folder}/runs",
            "cluster.device=cpu",
            "cluster.max_workers=1",
        ],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    print(done.returncode, done.stdout[-1500:], done.stderr[-1500:], folder)
