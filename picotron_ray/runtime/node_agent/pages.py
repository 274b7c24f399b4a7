"""Pages of a node's workers: what a folder has of them, and the end of the process that one tells of."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from picotron_ray.runtime.heartbeat import PageView, process_alive, read_page


def read_pages(folder: Path) -> list[PageView]:
    """Read the pages of a node's folder, of living and dead workers, by name."""
    return [page for path in sorted(folder.glob("*.page")) if (page := read_page(path)) is not None]


def is_alive(page: PageView) -> bool:
    """Whether the process that wrote a page lives."""
    return process_alive(page.pid, page.start_ticks)


def kill_worker(page: PageView | None) -> bool:
    """Kill the process of a page by SIGKILL; True where it was alive."""
    if page is None or not is_alive(page):
        return False
    os.kill(page.pid, signal.SIGKILL)
    return True
