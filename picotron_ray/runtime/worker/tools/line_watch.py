"""Watch over lines of code as they are run, limited to the functions that have them.

Since Python 3.12 ``sys.monitoring`` puts an event on those functions alone, in every thread. Before,
``sys.settrace`` looks at each call of the thread that trains, and at the lines of those functions alone.
While no line is watched neither is there, so that nothing is slower.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

OnLine = Callable[[FrameType, int], None]
Lines = Mapping[str, Collection[int]]
"""Watched lines by file, as code names it."""
TOOL = 4  # of sys.monitoring's six, one that no debugger, profiler or coverage claims
NAME = "picotron-ray"


def loaded_files(tail: str) -> list[str]:
    """Files of loaded modules whose path is, or ends with, ``tail``."""
    wanted = Path(tail).parts
    paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return sorted(path for path in paths if path and Path(path).parts[-len(wanted) :] == wanted)


def function_lines(file: str) -> set[int]:
    """Lines of a file that its functions run.

    Raises:
        OSError, SyntaxError: it cannot be read, or not parsed.
    """
    top = compile(Path(file).read_text(), file, "exec")
    found: set[int] = set()
    for code in _inner(top):
        if code is not top and code.co_flags & 0x1:  # CO_OPTIMIZED: a function, and no body of a class
            found |= {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno}
    return found


def _inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _inner(constant)


class LineWatch:
    """Watch of one thread; ``set`` is called by that thread."""

    def __init__(self, on_line: OnLine) -> None:
        """``on_line``: hears of each pass of a watched line, before it is run."""
        self._on_line = on_line
        self._lines: dict[str, frozenset[int]] = {}
        self._matches: dict[CodeType, bool] = {}
        self._before: Any = None
        self._tracing = False
        self._codes: list[CodeType] = []

    def set(self, lines: Lines) -> None:
        """Watch these lines from now on, instead of any before."""
        self.clear()
        self._lines = {file: frozenset(numbers) for file, numbers in lines.items() if numbers}
        if not self._lines:
            return
        if hasattr(sys, "monitoring"):
            self._monitor()
        else:
            self._trace()

    def clear(self) -> None:
        """Watch nothing."""
        self._lines, self._matches = {}, {}
        if self._codes:
            self._unmonitor()
        if self._tracing:
            self._tracing = False
            sys.settrace(self._before)
            self._before = None

    def _has(self, code: CodeType) -> bool:
        """Whether a function runs a watched line; remembered."""
        found = self._matches.get(code)
        if found is None:
            wanted = self._lines.get(code.co_filename, frozenset())
            found = bool(wanted) and any(line in wanted for _, _, line in code.co_lines())
            self._matches[code] = found
        return found

    # --- sys.settrace ------------------------------------------------------------------------------

    def _trace(self) -> None:
        self._before, self._tracing = sys.gettrace(), True
        frame: FrameType | None = sys._getframe()
        while frame is not None:  # functions that have been entered already
            if self._has(frame.f_code):
                frame.f_trace = self._line
            frame = frame.f_back
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if self._tracing and self._has(frame.f_code) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._tracing:
            return None
        if event == "line" and frame.f_lineno in self._lines.get(frame.f_code.co_filename, ()):
            self._on_line(frame, frame.f_lineno)
        return self._line

    # --- sys.monitoring ----------------------------------------------------------------------------

    def _monitor(self) -> None:
        monitoring = sys.monitoring  # type: ignore[attr-defined]
        if monitoring.get_tool(TOOL) is None:
            monitoring.use_tool_id(TOOL, NAME)
        monitoring.register_callback(TOOL, monitoring.events.LINE, self._monitored)
        functions = (each for each in gc.get_objects() if isinstance(each, FunctionType))
        codes = {code for each in functions for code in _inner(each.__code__)}
        self._codes = [code for code in codes if self._has(code)]
        for code in self._codes:
            monitoring.set_local_events(TOOL, code, monitoring.events.LINE)
        monitoring.restart_events()  # of lines that were disabled under other breakpoints

    def _unmonitor(self) -> None:
        monitoring = sys.monitoring  # type: ignore[attr-defined]
        for code in self._codes:
            monitoring.set_local_events(TOOL, code, 0)
        self._codes = []

    def _monitored(self, code: CodeType, line: int) -> Any:
        if line not in self._lines.get(code.co_filename, ()):
            return sys.monitoring.DISABLE  # type: ignore[attr-defined]
        self._on_line(sys._getframe(1), line)
        return None
