"""Orders of operators to a run that goes on, and its nodes: what `picotron-ray pause` and its like call.

Each order carries the coordinator's term, and is given again where another one has taken over meanwhile, or
is only beginning: told twice, an order changes nothing. The coordinator's machine alone accepts or refuses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import follow_run
from picotron_ray.runtime.driver.run_connection import connect_to_run

PATIENCE_S = 60.0
"""Longest wait for an answer, over restarts of the coordinator."""


def pause(
    run: str, wait_s: float = 300.0, say: Callable[[str], object] = lambda line: None
) -> dict[str, Any]:
    """Pause a run: its state is committed, its workers end and free their devices, its agents stay.

    Args:
        wait_s: longest wait until it rests and all is committed; 0: returns once the order is accepted.
        say: takes a line on what is waited for.

    Returns the answer; ``step`` is the committed one, None where that was not waited for.

    Raises:
        ConfigError: there is no such run, or it is about to end.
        LostRunError: it does not rest in time; the order stands.
    """
    answer = _order(run, what="pause")
    if not wait_s:
        return {**answer, "step": None}
    say(answer["text"])
    coordinator, _ = connect_to_run(run)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        seen = follow_run.poll(coordinator, follow_run.ALL_SEEN)
        if seen is not None and seen["done"]:
            raise ConfigError(f"run: {run!r} ended as {seen['state']} before it could be paused")
        if seen is not None and seen["state"] == "paused":
            held = seen["orders"]["held_step"]
            if (seen["committed"] or 0) >= held:
                return {**answer, "step": held}
        time.sleep(follow_run.POLL_S)
    raise follow_run.LostRunError(
        f"run {run} is not at rest with all committed within {wait_s:g} s; the order stands: see"
        f" `picotron-ray status {run}`"
    )


def resume(run: str) -> dict[str, Any]:
    """Have a paused run go on, with the same samples; raises as `pause` does."""
    return _order(run, what="resume")


def resize(run: str, least: int | None = None, most: int | None = None) -> dict[str, Any]:
    """Change the fewest and the most workers of a run, which hold until its launch ends.

    Raises:
        ConfigError: neither is given; there is no such run; or no layout uses so many workers: the line says
            which numbers would do.
    """
    if least is None and most is None:
        raise ConfigError("resize: saw no number, expected the workers wanted, or --min and --max")
    for name, value in (("min", least), ("max", most)):
        if value is not None and value < 1:
            raise ConfigError(f"resize: saw {name}={value}, expected at least 1")
    return _order(run, what="resize", min_workers=least or 0, max_workers=most or 0)


def drain(run: str, node: str, left_s: float = 0.0) -> dict[str, Any]:
    """Have a run move off a node, which it gives back and does not take in again while its launch lasts.

    Args:
        node: its id in Ray, or the beginning of that.
        left_s: seconds that it has; 0: as a notice without a deadline, for which 30 s are assumed.

    Raises:
        ConfigError: no such run, or node of it; or it is the last one.
    """
    if not node:
        raise ConfigError("drain: saw no node, expected the beginning of its id (`picotron-ray nodes RUN`)")
    return _order(run, what="drain", node=node, left_s=left_s)


def nodes(run: str) -> list[dict[str, Any]]:
    """Nodes of a run with their workers, as `coordinator.node_rows` lists them."""
    coordinator, _ = connect_to_run(run)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        rows: Any = follow_run.ask(coordinator, "nodes")
        if rows is not None:
            return list(rows)
        time.sleep(follow_run.POLL_S)
    raise _silent(run)


def _order(run: str, **fields: Any) -> dict[str, Any]:
    """Give an order until it is judged; returns the answer.

    Raises:
        ConfigError: it is refused.
        LostRunError: nobody answers.
    """
    coordinator, _ = connect_to_run(run)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        seen = follow_run.poll(coordinator, follow_run.ALL_SEEN)
        if seen is not None:
            answer = follow_run.ask(coordinator, "order", seen["term"], fields)
            if answer is not None and answer["accepted"]:
                return {"run": run, **answer}
            if answer is not None and not answer["again"]:
                raise ConfigError(f"run {run}: {answer['text']}")
        time.sleep(follow_run.POLL_S)
    raise _silent(run)


def _silent(run: str) -> follow_run.LostRunError:
    return follow_run.LostRunError(
        f"the coordinator of run {run} has not answered for {PATIENCE_S:g} s; see `picotron-ray logs {run}`"
    )
