"""Coverage of processes that tests start: saved every second, and in the threads that Ray makes.

Tests end workers with SIGKILL on purpose, and a killed process never reaches coverage's exit handler, so
what was measured is saved every second. Ray runs the methods of an actor in threads made in C++, which
know nothing of Python's ``threading.settrace``, so each is given the trace function at its first call;
before that, importing torch and Ray in Ray's workers is not traced, which would take a second of each.
Python imports this module at start-up of every process that has this folder on its PYTHONPATH
(tests/conftest.py sees to that); without coverage running it does nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FLUSH_INTERVAL_S = 1.0
CONTEXT_POLL_S = 0.1
CONTEXT_FILE = os.environ.get("PICOTRON_TEST_CONTEXT", "")
"""Names the test that runs, where a run records which test touches which line (coverage_contexts.py)."""


_saving = threading.Lock()


def _save() -> None:
    import coverage

    current = coverage.Coverage.current()
    if current is not None:
        with _saving:
            current._collector.flush_data()


_context = ""


def follow_context() -> None:
    """Attribute what runs from now on to the test that the context file names."""
    global _context
    import coverage

    current = coverage.Coverage.current()
    if not CONTEXT_FILE or current is None:
        return
    with contextlib.suppress(FileNotFoundError), open(CONTEXT_FILE) as file:
        name = file.read()
        with _saving:
            if name and name != _context:
                _context = name
                current.switch_context(name)


_ended = threading.Event()


def _start_flushing() -> threading.Thread:
    flusher = threading.Thread(target=_flush_until_the_end, name="coverage-flush", daemon=True)
    flusher.start()
    return flusher


def _begin_anew() -> None:
    """In a forked process: the thread is not there, and it may have held the lock."""
    global _saving
    _saving = threading.Lock()
    atexit.register(_end_flushing, _start_flushing())


def _flush_until_the_end() -> None:
    sys.settrace(None)
    since_s = 0.0
    pause_s = CONTEXT_POLL_S if CONTEXT_FILE else FLUSH_INTERVAL_S
    while not _ended.wait(pause_s):
        follow_context()
        since_s += pause_s
        if since_s >= FLUSH_INTERVAL_S:
            since_s = 0.0
            _save()


def _end_flushing(flusher: threading.Thread) -> None:
    """A traced daemon thread that still runs while the interpreter is taken down crashes it now and then."""
    _ended.set()
    flusher.join()


class _TraceActorMethods:
    """An import hook that wraps Ray's maker of actor method executors, and is gone after that."""

    MODULE = "ray._private.function_manager"

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _wrap(module.FunctionActorManager)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap(manager: Any) -> None:
    make = manager._make_actor_method_executor

    def make_traced(self: Any, method_name: str, *arguments: Any, **named: Any) -> Callable[..., Any]:
        executor: Callable[..., Any] = make(self, method_name, *arguments, **named)
        if method_name == "__init__":
            return executor  # this is where torch is imported

        def traced(*arguments: Any, **named: Any) -> Any:
            if sys.gettrace() is None:
                sys.settrace(threading.gettrace())
            try:
                return executor(*arguments, **named)
            finally:
                if executor.__dict__.get("name") == "run_generation":  # its process may be killed right after
                    _save()

        traced.__dict__.update(executor.__dict__)
        traced.__name__ = executor.__name__
        return traced

    manager._make_actor_method_executor = make_traced


def _keep_modules() -> None:
    """Where sys.path has changed, a traced thread looks for the package anew and then takes every module
    away that came since, also one that another thread imports just then: that import fails.
    """
    import coverage

    current = coverage.Coverage.current()
    if current is not None and current._inorout is not None:
        current._inorout.set_matchers_depending_on_syspath = lambda: None  # type: ignore[method-assign]


if os.environ.get("COVERAGE_PROCESS_CONFIG"):
    _keep_modules()
    sys.meta_path.insert(0, _TraceActorMethods())  # type: ignore[arg-type]
    if any(word.endswith("default_worker.py") for word in sys.orig_argv):
        sys.settrace(None)
    atexit.register(_end_flushing, _start_flushing())
    os.register_at_fork(after_in_child=_begin_anew)
