"""A recording of steps on several ranks of a run: armed on all, begun at one boundary, fetched, removed."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import follow_run
from picotron_ray.runtime.driver.tool_orders import Answers, RunTools

POLL_S = 0.5
SILENCE_S = 300.0
"""Time without a change of any rank's state after which a recording is given up."""
MOST_STEPS = 1000
WORDS = {
    "armed": "waits for the next step to begin",
    "running": "records, once the steps to wait and to warm up have passed",
    "stopped": "has its steps, and all ranks stay while it is written",
    "saving": "writes",
    "done": "is done",
}
"""Words for the states of a recording."""
Say = Callable[[str], None]


def check_window(wait: int, warmup: int, active: int, recorded: str = "active") -> None:
    """Refuse a window that records nothing.

    Args:
        recorded: the option that the command names its recorded steps by.

    Raises:
        ConfigError: it does.
    """
    for name, value, least in (("wait", wait, 0), ("warmup", warmup, 0), (recorded, active, 1)):
        if not least <= value <= MOST_STEPS:
            raise ConfigError(f"--{name}: saw {value}, expected from {least} to {MOST_STEPS} steps")


def make_folder(option: str, folder: Path) -> Path:
    """Make a folder for results, and see that it takes files.

    Raises:
        ConfigError: it does not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(f"{option}: {folder} cannot be written: {error.strerror}") from error


@contextmanager
def results_in(option: str, folder: Path) -> Iterator[Path]:
    """See that a folder takes files, and leave it as it was where nothing comes of it.

    Whoever writes makes it by `make_folder`: until then none is there that was not before. After an error,
    folders that were not there before and are empty go again.

    Raises:
        ConfigError: it does not take files; nothing was changed.
    """
    wanted = (folder, *folder.parents)
    before = {path for path in wanted if os.path.exists(path)}  # False also where it may not be asked
    new = [path for path in wanted if path not in before]
    try:
        make_folder(option, folder)
    finally:
        _drop_empty(new)
    try:
        yield folder
    except BaseException:
        inside = [path for path in folder.glob("*") if path.is_dir()] if folder not in before else []
        _drop_empty([*inside, *new])
        raise


def _drop_empty(folders: Sequence[Path]) -> None:
    """Remove those of the folders, inner ones first, that hold nothing."""
    for folder in folders:
        with contextlib.suppress(OSError):  # it holds something, or is not there
            folder.rmdir()


def record(
    tools: RunTools, ranks: Sequence[int], order: Mapping[str, Any], say: Say = lambda line: None
) -> tuple[str, Answers]:
    """Record on these ranks, and wait until all are through; returns the recording's key, and what each says.

    Raises:
        ConfigError: a rank refuses, or cannot record; nothing stays behind.
        LostRunError: the run stands still.
    """
    if tools.held:
        raise ConfigError(
            f"run: {tools.run!r} is held after its step, as by a breakpoint: `picotron-ray debug continue"
            f" {tools.run}` first; no step passes meanwhile that could be recorded"
        )
    key = secrets.token_hex(8)
    armed = tools.to_all(ranks, {"what": "arm", "key": key, **order})
    refused = {rank: answer["refused"] for rank, answer in armed.items() if "refused" in answer}
    try:
        if refused:
            rank = min(refused)
            raise ConfigError(f"rank {rank}: {refused[rank]}")
        tools.all_of(ranks[:1], {"what": "go", "key": key})
        return key, _finished(tools, ranks, key, say)
    except BaseException:
        drop(tools, ranks, key)
        raise


def _finished(tools: RunTools, ranks: Sequence[int], key: str, say: Say) -> Answers:
    before: dict[int, Any] = {}
    changed_s, told = time.monotonic(), ""
    while time.monotonic() - changed_s < SILENCE_S:
        found = tools.to_all(ranks, {"what": "state", "key": key})
        states = {rank: (one.get("state", "none"), len(one.get("steps", ()))) for rank, one in found.items()}
        if states != before:
            before, changed_s = states, time.monotonic()
        said = ", ".join(
            f"rank {rank} {WORDS.get(state, state)}" for rank, (state, _) in [*states.items()][:8]
        )
        if said != told:
            say(said)
            told = said
        for rank, one in found.items():
            if one.get("state", "none") in ("failed", "none"):
                raise ConfigError(f"rank {rank}: {one.get('text') or one.get('refused')}")
        if all(one["state"] == "done" for one in found.values()):
            return found
        time.sleep(POLL_S)
    raise follow_run.LostRunError(
        f"run {tools.run}: no rank got further for {SILENCE_S:g} s; see `picotron-ray status {tools.run}`"
    )


def drop(tools: RunTools, ranks: Sequence[int], key: str) -> None:
    """Have ranks remove what they recorded."""
    tools.to_all(ranks, {"what": "drop", "key": key})


def fetch(tools: RunTools, rank: int, target: Path) -> int:
    """Fetch what a rank recorded into a file, whole or not at all; returns its bytes."""
    temporary = target.with_name(f".{target.name}.new")
    try:
        with temporary.open("wb") as file:
            for page in tools.recording(rank):
                file.write(page)
            size = file.tell()
        os.replace(temporary, target)
    except OSError as error:
        raise ConfigError(f"--to: {target} cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return size
