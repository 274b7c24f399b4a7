"""Limit of open files (``ulimit -n``): what a run needs, for launch, which refuses less, and ``doctor``."""

from __future__ import annotations

import resource

from picotron_ray.errors import ConfigError

LEAST_FILES, GOOD_FILES = 1024, 4096
"""Open files: gloo and Ray hold a socket per peer and actor; Ray advises 65,536 for large clusters."""
MEND = "raise `ulimit -n` (65536)"


def too_few(files: int) -> bool:
    """Whether a Ray would not even start, or wait in silence; -1 is no limit.

    >>> [too_few(files) for files in (40, 1024, -1)]
    [True, False, False]
    """
    return 0 <= files < LEAST_FILES


def refuse_few_files() -> None:
    """Raise ConfigError where Ray, started by this process, would have too few: it would wait for ever."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if too_few(files):
        raise ConfigError(
            f"ulimit -n: saw {files} open files, expected at least {LEAST_FILES}, since Ray holds a socket"
            f" per peer and actor; {MEND}"
        )
