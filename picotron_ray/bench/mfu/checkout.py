"""Import of another framework's modules from the user's own checkout of it.

Its files import packages at the top that a step never calls here. Where one is missing, names stand in for it
while the checkout is being imported, and no longer: nothing else takes the package for installed. Such a name
may be subclassed, subscripted and used as a decorator during the import. A later call is refused by a line
that names it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from picotron_ray.errors import PicotronError


def import_checkout(
    peer: str, checkout: Path, modules: Mapping[str, str], not_called: Mapping[str, str]
) -> SimpleNamespace:
    """Import the modules of a checkout, each under a short name.

    Args:
        peer: what to call it in an error.
        modules: short name → name of the module, imported in this order.
        not_called: module → package without which that module is stood in for; its own, or one that it needs.

    Raises PicotronError where the checkout, or a package that it does need, cannot be imported.
    """
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    with _stand_ins(peer, not_called):
        try:
            return SimpleNamespace(**{key: importlib.import_module(name) for key, name in modules.items()})
        except ImportError as error:
            raise PicotronError(f"{peer}: {checkout} cannot be imported: {error}") from error


@contextlib.contextmanager
def _stand_ins(peer: str, not_called: Mapping[str, str]) -> Iterator[None]:
    """Give ``import`` a stand-in, inside, for every module whose package is not installed."""
    missing = [name for name, package in not_called.items() if importlib.util.find_spec(package) is None]
    added = {}
    for name in missing:
        package, _, rest = name.partition(".")
        whole = [package] if importlib.util.find_spec(package) is None else []
        for part in rest.split(".") if whole else []:
            whole.append(f"{whole[-1]}.{part}")
        added.update({each: _AbsentModule(peer, each) for each in [*whole, name] if each not in sys.modules})
    sys.modules.update(added)
    _Absent.importing = True
    try:
        yield
    finally:
        _Absent.importing = False
        for name in added:
            del sys.modules[name]


class _AbsentModule(ModuleType):
    """Stand-in for a module that is not there."""

    def __init__(self, peer: str, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._peer = peer

    def __getattr__(self, name: str) -> Any:
        return _absent(self._peer, self.__name__, name)


class _Absent(type):
    """Stand-in for anything that such a module would have under a name."""

    importing: bool
    """whether a checkout is being imported now"""
    peer: str
    whole: str

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        if _Absent.importing:
            return cls
        raise PicotronError(f"{cls.peer}: calls {cls.whole}, which is not installed")

    def __getattr__(cls, name: str) -> Any:
        return _absent(cls.peer, cls.whole, name)

    def __getitem__(cls, key: Any) -> Any:
        return cls


def _absent(peer: str, owner: str, name: str) -> Any:
    if name.startswith("__"):  # Python asks for these and must hear that there are none
        raise AttributeError(f"{owner}.{name}")
    return _Absent(name, (), {"peer": peer, "whole": f"{owner}.{name}"})
