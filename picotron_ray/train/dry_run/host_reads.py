"""Places where the host reads a value from the device, for which it would wait.

Operators that read are seen by the dispatcher. ``cpu`` and ``numpy`` of a tensor are no operators where the
device is the CPU itself, as in a dry run: those methods are watched. ``to("cpu")`` is not seen.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import picotron_ray

READS = {
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount"),
        *("_unique2", "unique_consecutive"),
    )
}
"""Operators that wait for the device on CUDA: they give the host a value, or a shape that a value decides."""
WATCHED = ("cpu", "numpy", "tolist")
_PACKAGE = Path(picotron_ray.__file__).parent
_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parent), contextlib.__file__)


class HostReads:
    """Reads by place, while `watching`.

    Fields:
        found: numbers of reads by ``file:line in function``.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._inside = False

    def see(self, func: Any) -> None:
        """Note an operator, if it reads."""
        if func._schema.name in READS and not self._inside:
            self.found[place_in_code(sys._getframe(1))] += 1

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Enter methods of tensors that tell of themselves."""
        with contextlib.ExitStack() as stack:
            for name in WATCHED:
                plain = getattr(Tensor, name)
                stack.enter_context(patch.object(Tensor, name, self._told(plain)))
            yield

    def _told(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(tensor: Tensor, *args: Any, **named: Any) -> Any:
            outer, self._inside = self._inside, True
            try:
                if not outer:
                    self.found[place_in_code(sys._getframe(1))] += 1
                return plain(tensor, *args, **named)
            finally:
                self._inside = outer

        return method


def place_in_code(frame: Any) -> str:
    """Return the innermost place above a frame that is neither torch's nor the dry run's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_SKIPPED):
            path = Path(file)
            short = path.relative_to(_PACKAGE.parent) if path.is_relative_to(_PACKAGE) else path.name
            return f"{short}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown"
