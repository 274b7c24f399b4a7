"""Slots that a run could not commit before it ended, kept in their nodes' folders for its next launch.

``mark`` leaves a marker in a node's folder. It lists the slots, and holds the newest generation that the
node knew of. At the run's end ``strip`` removes everything else. A folder with a marker outlives its agent,
its Ray and all cleaning up. The next launch's agents move the slots into folders of their own
(``take_over``), report them, and let them go once they are committed (``let_go``). ``discard`` deletes them
uncommitted: only the word of a user does that.

Whatever is killed in between: the marker is written before files move, and unlinked before they are deleted.
Slots fill their file system, and a marker needs room there: an agent reserves it early (`reserved_room`).
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from blake3 import blake3

from picotron_ray.checkpoint.snapshot.ledger_spill import SUFFIX
from picotron_ray.coordinator.messages import Source
from picotron_ray.runtime.ray_cluster import names, reserved_room
from picotron_ray.runtime.ray_cluster.private_folder import is_own, remove_tree, write_text

log = logging.getLogger(__name__)
MARKER = "kept.json"
ASIDE = ".marker"
"""Suffix of a marker that is on disk, beside the notes of where slots are kept."""
MARKED_ALONE = (0, 0, 0)
"""Key of a state that no slot has: an agent that is to keep that keeps what is marked already."""


def key_of(keep: Source | None, finished: bool) -> tuple[int, ...] | None:
    """Return what an agent is told to keep at the end of a run (``Agent.close``).

    Args:
        keep: state that could not be committed; without a generation: all slots; None: none.
        finished: the run is done; else slots that are marked already stay too.
    """
    if keep is None:
        return None if finished else MARKED_ALONE
    writer = keep.generation
    return () if writer is None else (writer.term, writer.n, keep.step)


def read_marker(folder: Path) -> dict[str, Any] | None:
    """``{"slots": {file: step}, "spec": …, "run": …}`` of a folder that keeps slots; None where none is."""
    try:
        marker: dict[str, Any] = json.loads((folder / MARKER).read_text())
    except FileNotFoundError:
        return None
    marker["slots"] = {name: step for name, step in marker["slots"].items() if Path(name).name == name}
    return {"run": "", **marker}


def marker_bytes(max_workers: int) -> int:
    """Room that the marker of a node takes at most, in a run of so many workers: most of it is the spec."""
    return 16_384 + 512 * max_workers


def is_foreign(marker: dict[str, Any], run: str) -> bool:
    """Whether a marker is of another run than the one of that identity; an unknown one may be any run's."""
    return bool(run and marker["run"]) and marker["run"] != run


def mark(folder: Path, slots: dict[str, int], spec: Any, run: str = "") -> None:
    """Mark slots (file: step) of a node's folder as kept.

    Args:
        spec: the newest generation's, as JSON; a later launch may find no log entry of it.
        run: identity of the run; "" where it is not known.

    Raises:
        OSError: there is no room for the marker; what was marked before is.
    """
    reserved_room.write(folder / MARKER, json.dumps({"slots": slots, "spec": spec, "run": run}))
    _enter(folder.parent)


def mark_alone(folder: Path, slots: dict[str, int], spec: Any, run: str = "") -> None:
    """Mark slots of dead workers; other slots and all pages go first, to make room for the marker."""
    for path in (*folder.glob("*.slot"), *folder.glob("*.page"), *folder.glob("*.telemetry")):
        if path.name not in slots:
            path.unlink()
    mark(folder, slots, spec, run)


def mark_aside(folder: Path, slots: dict[str, int], spec: Any, run: str = "") -> None:
    """Mark slots by a link to a marker on this machine's disk; a short link takes no room itself."""
    index = names.kept_index(folder.parent.name)
    index.mkdir(parents=True, exist_ok=True)
    aside = index / f"{blake3(bytes(folder)).hexdigest()[:16]}{ASIDE}"
    write_text(aside, json.dumps({"slots": slots, "spec": spec, "run": run}), durable=True)
    link = folder / f"{MARKER}.new"
    link.unlink(missing_ok=True)
    link.symlink_to(aside)
    link.rename(folder / MARKER)
    _enter(folder.parent)


def _enter(run_folder: Path) -> None:
    """Note where slots are kept, for whoever does not know ``snapshot.folder`` (``stop``)."""
    index = names.kept_index(run_folder.name)
    try:
        index.mkdir(parents=True, exist_ok=True)
        write_text(index / blake3(bytes(run_folder)).hexdigest()[:16], str(run_folder))
    except OSError as error:
        log.warning("%s keeps slots, which only a launch will find: %s", run_folder, error)


def entered(run: str) -> list[Path]:
    """Run folders of this machine that keep slots of a run; entries of others are removed."""
    found = []
    for entry in sorted(names.kept_index(run).glob("*")):
        if entry.suffix == ASIDE:
            continue
        folder = Path(entry.read_text())
        if folder.name == run and keeping([folder]):
            found.append(folder)
        else:
            entry.unlink(missing_ok=True)
    return found


def strip(folder: Path) -> None:
    """Remove everything but the kept slots from the folder of a node whose processes are gone."""
    marker = read_marker(folder)
    for path in folder.iterdir():
        if path.name != MARKER and (marker is None or path.name not in marker["slots"]):
            path.unlink(missing_ok=True)  # a burial may still be under way


