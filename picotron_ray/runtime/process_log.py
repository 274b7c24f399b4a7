"""Log of an actor's process on its standard output, which `picotron-ray logs` and `ray logs` show.

Each line of a record has the head that `observability.logs.lines` reads back, those of a traceback too: a
line is found by its level and rank whichever it is.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import TextIO

from picotron_ray.observability.logs.lines import NOWHERE, Place, head

Where = Callable[[], Place]


class _Formatter(logging.Formatter):
    """Formatter that puts a head before every line of a record."""

    def __init__(self) -> None:
        super().__init__("%(message)s")
        self.where: Where = lambda: NOWHERE

    def format(self, record: logging.LogRecord) -> str:
        begin = head(record.created, record.levelname, record.name, self.where())
        return "\n".join(begin + line for line in super().format(record).splitlines() or [""])


class _Stdout(logging.StreamHandler[TextIO]):
    """Handler of whatever ``sys.stdout`` is by then."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


_FORMATTER = _Formatter()


def begin() -> None:
    """Have this process's records printed: this package's from information on, others' from warnings on.

    May be called again.
    """
    # Ray takes an actor with any coroutine for one that must not wait, also in threads of its own
    os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")
    logging.getLogger("picotron_ray").setLevel(logging.INFO)
    root = logging.getLogger()
    if not any(isinstance(handler, _Stdout) for handler in root.handlers):
        handler = _Stdout()
        handler.setFormatter(_FORMATTER)
        root.addHandler(handler)


def belong(trace: str | None) -> None:
    """Have the records of a process that does not train carry the id of its run's trace."""
    if trace is not None:
        place(lambda: Place(trace=trace))


def place(where: Where) -> None:
    """Have records say from now on where in training this process is; ``where`` is called for each."""
    _FORMATTER.where = where
