"""Members of a population on a connected Ray: their notes, and their places to train at.

A note travels with each report as Tune's checkpoint: it names run, commit and step. A member that was paused
or killed goes on in the run that its note names; a note of another member means that it is to take over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.train import Checkpoint

from tuning.parts import MemberRun

NOTE = "note.json"
POLL_S = 0.5


def present_part(member: str, config: dict[str, Any]) -> MemberRun:
    """The run that the calling trial is to begin or go on with; the same whenever Tune starts it again."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return MemberRun(member, member)
    with checkpoint.as_directory() as folder:
        note = json.loads((Path(folder) / NOTE).read_text())
    theirs = MemberRun(**note["part"])
    if theirs.member == member:
        return replace(theirs, noted_step=note["run_step"])
    origin = (theirs.run, note["run_step"])
    digest = hashlib.blake2b(json.dumps([origin, config]).encode(), digest_size=3).hexdigest()
    return MemberRun(member, f"{member}-{digest}", theirs.before_steps + note["run_step"], *origin)


@contextlib.contextmanager
def noted(part: MemberRun, run_step: int) -> Iterator[Checkpoint]:
    """The note of a report at a commit of the part's run."""
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps({"part": asdict(part), "run_step": run_step})
        (Path(folder) / NOTE).write_text(text)
        yield Checkpoint.from_directory(folder)


@ray.remote(num_cpus=0)
class _Slot:
    def ready(self) -> bool:
        return True


@contextlib.contextmanager
def slot(study: str, count: int) -> Iterator[None]:
    """One of ``count`` places to train at, held by an actor of the caller's own, which goes with it."""
    holder, at = None, 0
    while holder is None:
        try:
            holder = _Slot.options(name=f"{study}.slot{at}").remote()  # type: ignore[attr-defined]
            ray.get(holder.ready.remote())
        except ValueError:  # taken
            holder, at = None, (at + 1) % count
            time.sleep(POLL_S if at == 0 else 0.0)
    try:
        yield
    finally:
        ray.kill(holder)
