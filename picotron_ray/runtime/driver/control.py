"""Requests to a run that goes on, is being launched or has ended: status, stop, a commit now, orders."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from picotron_ray.config.schema.service import SnapshotConfig
from picotron_ray.errors import ConfigError, StorageError
from picotron_ray.runtime.driver import ended_run, follow_run, launch_mark, waiting
from picotron_ray.runtime.driver.console import ProgressView, end_line
from picotron_ray.runtime.driver.run_connection import connect_to_run as connect_to_run
from picotron_ray.runtime.driver.run_connection import lives
from picotron_ray.runtime.driver.run_connection import refuse_no_name as refuse_no_name
from picotron_ray.runtime.driver.run_orders import drain as drain
from picotron_ray.runtime.driver.run_orders import nodes as nodes
from picotron_ray.runtime.driver.run_orders import pause as pause
from picotron_ray.runtime.driver.run_orders import resize as resize
from picotron_ray.runtime.driver.run_orders import resume as resume
from picotron_ray.runtime.ray_cluster import connect, kept_slots, local_ray
from picotron_ray.runtime.ray_cluster.kept_slots import MARKED_ALONE
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, agent_name, coordinator_name, run_folder

STOPPED = 130
"""Exit code of a launch whose run was stopped as asked."""
START_WAIT_S = 300.0
"""Longest wait of a stop for the coordinator of a launch that is under way."""
WAIT_LINE_S = 15.0


def status(run: str) -> dict[str, Any]:
    """The run's status with all events that its coordinator remembers.

    Of one that is being launched it has ``launcher``, a pid, of one that has ended ``gone`` (`ended_run`).

    Raises:
        ConfigError: no run of that name is known there.
        StorageError: it has ended, and keeps state that storage did not take.
    """
    refuse_no_name(run)
    try:
        coordinator, _ = connect_to_run(run)
    except ConfigError as error:
        return _without_coordinator(run, error)
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        seen = follow_run.poll(coordinator, 0)
        if seen is not None:
            return seen
        time.sleep(follow_run.POLL_S)
    raise follow_run.LostRunError(
        f"the coordinator of run {run} does not answer; see `picotron-ray logs {run}`"
    )


def _without_coordinator(run: str, error: ConfigError) -> dict[str, Any]:
    """Status of a run that has none yet, or none any more; raises ``error`` where nothing is known of it."""
    launcher = launch_mark.launcher(run)
    if launcher is not None:
        return {"run": run, "state": "starting", "done": False, "launcher": launcher}
    kept = _kept_step(run)
    if kept is not None:
        raise _keeps(run, kept) from error
    end = None if _has_ray(run) else ended_run.find_end(run)
    if end is None:
        raise error
    return end


def _has_ray(run: str) -> bool:
    return not os.environ.get("RAY_ADDRESS") and lives(run)


def stop(run: str, now: bool, console: Console, discard: bool = False) -> tuple[int, dict[str, Any] | None]:
    """Stop a run with a commit, or ``now`` without one; remove everything of it that is left.

    What storage could not take yet is deleted only where ``discard`` says so, which implies ``now``.

    One that is being launched is waited for. Returns an exit code, and the run's summary, None where it ended
    without one. The code is 0 where the run is over and nothing of it is lost, or was over before, else that
    of a launch.

    Raises:
        ConfigError: there is no such run, or it goes on and has something that is not committed.
        StorageError: it has ended, and keeps state that storage did not take.
        LostRunError: its launch takes too long.
    """
    refuse_no_name(run)
    _await_launch(run, console)
    now = now or discard
    if now and not discard:
        _refuse_uncommitted(run)
    lived = now and _has_ray(run)
    if _is_local_and_dead_or_unwanted(run, now, discard):
        what = "ended, without a commit" if lived else "ended what was left of it"
        deleted = ", and deleted what storage had not taken" if discard else ""
        console.print(f"run {run}: {what}{deleted}", markup=False)
        return 0, None
    try:
        coordinator, local = connect_to_run(run)
    except ConfigError as error:
        return 0, _end_the_rest(run, console, discard, error)
    if now:
        _end_on_cluster(run, discard)
        console.print(f"run {run}: ended on the cluster, without a commit", markup=False)
        return 0, None
    coordinator.request.remote("stop")
    with follow_run.without_rays_messages(), follow_run.signal_handlers() as signals:
        with ProgressView(console) as progress:
            final = follow_run.follow(
                run, coordinator, progress, signals, stop=True, local=local, attached=True
            )
        if final is not None:
            follow_run.take_down(local, coordinator)
    if final is None:
        console.print(f"left stopping; `picotron-ray status {run}` shows it", markup=False)
        return follow_run.DETACHED, None
    code = int(final["exit_code"])
    return (0 if code == STOPPED else code), dict(final["summary"])


def _await_launch(run: str, console: Console) -> None:
    """Wait until a launch that is under way has started the run's coordinator, or has given up.

    Raises:
        LostRunError: it takes too long; nothing was asked of it.
    """
    launcher = launch_mark.launcher(run)
    if launcher is None or _goes_on(run):
        return
    who = f"run {run} is being launched" + (f" by process {launcher}" if launcher else "")
    console.print(
        f"{who}: waiting for its coordinator, at most {START_WAIT_S:g} s, to stop it; an interrupt leaves it"
        " as it is",
        markup=False,
        soft_wrap=True,
    )
    began = told = time.monotonic()
    while launch_mark.launcher(run) is not None:
        now = time.monotonic()
        if now - began > START_WAIT_S:
            raise follow_run.LostRunError(
                f"{who} and had no coordinator within {START_WAIT_S:g} s; it goes on: interrupt that process,"
                " or ask again"
            )
        if now - told > WAIT_LINE_S:
            told = now
            console.print(f"waiting for the launch of {run} ({now - began:.0f} s)", markup=False)
        time.sleep(follow_run.POLL_S)


def _goes_on(run: str) -> bool:
    """Whether a run has a coordinator, which a launch only attaches to; leaves its Ray where it has none."""
    try:
        connect_to_run(run)
    except (ConfigError, connect.ClusterError):
        follow_run.disconnect()
        return False
    return True


def _end_the_rest(run: str, console: Console, discard: bool, error: ConfigError) -> dict[str, Any] | None:
    """End what is left of a run without a coordinator; returns the summary of one that had ended before.

    Raises:
        ConfigError: ``error``, where nothing is known of it.
        StorageError: it keeps slots that are not committed.
    """
    if launch_mark.launcher(run) is not None:
        raise error
    given = bool(os.environ.get("RAY_ADDRESS"))
    if _end_on_cluster(run, discard) if given else _end_local_rest(run, discard):
        where = " on the cluster" if given else ""
        console.print(f"run {run}: ended what was left of it{where}", markup=False)
        return None
    end = ended_run.find_end(run)
    if end is None:
        raise error
    console.print(end_line(end), markup=False, soft_wrap=True)
    return end["summary"] and dict(end["summary"])


def _end_local_rest(run: str, discard: bool) -> bool:
    """End the local Ray of a launch that was killed before it started a coordinator; False without one."""
    if not lives(run):
        return False
    follow_run.disconnect()
    return _is_local_and_dead_or_unwanted(run, now=True, discard=discard)


def _refuse_uncommitted(run: str) -> None:
    """Raise ConfigError where a living run has state that storage did not take."""
    try:
        coordinator, local = connect_to_run(run)
    except (ConfigError, connect.ClusterError):
        return  # it does not live
    seen = follow_run.poll(coordinator, follow_run.ALL_SEEN)
    if local is not None:
        follow_run.disconnect()
    if seen is not None and seen.get("uncommitted"):
        raise ConfigError(
            f"run: storage fails, and {run!r} at step {seen['step']} is committed up to step"
            f" {seen['committed'] or 0} only; stop it without --now, which waits for storage, or add"
            " --discard to lose the rest"
        )


def _is_local_and_dead_or_unwanted(run: str, now: bool, discard: bool = False) -> bool:
    """End what is left of a local run; False where there is none, or it lives and is wanted.

    Raises:
        StorageError: it keeps slots that are not committed.
    """
    if os.environ.get("RAY_ADDRESS") or not _was_here(run):
        return False
    with local_ray.locked(run):
        found = local_ray.find(run)
        if found is not None and found.alive and not now:
            return False
        folders = _folders(run, found)
        if found is None and kept_slots.kept_step(folders) is None:
            return False
        if found is not None:
            local_ray.stop(found, grace_s=0.0, discard=discard)
        if discard:
            kept_slots.discard(folders if found is None else kept_slots.entered(run))
        kept = kept_slots.kept_step(folders)
    if kept is not None:
        raise _keeps(run, kept)
    return True


def _was_here(run: str) -> bool:
    """Whether a run of that name was launched, or left something, here; to ask leaves nothing behind."""
    if local_ray.lock_file(run).exists() or local_ray.find(run) is not None:
        return True
    return kept_slots.kept_step(_folders(run, None)) is not None


def _folders(run: str, found: LocalRay | None) -> list[Path]:
    """Folders of a run: those of its local Ray, or the default one, and all that keep slots of it."""
    known = map(Path, found.folders) if found else [_default_folder(run)]
    return list(dict.fromkeys([*known, *kept_slots.entered(run)]))


def _default_folder(run: str) -> Path:
    """Folder of a run of which no local Ray is known any more, unless its config named another one."""
    return run_folder(SnapshotConfig().folder, run)


def _keeps(run: str, step: int) -> StorageError:
    emptied = ended_run.emptied_storage(run)
    first = f"{emptied} holds nothing of it any more: restore that from a copy and then " if emptied else ""
    return StorageError(
        f"run: {run!r} has ended and keeps step {step} in memory, which is not committed;"
        f" {first}launch it again to commit that, or delete it with `picotron-ray stop {run} --discard`"
    )


def _kept_step(run: str) -> int | None:
    """Newest step that a run which has ended keeps, on the connected cluster or this machine."""
    if not os.environ.get("RAY_ADDRESS"):
        return kept_slots.kept_step(_folders(run, local_ray.find(run)))
    from picotron_ray.runtime.ray_cluster.placement import kept_on, living_nodes  # imports Ray

    return max(kept_on(living_nodes(), run, SnapshotConfig().folder, False).values(), default=None)


def _end_on_cluster(run: str, discard: bool) -> bool:
    """End what lives of a run on the connected cluster; False where nothing of it was there.

    Raises:
        StorageError: it keeps slots that are not committed.
    """
    killed = kill_actors(run, discard)
    from picotron_ray.runtime.ray_cluster.placement import kept_on, living_nodes  # imports Ray

    kept = kept_on(living_nodes(), run, SnapshotConfig().folder, discard)
    if kept and not discard:
        raise _keeps(run, max(kept.values()))
    return bool(killed or kept)


def kill_actors(run: str, discard: bool = False) -> int:
    """Kill all actors of a run on the connected cluster, remove its folders; returns how many there were.

    Slots that are marked as not committed stay, unless ``discard`` says otherwise.
    """
    import ray
    from ray.util import list_named_actors

    named = [entry for entry in list_named_actors(all_namespaces=True) if entry["namespace"] == NAMESPACE]
    names = {entry["name"] for entry in named if entry["name"].startswith(f"{run}/")}
    if coordinator_name(run) in names:  # first, or it would start new workers for the ones killed here
        _kill(coordinator_name(run))
    agents = [ray.get_actor(name, NAMESPACE) for name in names if name.startswith(agent_name(run, ""))]
    ray.wait(
        [agent.close.remote(None, None if discard else MARKED_ALONE) for agent in agents],
        num_returns=len(agents),
        timeout=15,
    ) if agents else None
    for name in names - {coordinator_name(run)}:
        _kill(name)
    return len(names)


def _kill(name: str) -> None:
    import ray

    try:
        ray.kill(ray.get_actor(name, NAMESPACE))
    except ValueError:
        return  # it ended by itself in between


def checkpoint_now(run: str, timeout_s: float, say: Callable[[str], object] = lambda line: None) -> int:
    """Ask for a commit and wait until one newer than the present one is there; returns its step.

    A rewind meanwhile makes an older one the present one.

    Args:
        say: takes a line on what keeps the commit waiting, at once and then each ``WAIT_LINE_S``.
    """
    coordinator, _ = connect_to_run(run)
    seen_first = status(run)
    before = int(seen_first["committed"] or 0)
    if seen_first["state"] == "paused" and before >= seen_first["step"]:
        return before
    follow_run.tell(coordinator, run, "checkpoint", timeout_s)
    deadline, told_s = time.monotonic() + timeout_s, -WAIT_LINE_S
    what = ""
    while time.monotonic() < deadline:
        seen = follow_run.poll(coordinator, 0)
        if seen is not None and (seen["committed"] or 0) > before:
            return int(seen["committed"])
        if seen is not None:
            before = min(before, int(seen["committed"] or 0))
        if seen is not None and seen["done"]:
            break
        what = "" if seen is None else waiting.blocked(seen)
        if what and time.monotonic() - told_s >= WAIT_LINE_S:
            told_s = time.monotonic()
            say(f"run {run} commits once it trains: waiting for {what}")
        time.sleep(follow_run.POLL_S)
    why = f", waiting for {what}" if what else ""
    raise follow_run.LostRunError(
        f"run {run} made no new commit within {timeout_s:g} s{why}; see `picotron-ray status {run}`"
    )
