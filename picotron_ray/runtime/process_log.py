"""Log of an actor's process on its standard output, which `picotron-ray logs` and `ray logs` show."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

FORMAT = "%(asctime)s %(levelname)s %(message)s"


class _Stdout(logging.StreamHandler[TextIO]):
    """Handler of whatever ``sys.stdout`` is by then."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def begin() -> None:
    """Have this process's lines printed, from information on; may be called again."""
    # Ray takes an actor with any coroutine for one that must not wait, also in threads of its own
    os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")
    package = logging.getLogger("picotron_ray")
    package.setLevel(logging.INFO)
    if not any(isinstance(handler, _Stdout) for handler in package.handlers):
        handler = _Stdout()
        handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
        package.addHandler(handler)
