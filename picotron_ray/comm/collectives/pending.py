"""Collectives of this process that are issued and not yet waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Pending:
    """Count of operations under way; any thread may change it.

    Example::

        >>> pending = Pending()
        >>> pending.issue()
        >>> pending.count
        1
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def issue(self) -> None:
        """Note that one begins."""
        with self._lock:
            self.count += 1

    def end(self) -> None:
        """Note that one was waited for."""
        with self._lock:
            self.count = max(0, self.count - 1)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Issue one, and end it once the body has run; one that fails stays pending until `clear`."""
        self.issue()
        yield
        self.end()

    def clear(self) -> None:
        """Forget all: their groups are gone."""
        with self._lock:
            self.count = 0


PENDING = Pending()
"""Of this process."""
