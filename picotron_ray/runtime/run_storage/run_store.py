"""The coordinator's side of storage: claim a term, append entries, commit, collect garbage, sum up.

All methods block. What concerns the log runs on one thread (``executor``), which keeps its entries in order;
the run's record is saved by another one (``record_keeper``). A third asks for the newest term, as the first
may wait for storage that hangs. A fourth (``collector``) collects garbage and a fifth (``committer``) makes
commits, for as long as that takes; the entries of both are written by the first one, so a generation's need
not wait.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from picotron_ray.checkpoint.storage.base import JSON_BYTES, Storage, get_bounded
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store import gc
from picotron_ray.checkpoint.store.commit import Committed, commit_assembled, parent_of
from picotron_ray.checkpoint.store.deletion import delete_settled
from picotron_ray.checkpoint.store.in_use import InUse
from picotron_ray.checkpoint.store.lineage import newest_commit, newest_generation
from picotron_ray.checkpoint.store.outline import Outline, Outlines
from picotron_ray.checkpoint.store.run_log import Entry, RunLog
from picotron_ray.checkpoint.store.term_claim import Launch
from picotron_ray.checkpoint.store.verify import judge, read_ledger, stream_ledger
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import Appended, Commit, GenerationId, GenerationSpec
from picotron_ray.errors import (
    AlreadyExistsError,
    CorruptError,
    FencedError,
    LedgerGoneError,
    NotFoundError,
    PartsGoneError,
    StorageError,
)
from picotron_ray.runtime.chaos.claims import claim
from picotron_ray.runtime.run_storage.assembly_process import AssemblyProcess
from picotron_ray.runtime.run_storage.data_record import ledger_figures, settle_data
from picotron_ray.runtime.run_storage.generation_entries import (
    generation_body,
    read_generations,
    spec_of,
    step_owed,
)
from picotron_ray.runtime.run_storage.life_sign import LifeSign, remove_older
from picotron_ray.runtime.run_storage.origin_import import import_origin
from picotron_ray.runtime.run_storage.run_json import NEWEST, saved_config
from picotron_ray.runtime.run_storage.tokenizer_record import keep_tokenizer

log = logging.getLogger(__name__)
T = TypeVar("T")
RECORDS = "records/"
RECORDS_KEPT = 2  # of all terms: the newest, and one to fall back on


class RunStore:
    """Storage of one run, as one coordinator term sees it."""

    def __init__(
        self,
        job: JobConfig,
        on_commit: Callable[[int], None],
        origin: dict[str, Any] | None = None,
        data: str = "",
        launch: Launch | None = None,
    ) -> None:
        """
        Args:
            on_commit: called with the step between a manifest and its log entry (scripted faults).
            origin: the verified commit that ``init_from`` names, for a run that has no run.json yet.
            data: fingerprint of the data that the launch saw; "": it did not look.
            launch: whose coordinator this is.
        """
        self._origin, self._launch = origin, launch
        self.data = data  # the run's own, once the term is claimed
        self._job = job
        self._on_commit = on_commit
        self._storage: Storage = open_storage(job.storage, job.name)
        self._log = RunLog(self._storage)
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="run-store")
        self.committer = ThreadPoolExecutor(1, thread_name_prefix="run-commit")
        self.collector = ThreadPoolExecutor(1, thread_name_prefix="run-garbage")
        self._assembly = AssemblyProcess(job)
        self._life = LifeSign(self._storage)
        self._outlines = Outlines(self._assembly.outline)
        self._in_use = InUse()
        self.commit_figures: dict[int, dict[str, Any]] = {}  # by step
        self._records = 0  # saved in this term
        self._retired: deque[str] = deque()  # manifests that retention gave up, until they are told
        self._doubts: dict[int, float] = {}  # commits that could not be read: number, since when
        self._given_up: deque[str] = deque()  # reasons, until they are told
        self._settled: deque[str] = deque()  # intents of commits, until they are deleted
        self._obeyed = False  # checkpoint.resume_step, where there is one
        self.overtaken_by = ""  # owner of a newer term, once one was found
        self.complaints: list[str] = []
        self.unusable = ""
        """Why no commit can be used, where there are some; host memory may hold a state all the same."""
        self.news: list[str] = []

    def claim(self) -> int:
        """Write run.json (if absent) and launch.json, claim a term where `Launch` may and show life since."""
        saved = {**(config := saved_config(self._job)), "origin": self._origin}
        with suppress(AlreadyExistsError):
            self._storage.put_if_absent("run.json", json.dumps(saved, indent=1).encode())
        self.data = settle_data(self._storage, self._job.name, self.data)
        keep_tokenizer(self._storage, self._job)
        self._storage.put(NEWEST, json.dumps(config, indent=1).encode())
        term = self._log.claim_term(f"{socket.gethostname()}:{os.getpid()}", self._launch)
        self._life.begin(term)
        return term

    @property
    def identity(self) -> str:
        """Identity of the run, once a term is claimed (`RunLog.identity`)."""
        return self._log.identity

    @property
    def last_generation(self) -> GenerationId | None:
        """Newest generation that the log had when the term was claimed; None before the first."""
        found = (entry.body for entry in self._log.entries() if entry.kind == "generation")
        return max((GenerationId(body["term"], body["n"]) for body in found if body["n"]), default=None)

    def state(self, verify: bool) -> tuple[tuple[Commit, ...], tuple[GenerationSpec, ...]]:
        """Commits and generations, as the log holds them, oldest first.

        ``verify``: look for the newest commit of which all is there, and mark newer ones as damaged (told in
        ``complaints``; where that is all of them, in ``unusable``). No chunk is read: workers check what they
        load. Not for the adoption of a running generation, which needs no commit and should not wait for it.
        Where ``checkpoint.resume_step`` is owed, commits of that step alone are looked at.
        """
        self.news += import_origin(self._job, self._storage, self._log)
        entries, damaged = self._log.entries(), set[int]()
        if verify:
            found = judge(self._storage, self._log, step_owed(self._job, entries), read_chunks=False)
            self.complaints, self.unusable = list(found.complaints), found.problem
            damaged = {entry.seq for entry in found.damaged}
        commits = self._log.commits()
        generations = read_generations(entries, [entry for entry in commits if entry.seq not in damaged])
        return tuple(_commit(entry, entry.seq in damaged) for entry in commits), generations

    def append_generation(self, spec: GenerationSpec) -> Appended:
        """Make a generation durable; commits of it wait for this."""
        event = Appended("generation", spec.id, spec.resume_step)
        return self._settle(event, lambda: self._log.append("generation", generation_body(spec)))

    def commit(
        self, generation: GenerationId, step: int, parts: list[bytes], unproven: bool = False
    ) -> Appended:
        """Assemble the manifest from the nodes' parts and append the commit entry.

        Not for ``executor``'s thread, which it waits for.

        Args:
            unproven: ledger lines that nobody has are left out.
        """
        known: Appended | None = self._in_order(partial(self._known_commit, generation, step))
        if known is not None:  # asked again, because the reply was lost
            return known
        began = time.monotonic()
        done: list[Committed] = []

        def work() -> int:
            if not parts:
                raise PartsGoneError(f"no upload of step {step} is known here any more; upload it again")
            done.append(self._commit(generation, step, parts, unproven))
            return done[0].seq

        event = self._settle(Appended("commit", generation, step), work)
        if done:
            self.commit_figures[step] = {
                "bytes": done[0].stored_bytes,
                "written_bytes": done[0].written_bytes,
                "commit_s": time.monotonic() - began,
            }
            made = done[0]
            self._settled.extend(made.intents)
            return replace(event, manifest=made.manifest, digest=made.digest, unproven=made.unproven)
        return event

    def _commit(self, generation: GenerationId, step: int, parts: list[bytes], unproven: bool) -> Committed:
        grace_s = self._job.checkpoint.gc_grace_s
        assembling = self._assembly.assembling(self._storage, parts, grace_s, unproven)
        return commit_assembled(
            self._storage,
            self._log,
            (generation.term, generation.n),
            assembling,
            self._outlines,
            lambda _: self._on_commit(step),
            self._in_use,
            self._in_order,
        )

    def _in_order(self, work: Callable[[], T]) -> T:
        """Do a piece of work with the log on the thread that does all of it."""
        return self.executor.submit(work).result()

    def close(self, ended: str = "") -> None:
        """End the assembler's process and the signs of life; ``ended``: how the run ended."""
        self._life.end(ended) if ended else self._life.close()
        self._assembly.close()

    def _known_commit(self, generation: GenerationId, step: int) -> Appended | None:
        for entry in self._log.commits():
            body = entry.body
            if (body["term"], body["n"], body["step"]) == (generation.term, generation.n, step):
                found = {"seq": entry.seq, "manifest": body["manifest"], "digest": body["digest"]}
                return Appended("commit", generation, step, **found, unproven=body.get("unproven", ""))
        return None

    def _settle(self, event: Appended, work: Callable[[], int]) -> Appended:
        try:
            return replace(event, seq=work())
        except FencedError as error:
            return replace(event, error=str(error), fenced=True, owner=error.owner)
        except StorageError as error:
            log.warning("%s of step %d: %s", event.kind, event.step, error)
            gone, unproven = isinstance(error, PartsGoneError), isinstance(error, LedgerGoneError)
            told = str(error)
            return replace(event, error=told, parts_gone=gone, unproven=told if unproven else "")
        except Exception as error:  # an entry that is never answered keeps all later ones waiting
            log.exception("%s of step %d: an error of the program", event.kind, event.step)
            return replace(event, error=f"an error of the program: {error!r}")

    def is_newest(self) -> bool | None:
        """Whether this term is the newest that the log holds now; None: storage does not answer.

        Any thread may ask, whatever ``executor`` is at.
        """
        try:
            self._log.witness().confirm()
        except FencedError as error:
            self.overtaken_by = error.owner
            return False
        except StorageError as error:
            log.warning("the newest term is not known: %s", error)
            return None
        return True

    def claim_fault(self, index: int) -> bool:
        """Claim scripted fault ``index``; true once in the life of the run."""
        return claim(self._storage, index)

    def save_record(self, record: bytes) -> None:
        """Keep the run's record so far beside the commits.

        A save that was given up, or of a replaced coordinator, may still happen later, so each has its name.

        Raises:
            StorageError: storage does not take it.
        """
        self._records += 1
        self._storage.put(f"{RECORDS}{self._log.term:06d}-{self._records:06d}.json", record)

    def newest_record(self, readable: Callable[[bytes], object]) -> bytes | None:
        """Return the newest record that can be read; None where there is none.

        Args:
            readable: true for one that is whole.

        Raises:
            StorageError: there may be one. Who begins without it loses it: the next saves replace it.
        """
        for key in reversed(self._record_keys()):
            try:
                record = get_bounded(self._storage, key, JSON_BYTES)
            except (NotFoundError, CorruptError) as error:  # dropped since the listing, or damaged
                log.warning("record %s is passed over: %s", key, error)
                continue
            if readable(record):
                return record
            log.warning("record %s is passed over: it is torn", key)
        return None

    def _record_keys(self) -> list[str]:
        return sorted((entry.key for entry in self._storage.list(RECORDS)), key=_record_number)

    def collect_garbage(self) -> str:
        """Retire commits beyond retention, delete chunks that nothing needs and records that are replaced.

        Then the log's older entries are copied into blocks, from which a restart reads them. Returns why
        storage kept it from that, or what else did for too long; "" where nothing did. Not for ``executor``'s
        thread, which it waits for. What was retired is to be asked for then.
        """
        before = self._in_order(self._manifests)
        try:
            delete_settled(self._storage, self._settled)
            for key in self._record_keys()[:-RECORDS_KEPT]:
                self._storage.delete(key)
            remove_older(self._storage, self._log.term)
            reach = gc.rewind_reach(self._job)
            report = gc.collect(
                self._storage,
                self._log,
                self._job.checkpoint,
                reach,
                self._in_use,
                self._in_order,
                self._outlines,
                self._owed(),
                self._doubts,
            )
            self._given_up += report.damaged
            self._in_order(self._log.keep_blocks)
        except FencedError as error:
            log.warning("garbage collection: %s", error)  # the next append ends this coordinator
            return ""
        except StorageError as error:
            log.warning("garbage collection is put off: %s", error)
            return str(error)
        finally:
            self._retired += before - self._in_order(self._manifests)
        if report.doubted:
            return f"{report.doubted[0]}; it is given up unless it can be read in {gc.DOUBT_S:g} s"
        return report.overdue

    def _owed(self) -> int | None:
        """Step to go back to, until that was done: then it stays so for this term."""
        if not self._obeyed:
            owed = step_owed(self._job, self._in_order(self._log.entries))
            self._obeyed = owed is None
            return owed
        return None

    def _manifests(self) -> set[str]:
        return {entry.body["manifest"] for entry in self._log.commits()}

    def take_retired(self) -> tuple[str, ...]:
        """Return the manifests that collections have retired since the last call; any thread may ask."""
        return tuple(sorted(self._retired.popleft() for _ in range(len(self._retired))))

    def take_given_up(self) -> list[str]:
        """Return why collections have given up commits since the last call; any thread may ask."""
        return [self._given_up.popleft() for _ in range(len(self._given_up))]

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Add what the committed ledger says, and store ``summary.json``.

        Raises:
            FencedError: a newer term was claimed: the summary is its coordinator's.
            StorageError: storage does not take it.
        """
        self._log.confirm()
        complete = {**summary, "term": self._log.term, **self._ledger_figures()}
        self._storage.put("summary.json", json.dumps(complete, indent=1).encode())
        with suppress(StorageError):
            delete_settled(self._storage, self._settled)
        self._life.end(str(summary.get("status") or "over"))
        return complete

    def _ledger_figures(self) -> dict[str, Any]:
        newest = self._newest_ledger()
        steps = newest.ledger[-1].last if newest and newest.ledger else 0
        lines = (json.loads(line) for line in stream_ledger(self._storage, newest)) if newest else ()
        return ledger_figures(self._job, lines, steps, self.data, self._passed())

    def _passed(self) -> list[range]:
        """Steps that rewinds of the history on which the run stands pass over."""
        newest = newest_commit(self._log)
        writer = (newest.body["term"], newest.body["n"]) if newest else None
        bodies = [entry.body for entry in self._log.entries() if entry.kind == "generation"]
        found = [spec_of(b, with_lineage=False) for b in bodies if (b["term"], b["n"]) == writer]
        return [rewind.passed for spec in found for rewind in spec.rewinds]

    def ledger_lines(self, after: int = 0) -> list[dict[str, Any]]:
        """Lines of steps above ``after`` of the ledger of `newest_commit`, in order; none before one.

        Not for ``executor``'s thread, which it waits for.
        """
        manifest = self._newest_ledger()
        return [json.loads(line) for line in read_ledger(self._storage, manifest, after)] if manifest else []

    def _newest_ledger(self) -> Outline | None:
        """Outline with the ledger of the newest commit of the history on which the run stands."""
        reader: RunLog = self._in_order(self._log.witness)
        newest = newest_generation(reader)
        return None if newest is None else parent_of(self._storage, reader, *newest, self._outlines)


def _record_number(key: str) -> tuple[int, ...]:
    """Return term and number of a record; of an earlier version's, which had one a term, the term alone."""
    parts = key.removeprefix(RECORDS).removesuffix(".json").split("-")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()


def _commit(entry: Entry, damaged: bool) -> Commit:
    body = entry.body
    writer = GenerationId(body["term"], body["n"])
    return Commit(body["step"], writer, body["manifest"], entry.seq, body["digest"], damaged)
