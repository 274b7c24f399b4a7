"""``python -m picotron_ray.launch CONFIG [key=value …]``: start a run, or attach to the run of its name.

Exit codes: 0 finished, 1 not followed to its end (left running, or ended by ``stop --now``), 2 bad config
(nothing started), 3 failed after its failure budget, 4 storage unusable, 130 stopped by request with a
checkpoint committed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import stat
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from picotron_ray.errors import NotRunningError, PicotronError

Config = Annotated[
    str,
    typer.Argument(help="a YAML file, or the name of a packaged recipe: quickstart, tiny, smollm-135m, ..."),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="dotted keys with YAML values: steps=50")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="machine-readable: JSON on stdout, its last line the result")
]
Detach = Annotated[bool, typer.Option("--detach", help="return as soon as the run is on its way")]

TakeOver = Annotated[
    bool,
    typer.Option(
        "--take-over",
        help="end a run of this name that goes on elsewhere, with what it has not committed, and go on from"
        " its newest commit; without it such a run is refused",
    ),
]
BeginAnew = Annotated[
    bool,
    typer.Option(
        "--begin-anew",
        help="begin at step 0 where storage has nothing of a run of this name that this machine remembers;"
        " without it such a launch is refused",
    ),
]


@contextlib.contextmanager
def reported(as_json: bool, launches: bool = False) -> Iterator[None]:
    """Turn an error that we raise on purpose into its lines and its exit code; others keep theirs.

    Args:
        launches: the command starts a run, which goes on where its output ends; else a pipe that nobody reads
            any more ends it without a word, as it ends other programs.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()  # here, or the interpreter complains of the pipe as it ends
    except PicotronError as raised:
        error = _with_its_end(raised)
        if as_json:
            step = {"step": error.step} if error.step else {}
            print(json.dumps({"error": str(error), "exit_code": error.exit_code, **step}), flush=True)
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    except OSError as error:
        if not _of_the_output(error):
            raise
        quiet = error.errno == errno.EPIPE and not launches
        _output_ended("" if quiet else error.strerror or str(error), launches)
        raise typer.Exit(UNREAD if quiet else 1) from None


def _with_its_end(error: PicotronError) -> PicotronError:
    """Say of a run that is over how it ended: a name that was never launched gets other words."""
    if not isinstance(error, NotRunningError):
        return error
    from picotron_ray.runtime.driver.known_end import in_place_of

    return in_place_of(error)


OUTPUT_ENDS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT)
"""Errors of a pipe that nobody reads any more, or of a log on a full disk."""


UNREAD = 128 + signal.SIGPIPE
"""Exit code that shells know of programs whose output nobody reads any more."""


def _of_the_output(error: OSError) -> bool:
    """Whether it is what is printed that is not taken, and not a file or a connection of the command."""
    return error.filename is None and any(_takes_no_more(stream, error.errno) for stream in (1, 2))


def _takes_no_more(stream: int, code: int | None) -> bool:
    try:
        mode = os.fstat(stream).st_mode
        if code == errno.EPIPE:
            poll = select.poll()
            poll.register(stream, 0)
            return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
        piped = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
        return code in OUTPUT_ENDS and not piped and not os.isatty(stream)
    except OSError:
        return False


def _output_ended(why: str, launches: bool) -> None:
    """Say on stderr, where that still can be, that the output takes no more, and print no more into it."""
    with contextlib.suppress(OSError, ValueError):  # the interpreter flushes it as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    goes_on = (
        "a run that was started goes on: ask with `picotron-ray status`, or launch it again to attach to it"
    )
    then = goes_on if launches else "free space, or have it printed elsewhere"
    with contextlib.suppress(OSError):
        if why:
            print(f"error: what is printed is not taken ({why}); {then}", file=sys.stderr)


def train(
    config: Config,
    overrides: Overrides = None,
    as_json: AsJson = False,
    detach: Detach = False,
    take_over: TakeOver = False,
    begin_anew: BeginAnew = False,
) -> None:
    """Run a job, or attach to the run of its name; SIGINT or SIGTERM stops it with a commit.

    Example: picotron-ray train quickstart steps=50 storage.url=./runs
    """
    with reported(as_json, launches=True):
        from picotron_ray.runtime.driver.driver import drive

        code = drive(
            config,
            overrides or [],
            as_json=as_json,
            detach=detach,
            take_over=take_over,
            begin_anew=begin_anew,
        )
    raise typer.Exit(code)


def main() -> None:
    """Take the command line of ``python -m picotron_ray.launch``.

    Example: python -m picotron_ray.launch quickstart steps=50

    >>> import sys
    >>> sys.argv = ["launch", "quickstart", "steps=0"]
    >>> try:
    ...     main()
    ... except SystemExit as end:
    ...     print("exit code", end.code)  # 2: a bad config, and nothing was started
    exit code 2
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(train)
    app()


if __name__ == "__main__":
    main()
