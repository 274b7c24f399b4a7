"""Invariants of a run's storage, judged object by object.

1. What a commit needs is there when its entry is written, and for as long as nothing retires it.
2. What a save counts on that began before a condemned list was published is not deleted; a save that has not
   said what it counts on holds the deletion up.
3. Whoever deletes has read the log just before, and could not know of a newer term for long; the summary is
   the newest term's.
4. The ledger and the bytes of a commit are those of its history.
5. What nothing needs is gone in the end: chunks, manifests, intents, condemned lists. Retention keeps as many
   commits as asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from picotron_ray.checkpoint.store import deletion, gc
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.checkpoint.store.commit_source import check_shard, fetch_chunk
from picotron_ray.checkpoint.store.manifest import Manifest, load_manifest
from picotron_ray.checkpoint.store.run_log import Entry, RunLog, decode_entry
from picotron_ray.checkpoint.store.verify import read_ledger
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.checks import Checks
from picotron_ray.coordinator.simulator.storage import SimLogEntry, SimStorage
from picotron_ray.errors import CorruptError, StorageError
from picotron_ray.runtime.run_storage.generation_entries import spec_of
from tests.support.simulation.objects import LATER_S, Client, Objects
from tests.support.simulation.states import content, history_of

if TYPE_CHECKING:
    from tests.support.simulation.store_world import StoreSim

DEAD_INTENT_S = 60.0
UNREAD_S = 3.0
CALM_S, SETTLED_S = 5.0, 40.0
LATE_S = deletion.KNOWN_S + LATER_S + 0.1
JUNK = f"chunks/00/{'0' * 64}"


class StoreMirror(SimStorage):
    """The real log as the simulation's checks read it; its faults are the simulation's."""

    def __init__(self, objects: Objects) -> None:
        super().__init__()
        self._objects = objects
        self.entries: list[Entry] = []
        self.damaged: dict[str, float] = {}  # manifests, and since when
        self.now_s: Callable[[], float] = lambda: 0.0

    def note(self, data: bytes, seq: int, now: float) -> Entry:
        """Take over an entry that was just written."""
        entry = decode_entry(seq, data)
        self.entries.append(entry)
        body = entry.body
        spec = spec_of(body) if entry.kind == "generation" else None
        writer = m.GenerationId(body["term"], body["n"]) if "n" in body else None
        step = body["step"] if entry.kind == "commit" else 0
        self.log.append(SimLogEntry(entry.term, entry.kind, spec, writer, step))
        self.times.append(now)
        return entry

    def retained(self) -> list[Entry]:
        """Commits that nothing has retired."""
        retired = {key for entry in self.entries if entry.kind == "retire" for key in entry.body["manifests"]}
        return [e for e in self.entries if e.kind == "commit" and e.body["manifest"] not in retired]

    def commits(self) -> tuple[m.Commit, ...]:
        return tuple(
            m.Commit(b["step"], m.GenerationId(b["term"], b["n"]), b["manifest"], entry.seq, b["digest"])
            for entry in self.retained()
            for b in (entry.body,)
        )

    def digest(self, manifest: str) -> str:
        return next(e.body["digest"] for e in self.entries if e.body.get("manifest") == manifest)

    def damage(self, manifest: str, *, missing: bool) -> None:
        held = self._objects.held.pop(manifest, None)
        self.damaged.setdefault(manifest, self.now_s())
        if held is not None and not missing:
            data = bytearray(held[0])
            data[len(data) // 2] ^= 1
            self._objects.held[manifest] = bytes(data), held[1]


class StoreChecks:
    """Watcher of the objects of one simulation."""

    def __init__(self, sim: StoreSim, mirror: StoreMirror) -> None:
        self._sim, self._mirror, self._objects = sim, mirror, sim.objects
        mirror.now_s = lambda: sim.now
        self._needed: dict[str, set[str]] = {}  # by manifest: keys of all that it needs
        self._announced: set[str] = set()  # saves whose intent was ever put
        self._begun: dict[str, float] = {}  # by intent: when its save began
        self.deleted = 0
        self._committed_at: dict[tuple[int, int, int], float] = {}  # by state: term, n, step
        sim.objects.stored, sim.objects.deleting = self._stored, self._deleting
        sim.objects.looked, sim.objects.batch, sim.objects.told = self._looked, self._batch, self._told

    def _say(self, text: str) -> None:
        self._sim.violation(text)

    def _load(self, key: str, digest: str = "") -> Manifest:
        return load_manifest(self._client(), key, digest)

    def _client(self) -> Client:
        return Client(self._objects, self._sim.processes, None)

    # --- while it runs ---------------------------------------------------------------------------------

    def _stored(self, client: Client, key: str, data: bytes) -> None:
        folder = key.partition("/")[0]
        if folder == "log":
            entry = self._mirror.note(data, int(key[4:12]), self._sim.now)
            if entry.kind == "commit":
                self._committed(entry)
            elif entry.kind == "retire":
                self._retired(set(entry.body["manifests"]))
        elif folder == "intents":
            self._begun.setdefault(key, self._sim.now)
            self._announced.add(key.rpartition("-")[0] + "-")
            self._still_renewed(key)
        elif key == "summary.json":
            self._sim.checks.summed_up(json.loads(data)["term"])

    def _looked(self, client: Client, key: str) -> None:
        """Check that a save has put its intent before it looks what is there."""
        if client.save and client.save not in self._announced:
            self._say(f"{client.save}... looks for {key} before its intent is put")

    def _still_renewed(self, key: str) -> None:
        """Check that intents are let go of once their state is committed, and that was told."""
        at = self._committed_at.get(_state(key), self._sim.now)
        assert isinstance(self._sim.checks, Checks)
        calm = self._sim.checks.promptness.calm_since() < at - CALM_S
        if calm and self._sim.now > at + SETTLED_S:
            self._say(f"{key} is renewed {self._sim.now - at:.0f} s after its commit")

    def _retired(self, given_up: set[str]) -> None:
        """Check that the newest commits are not given up, as many as are to be kept, void ones apart."""
        there = {e.body["manifest"]: e for e in self._mirror.entries if e.kind == "commit"}
        unread = self._sim.now - UNREAD_S  # a collection looks at the manifests, and then gives up others
        good = [key for key in there if self._mirror.damaged.get(key, math.inf) > unread]
        specs = [e.spec for e in self._mirror.log if e.spec is not None]
        counting = [key for key in good if self._counts(specs[-1], there[key].body)]
        kept = self._sim.job.checkpoint.keep_last
        for key in {*good[-kept:], *counting[-kept:]} & given_up:
            self._say(f"the commit of step {there[key].body['step']} is given up, one of the newest")
        steps = {there[key].body["step"]: key for key in counting}
        elastic = self._sim.job.elastic
        reach = elastic.rewind_steps if elastic.on_nonfinite == "rewind" else math.inf
        early = [step for step in steps if step <= max(steps) + 1 - reach]
        if early and steps[max(early)] in given_up:
            self._say(f"the commit of step {max(early)} is given up, to which a rewind would go back")

    def _counts(self, newest: m.GenerationSpec, body: dict[str, Any]) -> bool:
        return self._sim.checks.counts(newest, m.GenerationId(body["term"], body["n"]), body["step"])

    def _committed(self, entry: Entry) -> None:
        key = entry.body["manifest"]
        state = entry.body["term"], entry.body["n"], entry.body["step"]
        self._committed_at.setdefault(state, self._sim.now)
        try:
            manifest = self._load(key, entry.body["digest"])
        except CorruptError as error:
            self._say(f"commit of step {entry.body['step']}: {error}")
            return
        needed = {chunk_key(address) for address in manifest.chunks} | {s.key for s in manifest.ledger}
        self._needed[key] = needed | {key}
        if missing := sorted(needed - self._objects.held.keys()):
            self._say(f"commit of step {manifest.step} needs {missing[0]}, which is not there")
            return
        self._mirror.histories[key] = history_of(read_ledger(self._client(), manifest))

    def _deleting(self, client: Client, key: str) -> None:
        folder = key.partition("/")[0]
        if folder == "intents":
            self._begun.pop(key, None)
        if folder not in ("chunks", "manifests", "ledger"):
            return
        self.deleted += 1
        for entry in self._mirror.retained():
            manifest = entry.body["manifest"]
            if key in self._needed.get(manifest, ()) and manifest not in self._mirror.damaged:
                self._say(f"{key} is deleted, and the commit of step {entry.body['step']} needs it")
        self._spares_saves(key)
        self._of_the_newest_term(client, key)
        self._sim.usurp(client)

    def _told(self, client: Client, before: str) -> None:
        """Have a collector replaced when it has just been told that it is the newest."""
        if before.endswith((" chunks", " manifests")):
            self._sim.usurp(client)

    def _of_the_newest_term(self, client: Client, key: str) -> None:
        """Check that nobody deletes who could have known for long of a newer term."""
        claims = zip(self._mirror.entries, self._mirror.times, strict=True)
        newer = [at for entry, at in claims if entry.kind == "term" and entry.term > client.term]
        late_s = self._sim.now - min(newer, default=math.inf)
        if client.term and late_s > LATE_S and self._sim.storage.hung_until < self._sim.now - late_s:
            self._say(f"{key} is deleted by term {client.term}, {late_s:.1f} s after a newer one was claimed")

    def _batch(self, client: Client, key: str) -> None:
        if client.latest != "list log" and not key.startswith("intents/"):  # nothing counts on those
            self._say(f"{key} is deleted after a {client.latest}: the log was not read just before")

    def _condemned(self, key: str) -> dict[str, float]:
        """Lists that name an object, and when each was last put: again, where an answer was lost."""
        name, held = key.rpartition("/")[2].encode(), self._objects.held
        lists = {entry.key: held[entry.key] for entry in self._objects.list("condemned/")}
        return {list_key: at for list_key, (data, at) in lists.items() if name in data}

    def _spares_saves(self, key: str) -> None:
        condemned = self._condemned(key)
        condemned_s = min(condemned.values(), default=math.inf)
        now, grace_s = self._sim.now, max(DEAD_INTENT_S, self._sim.job.checkpoint.gc_grace_s)
        for intent, (data, written_s) in self._objects.held.items():
            if not intent.startswith("intents/") or now - written_s > grace_s:
                continue
            if self._begun[intent] >= condemned_s:
                continue  # it began when the list was there to be read
            said = json.loads(data)
            chunks = said["chunks"]
            if chunks is None and condemned.keys() & set(said.get("obeyed", ())):
                continue  # it has read the list
            if chunks is None:
                self._say(f"{key} is deleted while {intent} has not said what it counts on")
            elif key in {chunk_key(address) for address in chunks}:
                self._say(f"{key} is deleted, and {intent} counts on it")

    # --- afterwards --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let a last coordinator collect what is left, and look at what remains."""
        sim, job = self._sim, self._sim.job
        sim.storage.down_until = sim.storage.hung_until = sim.storage.mute_until = 0.0
        self._objects.held[JUNK] = b"junk", sim.now  # so that there is something to collect
        client = self._client()
        log = RunLog(client)
        client.term = log.claim_term("the end")
        try:
            for _ in range(3):
                sim.now += max(DEAD_INTENT_S, job.checkpoint.gc_grace_s) + 1.0
                gc.collect(client, log, job.checkpoint, gc.rewind_reach(job))
        except StorageError as error:
            self._say(f"nothing is collected any more: {error}")
            return
        retained = [e for e in self._mirror.retained() if e.body["manifest"] not in self._mirror.damaged]
        most = 2 * job.checkpoint.keep_last + 1  # of those that count, and of all
        if reach := gc.rewind_reach(job):
            most += 2 + reach // job.checkpoint.interval_steps
        if len({entry.body["manifest"] for entry in retained}) > most:
            self._say(f"{len(retained)} commits are kept, {most} would do")
        needed = set().union(*(self._needed[entry.body["manifest"]] for entry in retained))
        for key in self._objects.held:
            folder = key.partition("/")[0]
            if folder in ("chunks", "manifests") and key not in needed:
                self._say(f"{key} is left, and nothing needs it")
            elif folder in ("intents", "condemned"):
                self._say(f"{key} is left")
        for entry in retained:
            self._bytes_are_right(entry)

    def _bytes_are_right(self, entry: Entry) -> None:
        client, key = self._client(), entry.body["manifest"]
        history = self._mirror.histories[key]
        manifest = self._load(key, entry.body["digest"])
        for stored in manifest.shards:
            raw = check_shard(stored, fetch_chunk(client, stored.chunk, manifest.chunks[stored.chunk]))
            (low,), (rows,) = stored.shard.box.offset, stored.shard.box.size
            expected = content(stored.shard.name, history, manifest.step)[8 * low : 8 * (low + rows)]
            if bytes(raw) != expected.tobytes():
                self._say(f"{stored.shard.name} of the commit of step {manifest.step} has other bytes")


def _state(intent: str) -> tuple[int, int, int]:
    """Term, number and step of the state that an intent is for."""
    step, term, n = map(int, intent.removeprefix("intents/").split("-")[:3])
    return term, n, step
