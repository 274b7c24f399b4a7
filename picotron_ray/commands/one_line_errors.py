"""Words of a command line that cannot be read, in the form of all other errors: one line, exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

UNREADABLE: type[Exception] = typer.BadParameter.__mro__[1]
"""Base of what the parser raises; newer versions of Typer bring a parser of their own."""
NUMBERS = {"float_parsing": "a number", "int_parsing": "a whole number"}


class OneLineGroup(TyperGroup):
    """Group of all commands, which says mistakes in one line; the parser draws a frame around them."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command that the words name; as its base but for the form of mistakes."""
        run = partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **extra)
        if not standalone_mode:
            return run()
        try:
            code = run()
        except UNREADABLE as error:
            if line := mistake_line(error):
                print(f"error: {line}", file=sys.stderr)
            sys.exit(2)
        except typer.Abort:
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


def mistake_line(error: Any) -> str:
    """Return what is wrong with the words, and what explains them; "" where the help was printed for none."""
    said = _value_line(error) or str(error.format_message()).strip().rstrip(".")
    if not said:
        return ""
    where = error.ctx.command_path if error.ctx is not None else "picotron-ray"
    return f"{said} (see `{where} --help`)"


def _value_line(error: Any) -> str:
    """Say a value that an option or argument does not take; "" where it is something else."""
    cause, param = error.__cause__, getattr(error, "param", None)
    if param is None or not isinstance(cause, ValidationError):
        return ""
    first = cause.errors(include_url=False)[0]
    name = next((word for word in param.opts if word.startswith("--")), param.metavar or param.name)
    expected = NUMBERS.get(first["type"]) or first["msg"].removeprefix("Input should be ")
    return f"{name}: saw {first['input']!r}, expected {expected}"
