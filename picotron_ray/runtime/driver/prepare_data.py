"""``data prepare``: text into token files, in parts that tasks write and that outlive a kill.

``OUT.parts`` beside the result holds the outline's key, the grouping of files, and the parts; a lock beside
it keeps a second command out. The joined folder is renamed into ``OUT`` and the parts go away.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.prepare.join import first_ones, join_source
from picotron_ray.data.prepare.outline import VERSION, PrepareOutline, grouped, outline, part_jobs, section
from picotron_ray.data.prepare.part import (
    PartCounts,
    PartJob,
    open_part,
    opened,
    part_form,
    whole,
    write_part,
)
from picotron_ray.data.source_files import shown
from picotron_ray.errors import DataError

META = "meta.json"
Say = Callable[[dict[str, Any]], None]
Run = Callable[[Sequence[PartJob]], Iterable[tuple[int, PartCounts]]]
"""Runs jobs wherever; yields the number of each job that is done, in any order, with its counts."""


def one_by_one(jobs: Sequence[PartJob]) -> Iterator[tuple[int, PartCounts]]:
    """Run jobs in this process."""
    for at, job in enumerate(jobs):
        yield at, write_part(job)


def prepare(
    data: DataConfig, out: Path, shards: int | None, dedupe: bool, run: Run = one_by_one, say: Say = print
) -> dict[str, Any]:
    """Write the token files of a config's sources, or go on where an earlier call was killed.

    Args:
        out: folder of the result; empty or not there, unless it is this very result.
        shards: parts of each source, or fewer; those of an earlier call that was killed stay as they are.
        dedupe: leave out documents whose tokens an earlier one has, of any source.
        say: hears of each part.

    Returns what ``meta.json`` holds.

    Raises DataError for data that cannot be read, folders of something else, and where it cannot write.
    """
    out = out.expanduser().absolute()
    found = outline(data, dedupe)
    work = out.with_name(f"{out.name}.parts")
    left = [work, _lock(work)]
    if (known := _finished(out, found.key)) is not None and not any(path.exists() for path in left):
        return known
    try:
        work.parent.mkdir(parents=True, exist_ok=True)
        with _alone(work):
            if (known := _finished(out, found.key)) is not None:
                shutil.rmtree(work, ignore_errors=True)  # a kill came between
                return known
            return _prepare(data, found, out, work, shards, run, say)
    except OSError as error:
        why = error.strerror or str(error)
        raise DataError(
            f"--out: cannot write {shown(error.filename or out)}: {why}; free space or name another folder."
            f" Finished parts stay in {shown(work)}"
        ) from None


def _finished(out: Path, key: str) -> dict[str, Any] | None:
    """Return what a finished result says; None where there is none. Raises DataError for something else."""
    try:
        names = sorted(os.listdir(out))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"--out: cannot read {shown(out)}: {error.strerror}; name another folder") from None
    if not names:
        return None
    try:
        known = json.loads((out / META).read_text("utf-8"))
        if known["key"] == key:
            return dict(known)
        what = "tokens of another config, of other files or without the same --dedupe"
    except (OSError, ValueError, KeyError, TypeError):
        what = ", ".join(shown(name) for name in names[:4])
    raise DataError(f"--out: {shown(out)} holds {what}; name an empty folder, or one that is not there")


def _lock(work: Path) -> Path:
    return work.with_name(f"{work.name}.lock")


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    lock = _lock(work)
    with lock.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = not os.fstat(stream.fileno()).st_nlink  # its holder has ended, and others make a new one
        except BlockingIOError:
            gone = True
        if gone:
            raise DataError(f"--out: another command writes {shown(work)}; wait for it, or stop it")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _prepare(
    data: DataConfig, found: PrepareOutline, out: Path, work: Path, shards: int | None, run: Run, say: Say
) -> dict[str, Any]:
    jobs = part_jobs(found, _groups(found, work, shards), work / "parts")
    flat = [job for mine in jobs for job in mine]
    for stale in (work / "parts").glob(".*"):  # of tasks that were killed
        shutil.rmtree(stale, ignore_errors=True)
    open_jobs = []
    for job in flat:
        if whole(job.place):
            continue
        shutil.rmtree(job.place, ignore_errors=True)
        open_jobs.append(job)
    done = len(flat) - len(open_jobs)
    if done:
        say({"parts": len(flat), "kept": done})
    for at, counts in run(open_jobs):
        done += 1
        if not open_jobs[at].place.exists():
            raise DataError(
                f"--out: a node wrote {shown(open_jobs[at].place)}, which is not there for this one; name a"
                " folder that all nodes share"
            )
        say({"part": open_jobs[at].place.name, "done": done, "parts": len(flat), **asdict(counts)})
    say({"joining": len(flat)})
    fresh = work / "joined"
    shutil.rmtree(fresh, ignore_errors=True)
    meta = _join(data, found, jobs, fresh, out)
    fresh.rename(out)
    shutil.rmtree(work)
    return meta


def _groups(found: PrepareOutline, work: Path, shards: int | None) -> list[list[list[int]]]:
    """Return the grouping of an earlier call, or a new one, which is kept."""
    plan = work / "outline.json"
    if plan.exists():
        known = json.loads(plan.read_text("utf-8"))
        if known["key"] != found.key:
            raise DataError(
                f"--out: {shown(work)} holds parts of another config, of other files or without the same"
                " --dedupe; delete it, or name another folder"
            )
        return list(known["groups"])
    groups = [grouped(source.files, shards) for source in found.sources]
    (work / "parts").mkdir(parents=True, exist_ok=True)
    fresh = plan.with_suffix(".new")
    fresh.write_text(json.dumps({"key": found.key, "groups": groups}) + "\n", "utf-8")
    fresh.rename(plan)
    return groups


def _join(
    data: DataConfig, found: PrepareOutline, jobs: list[list[PartJob]], folder: Path, out: Path
) -> dict[str, Any]:
    """Write the result into a new folder."""
    kept = _kept(found, jobs) if found.dedupe else None
    sources: dict[str, Any] = {}
    forms: dict[str, dict[str, object]] = {}
    for number, (source, mine) in enumerate(zip(found.sources, jobs, strict=True)):
        text = opened(source.data, (found.key, source.settings))
        form = part_form(text)
        place = folder / source.name
        place.mkdir(parents=True)
        parts = [job.place for job in mine]
        fraction = source.data.held_out_fraction
        made = join_source(parts, None if kept is None else kept[number], form, fraction, place)
        dtype = str(np.dtype(next(iter(form.kinds.values()))).name)
        forms[source.name] = {"memmap_dtype": dtype, "end_token": form.end}
        forms[source.name] |= {"loss_mask": True} if form.masked else {}
        told = {**asdict(made), **forms[source.name], "tokenizer": text.tokenizer.digest}
        sources[source.name or "data"] = told
    meta = {
        "version": VERSION,
        "key": found.key,
        "dedupe": found.dedupe,
        "sources": sources,
        "data": section(data, out, forms),
    }
    (folder / META).write_text(json.dumps(meta, indent=1) + "\n", "utf-8")
    return meta


def _kept(found: PrepareOutline, jobs: list[list[PartJob]]) -> list[list[Any]]:
    """Whether each document stays: by source and part."""
    hashes = []
    for source, mine in zip(found.sources, jobs, strict=True):
        form = part_form(opened(source.data, (found.key, source.settings)))
        hashes.append([np.array(open_part(job.place, form).hashes) for job in mine])
    flags = first_ones([part for mine in hashes for part in mine])
    at, kept = 0, list[list[Any]]()
    for parts in hashes:
        kept.append([])
        for part in parts:
            kept[-1].append(flags[at : at + len(part)])
            at += len(part)
    return kept
