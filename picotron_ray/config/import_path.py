"""Import paths of users' own code, as configs name it."""

from __future__ import annotations

import importlib
from typing import Any

from picotron_ray.errors import ConfigError


def import_object(key: str, path: str) -> Any:
    """Return the object that an import path ``package.module:name`` names.

    Raises ConfigError, one line that begins with ``key``.
    """
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"{key}: saw {path}, but importing {module} raises {one_line(error)}; every node must be able to"
            " import it: install it there, put it on PYTHONPATH, or launch from its folder"
        ) from error
    if not hasattr(found, name):
        raise ConfigError(f"{key}: saw {path}, but {module} has no {name}; name a function of that module")
    return getattr(found, name)


def one_line(error: BaseException) -> str:
    """Show an error of foreign code in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
