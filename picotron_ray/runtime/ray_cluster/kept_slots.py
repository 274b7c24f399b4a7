"""Slots that a run could not commit before it ended, kept in their nodes' folders for its next launch.

``mark`` leaves a marker in a node's folder. It lists the slots, and holds the newest generation that the
node knew of. At the run's end ``strip`` removes everything else. A folder with a marker outlives its agent,
its Ray and all cleaning up. The next launch's agents move the slots into folders of their own
(``take_over``), report them, and let them go once they are committed (``let_go``). ``discard`` deletes them
uncommitted: only the word of a user does that.

Whatever is killed in between: the marker is written before files move, and unlinked before they are deleted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

MARKER = "kept.json"
MARKED_ALONE = (0, 0, 0)
"""Key of a state that no slot has: an agent that is to keep that keeps what is marked already."""


def read_marker(folder: Path) -> dict[str, Any] | None:
    """``{"slots": {file: step}, "spec": …}`` of a folder that keeps slots; None where it keeps none."""
    try:
        marker: dict[str, Any] = json.loads((folder / MARKER).read_text())
    except FileNotFoundError:
        return None
    marker["slots"] = {name: step for name, step in marker["slots"].items() if Path(name).name == name}
    return marker


def _write_marker(folder: Path, slots: dict[str, int], spec: Any) -> None:
    temporary = folder / f"{MARKER}.new"
    with temporary.open("w") as file:
        json.dump({"slots": slots, "spec": spec}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / MARKER)


def mark(folder: Path, slots: dict[str, int], spec: Any) -> None:
    """Mark slots (file: step) of a node's folder as kept.

    Args:
        spec: the newest generation's, as JSON; a later launch may find no log entry of it.
    """
    _write_marker(folder, slots, spec)


def strip(folder: Path) -> None:
    """Remove everything but the kept slots from the folder of a node whose processes are gone."""
    marker = read_marker(folder)
    for path in folder.iterdir():
        if path.name != MARKER and (marker is None or path.name not in marker["slots"]):
            path.unlink()


def take_over(folder: Path, other: Path) -> None:
    """Move the slots that ``other`` keeps into ``folder``, which keeps them from now on."""
    theirs, mine = read_marker(other), read_marker(folder) or {"slots": {}, "spec": None}
    assert theirs is not None
    specs = [spec for spec in (mine["spec"], theirs["spec"]) if spec]
    newest = max(specs, key=lambda spec: (spec["id"]["term"], spec["id"]["n"]), default=None)
    _write_marker(folder, {**mine["slots"], **theirs["slots"]}, newest)
    for name in theirs["slots"]:
        if (other / name).exists():  # else an earlier take-over was cut short after it
            (other / name).rename(folder / name)
    shutil.rmtree(other)


def let_go(folder: Path, slots: Collection[str], dead: Iterable[str]) -> None:
    """Unmark slots that are in storage by now, and delete those that ``dead`` workers left.

    A living worker goes on writing into its files.
    """
    marker = read_marker(folder)
    if marker is None:
        return
    left = {name: step for name, step in marker["slots"].items() if name not in slots}
    if left:
        _write_marker(folder, left, marker["spec"])
    else:
        (folder / MARKER).unlink()
    for name in dead:
        (folder / name).unlink(missing_ok=True)


def keeping(run_folders: Iterable[Path]) -> list[Path]:
    """Node folders below a run's folders that keep slots."""
    return sorted(marker.parent for folder in run_folders for marker in folder.glob(f"*/{MARKER}"))


def kept_step(run_folders: Iterable[Path]) -> int | None:
    """Newest step that is kept below a run's folders; None where nothing is."""
    markers = [read_marker(folder) for folder in keeping(run_folders)]
    return max((step for marker in markers if marker for step in marker["slots"].values()), default=None)


def kept_here(run_folders: Sequence[Path], discarded: bool) -> int | None:
    """Look for kept slots below these folders and, where ``discarded``, delete them; returns their step."""
    step = kept_step(run_folders)
    if discarded and step is not None:
        discard(run_folders)
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
            shutil.rmtree(path, ignore_errors=True)
    if not spared:
        shutil.rmtree(run_folder, ignore_errors=True)


def discard(run_folders: Iterable[Path]) -> None:
    """Delete everything below a run's folders, kept slots included."""
    for folder in run_folders:
        shutil.rmtree(folder, ignore_errors=True)