def take_over(folder: Path, other: Path) -> None:
    """Move the slots that ``other`` keeps into ``folder``, which keeps them from now on."""
    theirs, mine = read_marker(other), read_marker(folder) or {"slots": {}, "spec": None, "run": ""}
    assert theirs is not None
    if is_foreign(theirs, mine["run"]):
        log.warning("%s keeps slots of another run than %s: they stay there", other, folder)
        return
    specs = [spec for spec in (mine["spec"], theirs["spec"]) if spec]
    newest = max(specs, key=lambda spec: (spec["id"]["term"], spec["id"]["n"]), default=None)
    mark(folder, {**mine["slots"], **theirs["slots"]}, newest, theirs["run"] or mine["run"])
    for name in theirs["slots"]:
        if (other / name).exists():  # else an earlier take-over was cut short after it
            (other / name).rename(folder / name)
    if _moved_ledger(folder, other):
        remove_node(other)
    else:
        remove_tree(other)


def _moved_ledger(folder: Path, other: Path) -> bool:
    """Move what was spilled of the ledgers of slots; False where some of it stays where it is."""
    mine = names.ledger_folder(folder)
    try:
        for path in names.ledger_folder(other).glob(f"*{SUFFIX}"):
            mine.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.rename(mine / path.name)
    except OSError as error:
        log.warning("spilled ledgers are not moved to %s: %s", mine, error)
        return False
    return True


def let_go(folder: Path, slots: Collection[str], dead: Iterable[str]) -> None:
    """Unmark slots that are in storage by now, and delete those that ``dead`` workers left.

    A living worker goes on writing into its files.
    """
    marker = read_marker(folder)
    if marker is None:
        return
    left = {name: step for name, step in marker["slots"].items() if name not in slots}
    if left:
        mark(folder, left, marker["spec"], marker["run"])
    else:
        reserved_room.remove(folder / MARKER)
    for name in dead:
        (folder / name).unlink(missing_ok=True)


def keeping(run_folders: Iterable[Path]) -> list[Path]:
    """Node folders below a run's folders that keep slots."""
    found = sorted(marker.parent for folder in run_folders for marker in folder.glob(f"*/{MARKER}"))
    return [folder for folder in found if is_own(folder)]


def kept_step(run_folders: Iterable[Path]) -> int | None:
    """Newest step that is kept below a run's folders; None where nothing is."""
    markers = [read_marker(folder) for folder in keeping(run_folders)]
    return max((step for marker in markers if marker for step in marker["slots"].values()), default=None)


def foreign_step(run_folders: Iterable[Path], run: str) -> int | None:
    """Newest step that is kept below a run's folders for another run of its name; None where nothing is."""
    markers = [read_marker(folder) for folder in keeping(run_folders)]
    steps = [s for marker in markers if marker and is_foreign(marker, run) for s in marker["slots"].values()]
    return max(steps, default=None)


def kept_elsewhere(run: str, bases: Collection[str], identity: str) -> tuple[int, str] | None:
    """Newest step of a run that this machine keeps where no launch with these folders looks, and where.

    Args:
        bases: the launch's ``snapshot.folder`` and ``overflow_folder``.
        identity: of the run; what another run of its name keeps does not count.

    Returns:
        the step and the ``snapshot.folder`` of the launch that kept it; None where nothing is kept so.
    """
    looked = {run_folder.absolute() for run_folder in (names.run_folder(base, run) for base in bases)}
    found = []
    for entry in names.kept_index(run).glob("*"):  # left alone: on a shared disk it may be another node's
        folder = Path(entry.read_text())
        if folder.name != run or folder in looked:
            continue
        markers = [read_marker(path) for path in keeping([folder])]
        steps = [s for m in markers if m and not is_foreign(m, identity) for s in m["slots"].values()]
        found += [(step, str(folder.parent.parent)) for step in steps]
    return max(found, default=None)


def foreign_text(step: int, run: str) -> str:
    """Words for slots of a run that is not the one in storage: another, or one whose folder was emptied."""
    return (
        f"saw step {step} kept in memory of a run {run!r} that is not the one in storage.url; launch with the"
        " storage.url it had (restored from a copy where it was emptied or removed) to commit it, choose"
        f" another name, or `picotron-ray stop {run} --discard`"
    )


def kept_here(run: str, base: str, discarded: bool) -> int | None:
    """Look for kept slots of a run on this machine and, where ``discarded``, delete them; returns their step.

    Args:
        base: a ``snapshot.folder`` to look into besides those that were noted.
    """
    folders = list(dict.fromkeys([names.run_folder(base, run), *entered(run)]))
    step = kept_step(folders)
    if discarded and step is not None:
        discard(folders)
    return step


def kept_bytes(run_folder: Path) -> int:
    """Size of all slots kept below a run's folder."""
    return sum(path.stat().st_size for folder in keeping([run_folder]) for path in folder.glob("*.slot"))


def remove_rest(run_folder: Path) -> None:
    """Remove what a dead run left below its folder, but the slots that it keeps."""
    spared = keeping([run_folder])
    for path in spared:
        strip(path)
    for path in run_folder.iterdir() if run_folder.is_dir() else ():
        if path not in spared:
            remove_node(path)
    if not spared:
        remove_tree(run_folder)


def discard(run_folders: Iterable[Path]) -> None:
    """Delete everything below a run's folders, kept slots included."""
    for folder in run_folders:
        for path in folder.iterdir() if folder.is_dir() else ():
            remove_node(path)
        remove_tree(folder)


def remove_node(folder: Path) -> None:
    """Remove the folder of a node that is gone, and what was spilled of its slots' ledgers."""
    remove_tree(folder)
    spilled = names.ledger_folder(folder)
    remove_tree(spilled)
    with contextlib.suppress(OSError):  # on a shared home, or as its disk did not work
        spilled.parent.rmdir()
