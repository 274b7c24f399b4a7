"""Retention and garbage collection of the store, by the coordinator alone. Torch-free.

A chunk may be deleted only when no commit needs it *and* no save under way may count on it. Saves run
on other machines, so:

1. commits beyond retention get a ``retire`` entry in the log;
2. chunks and manifests that nothing retained names are published in condemned lists (``condemned.py``);
   from then on writers treat those chunks as absent and put them again;
3. after the grace time (longer than a save may take) intents are read, then the log, and what is retained
   *and* what live intents name is marked again. The rest of the lists is deleted in batches
   (``deletion.py``), unless it was written again since the list;
4. the lists are removed.

A save names in its intent the lists that it goes by. While it has not said which chunks it counts on, it
postpones step 3 for every other list: those that were published since it began, and those that it could not
read. It never postpones a list that it goes by, so saves that follow one another without a pause postpone
nothing for long. An intent older than the grace time is a dead save's.

Interleavings of a save with a list P that condemns chunk K, which a commit comes to need:

- The save looked for lists before P was there, and counts on the K that lies there. Until it lists its chunks
  P is postponed; from then on K is marked by its intent, and after the commit by the commit: intents are read
  before the log, so one that is gone by then has its commit there.
- It looked later, and goes by P. It puts K again, which makes K younger than P: K is passed over, where it is
  listed after that. Where it was listed just before, it is deleted although it was put again: the commit
  looks for K, finds it gone, and K is uploaded again.
- Its collection removes P while the save looks. All deletions of P have ended by then: what the save finds
  there stays.
- P is torn, or the save cannot read it: it does not name P, and P is postponed as for one that looked before.
  Where the collection cannot read it, P is removed and nothing of it is deleted.
- The save sleeps, or its node dies: its intent gets old, and K may be deleted at any time. Its part of the
  commit may be in the coordinator's hands: the commit looks for K.
- The commit is made while K is being deleted, on another thread: it has said what it needs before its look
  (``in_use.py``). Either no deletion of K begins after that; or the commit knows that one is under way, and
  is not made before that has ended, and looks again then. So it is with a manifest of an attempt that failed,
  which the next attempt finds there. An entry that a lost reply leaves unknown keeps what it needs as well.
- A deletion hangs and is given up, and may happen later: no commit of this process counts on its object
  before that (``commit``), and its list stays.
- Another coordinator takes over amid a deletion, and commits K, put again by its writers: the old collector
  reads the log before each batch, and begins no deletion later than ``deletion.KNOWN_S`` after it asked,
  however it slept. The successor takes longer from its claim to a commit.
- The save is done twice, as an answer was lost, and its second intent takes the first one's place: as if it
  slept. A renewal that comes late puts an intent's older words back for a moment: those that name fewer lists
  postpone more; those that name P although the save could not read it make the commit find K gone.

Times are the storage's own, and may have whole seconds only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from picotron_ray.checkpoint.storage.base import Storage, StoredObject, clock_s, get_json
from picotron_ray.checkpoint.store import condemned as condemned_lists
from picotron_ray.checkpoint.store.best import best_commit
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.checkpoint.store.condemned import in_batches
from picotron_ray.checkpoint.store.deletion import Deleted, delete_listed
from picotron_ray.checkpoint.store.in_use import InUse
from picotron_ray.checkpoint.store.lineage import commits_on
from picotron_ray.checkpoint.store.outline import Outlines
from picotron_ray.checkpoint.store.run_log import Entry, RunLog
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import CheckpointConfig
from picotron_ray.errors import CorruptError, NotFoundError, StorageUnavailableError

_LISTS_AT_ONCE = 100  # whose names are held in memory
DOUBT_S = 60.0  # that a commit may be unreadable before it is given up
_LEAST_INTENT_S = 60.0  # that any intent counts as a living save's, as it is renewed more often


@dataclass(frozen=True, slots=True)
class GcReport:
    """Report of one collection.

    Fields:
        retired: manifests that retention gave up.
        postponed: why a due list was left, "" where none was.
        damaged: a line for each commit that was given up because its manifest cannot be read.
        doubted: a line for each commit that was not, as it may be readable again soon; nothing was collected.
        overdue: a line where a list was left for longer than the grace time, or where one collection could
            not condemn all that is unused.
    """

    retired: tuple[str, ...] = ()
    condemned: int = 0
    deleted: int = 0
    deleted_bytes: int = 0
    postponed: str = ""
    damaged: tuple[str, ...] = ()
    doubted: tuple[str, ...] = ()
    overdue: str = ""


class Swept(NamedTuple):
    """Outcome of one look at the lists that are due; fields as in `GcReport`, ``hung`` as in `Deleted`."""

    deleted: int = 0
    deleted_bytes: int = 0
    postponed: str = ""
    overdue: str = ""
    hung: str = ""

    def followed_by(self, other: Swept) -> Swept:
        """Outcome of both."""
        return Swept(
            self.deleted + other.deleted,
            self.deleted_bytes + other.deleted_bytes,
            other.postponed,
            other.overdue,
            other.hung,
        )


def rewind_reach(job: JobConfig) -> int:
    """Steps that a rewind goes back from a bad step; 0 where the config asks for none."""
    elastic = job.elastic
    return elastic.rewind_steps if "rewind" in (elastic.on_nonfinite, elastic.on_spike) else 0


def retained(
    log: RunLog,
    config: CheckpointConfig,
    damaged: Collection[int] = (),
    reach_steps: int = 0,
    owed_step: int | None = None,
) -> list[Entry]:
    """Commits that retention keeps.

    Those are the newest ones that count (the ledger continues at the last of them), those that the next
    rewind may go back to, the newest ones of all, those at multiples of ``keep_every_steps``, those that
    a user wants to go back to, and the best one by ``keep_best``.

    Args:
        damaged: numbers of entries whose manifest cannot be read; they are not kept and fill no place.
        reach_steps: how far a rewind goes back from the step after the newest commit, at least.
        owed_step: ``checkpoint.resume_step`` where the run has yet to go back to it.
    """
    commits = [entry for entry in log.commits() if entry.seq not in damaged]
    keep = {entry.seq for entry in commits[-config.keep_last :]}
    keep |= {entry.seq for entry in commits if entry.body["step"] == owed_step}
    if config.keep_every_steps:
        keep |= {e.seq for e in commits if e.body["step"] % config.keep_every_steps == 0}
    for generation in _newest_generations(log, commits):
        counting = commits_on(log.entries(), commits, generation)
        keep |= {entry.seq for entry in counting[-config.keep_last :]}
        if config.keep_best and (best := best_commit(log, commits, generation, config.keep_best)):
            keep.add(best.seq)
        if reach_steps and counting:
            bad_step = counting[-1].body["step"] + 1
            early = [e.body["step"] for e in counting if e.body["step"] <= bad_step - reach_steps]
            keep |= {e.seq for e in counting if e.body["step"] >= max(early, default=0)}
    return [entry for entry in commits if entry.seq in keep]


def _newest_generations(log: RunLog, commits: Sequence[Entry]) -> set[tuple[int, int]]:
    """Find the newest generation, and the newest with a commit: a launch may come to nothing."""
    launched = [(e.body["term"], e.body["n"]) for e in log.entries() if e.kind == "generation"]
    committed = {(entry.body["term"], entry.body["n"]) for entry in commits}
    return {*launched[-1:], *[generation for generation in launched if generation in committed][-1:]}


def collect(
    storage: Storage,
    log: RunLog,
    config: CheckpointConfig,
    reach_steps: int = 0,
    in_use: InUse | None = None,
    in_order: Callable[[Callable[[], Any]], Any] = lambda work: work(),
    outlines: Outlines | None = None,
    owed_step: int | None = None,
    doubts: dict[int, float] | None = None,
) -> GcReport:
    """Retire commits, delete what was condemned long enough ago, condemn what is not needed any more.

    The log must hold a claimed term. With a grace time of 0 one call does all of it.

    Args:
        reach_steps: as for `retained`, like ``owed_step``.
        in_use: shared with the commits that another thread may make; None: there are none.
        in_order: does a short piece of work with the log where its writer does all of it, and returns its
            result; everything that takes long is done by a reader of its own, in the calling thread.
        outlines: of manifests that are known already; others are added.
        doubts: commits that could not be read at the last collection, each with the time of the first look
            that failed; None: there are no later collections to wait for.

    Raises:
        FencedError: a newer term was claimed.
        StorageError: the storage refused, or no manifest at all can be read (nothing is deleted).
    """
    sharing, known = in_use or InUse(), outlines or Outlines()
    with sharing.collection():
        reader: RunLog = in_order(log.witness)
        reader.refresh()
        now = _now(storage) if doubts else 0.0  # before the look, so that little can happen after it
        damaged = damaged_commits(storage, reader, known)
        now = now or (_now(storage) if damaged else 0.0)
        if doubts is not None and (doubted := _doubted(damaged, doubts, now)):
            return GcReport(doubted=tuple(doubted))
        retired: tuple[str, ...] = in_order(partial(_retire, log, config, damaged, reach_steps, owed_step))
        reader.read_on()
        swept = _delete_due(storage, reader, config.gc_grace_s, sharing, known)
        condemned, left = _condemn(storage, reader, config.gc_grace_s, known)
        if condemned and not config.gc_grace_s:
            swept = swept.followed_by(_delete_due(storage, reader, config.gc_grace_s, sharing, known))
    if swept.hung:
        raise StorageUnavailableError(
            f"{storage.where}: a deletion of {swept.hung} hangs, another is not tried;"
            " check the mount or network"
        )
    counts = retired, condemned, swept.deleted, swept.deleted_bytes
    overdue = swept.overdue or left
    return GcReport(*counts, swept.postponed, tuple(damaged.values()), overdue=overdue)


def damaged_commits(storage: Storage, log: RunLog, outlines: Outlines) -> dict[int, str]:
    """Commits that no state can be restored from, as their manifest is missing or damaged: number → why.

    Raises:
        CorruptError: that is all of them: it may be the storage that is the wrong one.
    """
    found: dict[int, str] = {}
    commits = log.commits()
    for entry in commits:
        look = partial(_unreadable, storage, entry, outlines)
        if look() and (problem := look()):  # also the second time
            found[entry.seq] = problem
    if found and len(found) == len(commits):
        raise CorruptError(f"{found[commits[-1].seq]}; no commit is readable, nothing was collected")
    return found


def _doubted(damaged: Mapping[int, str], doubts: dict[int, float], now: float) -> list[str]:
    """Reasons of those damaged commits that were readable lately: a mount may show them whole again.

    To give one up cannot be undone.
    """
    for seq in doubts.keys() - damaged.keys():
        del doubts[seq]
    return [why for seq, why in damaged.items() if now - doubts.setdefault(seq, now) < DOUBT_S]


def _unreadable(storage: Storage, entry: Entry, outlines: Outlines) -> str:
    try:
        outlines.read(storage, entry.body)
    except CorruptError as error:
        return str(error)
    return ""


def _retire(
    log: RunLog, config: CheckpointConfig, damaged: Collection[int], reach_steps: int, owed_step: int | None
) -> tuple[str, ...]:
    log.read_on()
    keep = {entry.seq for entry in retained(log, config, damaged, reach_steps, owed_step)}
    kept_manifests = {e.body["manifest"] for e in log.commits() if e.seq in keep}
    manifests = {e.body["manifest"] for e in log.commits() if e.seq not in keep} - kept_manifests
    if manifests:
        log.append("retire", {"manifests": sorted(manifests)})
    return tuple(sorted(manifests))


def _marked(storage: Storage, log: RunLog, intents: Iterable[dict[str, Any]], outlines: Outlines) -> set[str]:
    """Keys that are needed: of retained commits and of live intents."""
    keys: set[str] = set()
    for entry in log.commits():
        keys.add(entry.body["manifest"])
        keys.update(outlines.committed(storage, entry.body).chunk_keys())
    for intent in intents:
        keys.update(chunk_key(address) for address in intent["chunks"] or ())
    return keys


def _condemn(storage: Storage, log: RunLog, grace_s: float, outlines: Outlines) -> tuple[int, str]:
    """Publish what nothing needs, unless some of it waits for its time.

    Returns how many objects that is, and a line where that was not all.
    """
    now = _now(storage)
    listed = list(storage.list(condemned_lists.PREFIX))
    if any(now - entry.mtime_s < grace_s for entry in listed):
        return 0, ""
    known = {key for each in condemned_lists.read_lists(storage, listed)[0] for key in each.keys}
    known |= _marked(storage, log, _live_intents(storage, now, grace_s), outlines)
    unused = (e for p in ("chunks/", "manifests/") for e in storage.list(p) if e.key not in known)
    named, left = condemned_lists.publish(storage, log.term, unused)
    text = (
        f"{named} objects are condemned, as many as one collection may, and more are unused: they are left to"
        f" the next one, {grace_s:g} s later. If that is told again and again storage grows: commit less"
        " often, or lower checkpoint.gc_grace_s"
    )
    return named, text if left else ""


def _delete_due(storage: Storage, log: RunLog, grace_s: float, in_use: InUse, outlines: Outlines) -> Swept:
    """Delete what lists name that were published long enough ago, but for what is needed, and those lists."""
    now = _now(storage)
    _drop_dead_intents(storage, now, grace_s)
    old = [e for e in storage.list(condemned_lists.PREFIX) if now - e.mtime_s >= grace_s]
    if not old:
        return Swept()
    intents = _live_intents(storage, now, grace_s)
    log.read_on()  # after the intents: one that was removed in between is of a commit that is there
    waiting = [each for each in old if _began_before(intents, each)]
    due = sorted((each for each in old if each not in waiting), key=lambda each: each.mtime_s)
    marked = _marked(storage, log, intents, outlines) if due else set()
    done = Deleted()
    for some in in_batches(due, _LISTS_AT_ONCE):
        if not done.hung:
            _delete_named(storage, log, in_use, some, marked, done)
    postponed, overdue = _postponed(waiting, intents, now, grace_s)
    return Swept(done.count, done.size, postponed, overdue, done.hung)


def _delete_named(
    storage: Storage, log: RunLog, in_use: InUse, due: list[StoredObject], marked: set[str], done: Deleted
) -> None:
    """Delete what some lists name but for what is marked, and those lists; ``due`` has the oldest first."""
    lists, unreadable = condemned_lists.read_lists(storage, due)
    published: dict[str, float] = {}
    for each in lists:
        published.update(dict.fromkeys(each.keys - marked, each.mtime_s))
    part = delete_listed(storage, log, in_use, published)
    done.count, done.size, done.hung = done.count + part.count, done.size + part.size, part.hung
    # of an unreadable one too, so that what it was to name is condemned anew
    for key in unreadable if part.hung else [each.key for each in due]:
        storage.delete(key)


def _began_before(intents: Iterable[dict[str, Any]], listed: StoredObject) -> list[dict[str, Any]]:
    """Intents of saves that began before a list was there to be read, and may count on what it names."""
    return [i for i in intents if i["chunks"] is None and listed.key not in i["obeyed"]]


def _postponed(
    waiting: Sequence[StoredObject], intents: Sequence[dict[str, Any]], now: float, grace_s: float
) -> tuple[str, str]:
    """Why lists wait beyond their time, and a line where that is for longer than the grace time."""
    if not waiting:
        return "", ""
    oldest = min(waiting, key=lambda each: each.mtime_s)
    saves = len(_began_before(intents, oldest))
    text = f"{saves} saves are under way that began before {oldest.key}"
    late_s = now - oldest.mtime_s - grace_s
    if late_s <= max(grace_s, _LEAST_INTENT_S):
        return text, ""
    return text, f"{text}, which was due {late_s:.0f} s ago; nothing of it is deleted, and storage grows"


def _live_intents(storage: Storage, now: float, grace_s: float) -> list[dict[str, Any]]:
    live = []
    for entry in _intents(storage, now, grace_s, dead=False):
        try:
            intent = get_json(storage, entry.key)
        except NotFoundError:  # its save ended since the listing
            continue
        except CorruptError:  # of a save that says nothing
            intent = {}
        live.append({"chunks": intent.get("chunks"), "obeyed": intent.get("obeyed", ())})
    return live


def _intents(storage: Storage, now: float, grace_s: float, dead: bool) -> Sequence[StoredObject]:
    longest_s = max(grace_s, _LEAST_INTENT_S)
    return [e for e in storage.list("intents/") if (now - e.mtime_s > longest_s) == dead]


def _drop_dead_intents(storage: Storage, now: float, grace_s: float) -> None:
    for entry in _intents(storage, now, grace_s, dead=True):
        storage.delete(entry.key)


def _now(storage: Storage) -> float:
    """The storage's clock."""
    return clock_s(storage)
