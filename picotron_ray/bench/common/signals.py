"""End of a benchmark by SIGTERM: it takes along what it started, as Ctrl-C does."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def sigterm_exits() -> Iterator[None]:
    """Raise SystemExit (code 143) on SIGTERM inside, so that every ``finally`` runs."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
