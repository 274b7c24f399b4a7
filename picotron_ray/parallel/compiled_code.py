"""Code that torch.compile makes: shared by layers and generations, and what cannot be compiled.

Dynamo keeps compiled code with the code object of the function, which all blocks of a model share, and those
of the generations after it in the same process. Guards tell for which inputs and module an entry is. Each
layout, and evaluation beside training, has entries of its own. They are worth keeping for layouts that come
back, as a generation then compiles nothing. But Dynamo keeps a few entries only, and computes everything else
as it is written, without an error. So all code is dropped where one layout too many comes, and hitting the
limit is an error.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from picotron_ray.errors import LayoutError

KEPT = 4
"""Layouts whose code is kept."""
ENTRIES = 16
"""Of a function's code for one layout: rows of several sizes, training and evaluation, precision by part."""

BACKEND: str | Callable[..., Any] = "inductor"
"""Of `torch.compile`; tests that count graphs put in their own."""

COMPILERS = {"cuda": ("CC", "cc", "gcc", "clang"), "cpu": ("CXX", "c++", "g++", "clang++")}
"""By device, what names torch's compiler of host code, and what it looks for."""


class CompiledCode:
    """Layouts for which this process has compiled code."""

    def __init__(self) -> None:
        self._known: list[object] = []

    def begin(self, layout: object) -> None:
        """Make room for the code of ``layout``; where it has none yet and there is no room, all code goes."""
        import torch._dynamo  # takes a second

        torch._dynamo.config.recompile_limit = KEPT * ENTRIES
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        if layout in self._known:
            return
        if len(self._known) == KEPT:
            self.drop()
        self._known.append(layout)

    def drop(self) -> None:
        """Drop all compiled code, and whoever listens to the compiler."""
        torch._dynamo.reset()
        self._known.clear()


CODE = CompiledCode()


def compile_blocks(blocks: Mapping[str, nn.Module], *, one_graph: bool, backend: str | None = None) -> None:
    """Let torch.compile make the kernels of every block, at its first call.

    Only ``forward`` is compiled: FSDP's hooks and recomputation stay outside. Shapes are static.

    Args:
        blocks: by name.
        one_graph: refuse a block that is not one graph; else it may become several.
        backend: what makes the kernels; None: `BACKEND`.

    A call raises LayoutError where torch cannot compile a block so.
    """
    for name, block in blocks.items():
        made = torch.compile(block.forward, dynamic=False, fullgraph=one_graph, backend=backend or BACKEND)
        block.forward = telling(f"kernels.compile: block {name}", "false", made)


@cache
def missing_compiler(device: str) -> str:
    """Say what torch's compiler lacks here for a device (``cpu`` or ``cuda``); empty: nothing known."""
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    variable, *names = COMPILERS["cuda" if device == "cuda" else "cpu"]
    if any(shutil.which(name) for name in (os.environ.get(variable, ""), *names) if name):
        return ""
    return f"no compiler was found: ${variable}, {', '.join(names)}"


def telling(what: str, other: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled function so that it tells in one line what torch could not compile.

    Args:
        what: begin of the line.
        other: value of the key with which nothing is compiled.
    """
    from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, Unsupported, UserError

    def forward(*inputs: Any, **named: Any) -> Any:
        try:
            return inner(*inputs, **named)
        except FailOnRecompileLimitHit:
            why = f"would need more than {KEPT * ENTRIES} versions for the inputs that it meets"
        except (Unsupported, UserError) as error:
            why = f"is not one graph: {'; '.join(_reasons(str(error)))}"
        except BackendCompilerFailed as error:
            why = f"fails in torch's compiler: {str(error).strip().splitlines()[0]}"
        raise LayoutError(f"{what} {why}. Use {other}, or change the model")

    return forward


def _reasons(message: str) -> Iterator[str]:
    """Yield the lines of Dynamo's message that say what breaks the graph, and where in the model."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    yield lines[0].rstrip(".")
    yield from (line.rstrip(".") for line in lines if line.startswith("Developer debug context:"))
    yield from [line for line in lines if line.startswith("File ")][-1:]
