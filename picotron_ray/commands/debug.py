"""Commands that say what is wrong with a run: ``debug NAME bundle`` and its siblings.

The name of the run may stand before or after the question.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from picotron_ray.commands import debug_breaks, debug_bundle, debug_compare, debug_verdicts


class NameFirst(TyperGroup):
    """Group of commands that take the name of a run before their own name too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command first."""
        at = next((at for at, word in enumerate(args[:2]) if word in self.commands), 0)
        return super().parse_args(ctx, [args[at], *args[:at], *args[at + 1 :]] if args else args)


debug = typer.Typer(cls=NameFirst, no_args_is_help=True, help="What is wrong with a run.")
debug.command("bundle")(debug_bundle.bundle)
debug.command("deadlock")(debug_verdicts.deadlock)
debug.command("comm")(debug_verdicts.comm)
debug.command("break")(debug_breaks.break_)
debug.command("ls")(debug_breaks.ls)
debug.command("enable")(debug_breaks.enable)
debug.command("disable")(debug_breaks.disable)
debug.command("rm")(debug_breaks.rm)
debug.command("continue")(debug_breaks.continue_)
debug.command("inspect")(debug_breaks.inspect)
debug.command("trace")(debug_breaks.trace)
debug.command("attach")(debug_breaks.attach)
debug.command("inconsistency")(debug_compare.inconsistency)
debug.command("race")(debug_compare.race)
