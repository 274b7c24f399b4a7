"""Consent that a user gives at a door to what is refused, or waited for, without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Options(NamedTuple):
    """Names of a door's options, for the lines that recommend them."""

    take_over: str
    begin_anew: str


COMMAND = Options("--take-over", "--begin-anew")
PYTHON = Options("take_over=True", "begin_anew=True")


class Consent(NamedTuple):
    """Wishes of a user beside the job, and the ear for what is told meanwhile.

    Fields:
        take_over: a run of that name that goes on where this process cannot ask it is to be ended.
        begin_anew: a run of that name which this machine remembers is given up, where storage lacks it.
        options: what the door calls these two.
        say: told one line now and then.
        stopped: whether nobody waits any more.
    """

    take_over: bool = False
    begin_anew: bool = False
    options: Options = COMMAND
    say: Callable[[str], object] = bool
    stopped: Callable[[], bool] = bool


NOT_ASKED = Consent()
