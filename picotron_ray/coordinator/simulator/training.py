"""Simulated generation at work: rendezvous, steps, snapshots, and how it breaks.

A state is represented by its history: segments (generation, from, to) that say which generation did which
steps. Snapshots are written down only when somebody could look at them: at checkpoints, and when the
generation ends, where each member may or may not have sealed the step before the last event.
"""

from __future__ import annotations

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.protocols import WorkerProtocol, World
from picotron_ray.coordinator.simulator.slots import SimSlot, StepHistory
from picotron_ray.coordinator.simulator.telemetry import LATE_S, is_told, measured
from picotron_ray.failures import FailureKind

LONGEST_RENDEZVOUS_S = 5.0
OUTAGE_POLL_S = 1.0
LAGS = 0.03  # share of orderly ends at which one member stays behind, stuck
SEALED = 0.6  # share of a step after which all members have sealed the one before
HOLD_POLL_S = 0.2  # at which members that stay at a boundary look whether they go on
FILES = 3  # slots of a worker, which are written over and over


class SimGeneration:
    """Members that train together; ``step`` is the last finished step."""

    def __init__(self, sim: World, spec: m.GenerationSpec, base: StepHistory) -> None:
        self.sim, self.spec, self.base = sim, spec, base
        self.step = spec.resume_step
        self.step_s = sim.step_s
        self.joined: set[str] = set()
        self.broken = self.boundary = self.ended = self.watched = False
        self.torn = False  # a step waits for what will not come
        self.complained = False  # a stall was told of
        self.store_frozen = False  # its members do not find each other
        self.pin_next = False
        self.made_at = sim.now
        self.began_at = 0.0  # of the present step
        self.held_since: float | None = None  # all members stay at a boundary
        self._held_s = 0.0  # of the last such time that is over

    # --- at work ------------------------------------------------------------------------------------

    def join(self, worker: WorkerProtocol) -> None:
        """Enter a member that reached the rendezvous; the last one sets the generation off."""
        if not self.joined:
            self.sim.after(LONGEST_RENDEZVOUS_S, self._expect_all)
        self.joined.add(worker.name)
        if self.broken:
            self.sim.after(0.05, worker.leave, self, FailureKind.PEER_LOST)
        elif len(self.joined) == len(self.spec.members) and not self.store_frozen:
            self.sim.after(self.sim.rng.uniform(0.1, 0.6), self._start)

    def _expect_all(self) -> None:
        if self._late():
            self.stalled()

    def _late(self) -> bool:
        """Whether members wait for each other."""
        return self.store_frozen or len(self.joined) < len(self.spec.members)

    def _start(self) -> None:
        if self.broken or self._stuck():
            return
        if self.spec.source.kind == "commit" and self.sim.now < self.sim.storage.down_until:
            self.sim.after(OUTAGE_POLL_S, self._wait_for_storage)
            return
        detail = self.sim.unreadable(self.spec.source)
        if detail:
            self._fail(detail)
        else:
            self._next()

    def _wait_for_storage(self) -> None:
        """Sit out an outage; a member that is asked to stop leaves instead."""
        if self.boundary and not self.broken:
            self.ended = True
            for worker in self.members():
                worker.leave(self, "interrupted")
        else:
            self._start()

    def _fail(self, detail: str) -> None:
        """Some members find it; the others wait for them until they are told to leave."""
        members = self.members()
        for at, worker in enumerate(members):
            if at == 0 or self.sim.rng.chance(0.5):
                worker.leave(self, FailureKind.FAILED, detail)

    def _next(self) -> None:
        culprit = self.sim.cursed(self)
        if culprit is not None:
            culprit.leave(self, FailureKind.FAILED, "error: cursed")
            return
        if hold_s := self.sim.hold_s():
            self.held_since = self.sim.now
            self._stay(self.sim.now + hold_s)
        else:
            self._step()

    def _stay(self, until: float) -> None:
        """Stay at the boundary, until then or until members are asked to leave; then do the next step."""
        if self.broken or self.ended or self._stuck():
            self._end_hold()
        elif self.sim.now < until and not self.boundary:
            self.sim.after(HOLD_POLL_S, self._stay, until)
        else:
            self._end_hold()
            self._step()

    def _end_hold(self) -> None:
        if self.held_since is not None:
            self._held_s, self.held_since = self.sim.now - self.held_since, None

    @property
    def newest_holds_s(self) -> tuple[float, ...]:
        """Seconds for which members stayed at a boundary when they last did, and do now."""
        return (self._held_s, *(() if self.held_since is None else (self.sim.now - self.held_since,)))

    def _step(self) -> None:
        self.began_at = self.sim.now
        self.sim.after(self.step_s, self._step_done, self.step + 1)

    def _step_done(self, step: int) -> None:
        if self.broken or self.ended or self._stuck():
            return
        if step == self.sim.bad_step and not self.spec.passes_over(step):
            self._give_up(step)
            return
        self.step = step
        self.sim.stepped(self)
        if is_told(self.spec, step):
            told = measured(self.sim.job, self.spec, step, self.step_s)
            self.sim.after(LATE_S, self.sim.tell, told)
        if step == self.spec.resume_step + 2:
            self._drop_older()
        last = step == self.sim.job.steps
        if last or step % self.sim.job.checkpoint.interval_steps == 0 or self.pin_next:
            self._pin(step)
        if last or self.boundary:
            self.ended = True
            members = self.members()
            members[-1].hung = members[-1].hung or (len(members) > 1 and self.sim.rng.chance(LAGS))
            for worker in members:
                self._write(worker, step)
                worker.leave(self, "finished" if last else "interrupted")
            return
        self._next()

    def _give_up(self, step: int) -> None:
        """All members agree that the step is bad, and leave with the state before it."""
        self.ended = True
        for worker in self.members():
            if self.step > self.spec.resume_step:
                self._write(worker, self.step, whole=True)
            worker.leave(self, FailureKind.NUMERICS, "a bad step", step)

    def _stuck(self) -> bool:
        """A hung member stops everybody; their agents notice."""
        hung = any(worker.hung for worker in self.members()) or len(self.members()) < len(self.spec.members)
        if hung or self.parted():
            self.torn = True
            self.sim.after(1.5, self.stalled)
        return self.torn

    def parted(self) -> bool:
        """Whether members do not reach each other."""
        return self.sim.parts({member.node for member in self.spec.members})

    def stalled(self) -> None:
        """Let the agents notice that nothing moves."""
        if not self.watched:
            self.watched = True
            self._complain()

    def _complain(self) -> None:
        """Report a stalled member, a random one each second, until the generation breaks, ends or goes on.

        Agents see none whose page is lost, and know why one stands still that they rescue.
        """
        present = [w for w in self.members() if w.generation is self]
        if self.broken or self.ended or not present:
            return
        if not (self._late() or self.torn or self.parted() or any(worker.hung for worker in present)):
            self.watched = False
            return
        if shown := [worker for worker in present if worker.paged and not worker.rescued]:
            self.complained = True
            worker = self.sim.rng.pick(shown)
            worker.node.report(m.Stalled(worker.name, self.spec.id, "reduce", 1.5))
        self.sim.after(1.0, self._complain)

    # --- snapshots ------------------------------------------------------------------------------------

    def history(self, step: int) -> StepHistory:
        resume = self.spec.resume_step
        return self.base if step == resume else (*self.base, (self.spec.id, resume, step))

    def _pin(self, step: int) -> None:
        """A checkpoint snapshot: sealed in the background, pinned and reported node by node."""
        self.pin_next = False
        for name in dict.fromkeys(worker.node.name for worker in self.members()):
            delay = self.sim.rng.uniform(0.05, 0.4) * min(1.0, self.step_s)
            self.sim.after(delay, self._seal, name, step)

    def _seal(self, name: str, step: int) -> None:
        """Report the snapshot of a node's members that its agent sees alive as sealed."""
        node = self.sim.nodes.get(name)
        here = [worker for worker in self.members() if worker.node is node and not worker.hung]
        living = [worker for worker in here if worker.paged]
        if node is not None and living and self.sim.now >= node.full_until:
            slots = [self._sealed_by(worker, step) for worker in living]
            sealed = tuple(slot for slot in slots if slot is not None)
            if len(sealed) == len(slots):
                node.report(m.SnapshotSealed(name, self.spec.id, step, sealed))
            else:
                self.sim.checks.skipped(node, self)

    def _sealed_by(self, worker: WorkerProtocol, step: int) -> m.SlotInfo | None:
        """Slot of a member with a checkpoint; who has left the generation has sealed it by then, or never."""
        if worker.generation is self:
            return self._write(worker, step, pinned=True)
        for held in worker.node.slots.values():
            info = held.info
            if (info.generation, info.step) == (self.spec.id, step) and info.slot.startswith(
                f"{worker.name}."
            ):
                held.pinned = True
                return info
        return None

    def _file(self, worker: WorkerProtocol, step: int) -> str | None:
        """File for a snapshot: the state's own, an empty one, or that of the oldest state nobody needs.

        None where all are pinned, belong to the state that this generation came from, or hold one that is not
        older than what all members have sealed.
        """
        names = [f"{worker.name}.{at}" for at in range(FILES)]
        held = {name: worker.node.slots.get(name) for name in names}
        states = {
            name: (slot.info.generation, slot.info.step) for name, slot in held.items() if slot is not None
        }
        source = set(self.spec.source.identities)
        same = [name for name, state in states.items() if state == (self.spec.id, step)]
        empty = [name for name in names if name not in states]
        needless = [
            slot
            for name, slot in held.items()
            if slot is not None and slot.info.identity not in source
            if states[name] < (self.spec.id, self.step - 1)
        ]
        pinned = [slot for slot in held.values() if slot is not None and slot.pinned]
        if needless and not (same or empty) and all(slot.pinned for slot in needless) and len(pinned) > 1:
            oldest = min(needless, key=lambda slot: states[slot.info.slot])
            oldest.pinned = False  # as a slot pool does: a newer checkpoint waits for its upload
        old = [slot.info.slot for slot in needless if not slot.pinned]
        return next(iter((*same, *empty, *sorted(old, key=states.__getitem__))), None)

    def _write(
        self, worker: WorkerProtocol, step: int, *, pinned: bool = False, whole: bool = False
    ) -> m.SlotInfo | None:
        name = self._file(worker, step)
        if name is None:
            return None
        rank = next(i for i, member in enumerate(self.spec.members) if member.worker == worker.name)
        layout = self.spec.layout
        group = layout.state_group(rank)
        part = m.Fragment(group)
        there = worker.node.slots.get(name)
        flushed = there is not None and (there.info.generation, there.info.step) == (self.spec.id, step)
        if not whole and not (flushed and there is not None and there.info.fragments == (part,)):
            local = [r for r in layout.state_replicas(rank) if self.spec.members[r].node == worker.node.name]
            part = m.Fragment(group, local.index(rank), len(local))
        info = m.SlotInfo(worker.node.name, name, self.spec.id, step, rank, (part,))
        worker.node.keep(SimSlot(info, self.history(step), pinned))
        return info

    def _drop_older(self) -> None:
        """Every rank has sealed a step of this generation: older slots may be overwritten."""
        mine = {member.worker for member in self.spec.members}
        for node in {worker.node for worker in self.members()}:
            for held in list(node.slots.values()):
                owner = held.info.slot.split(".")[0]
                if not held.pinned and held.info.generation < self.spec.id and owner in mine:
                    del node.slots[held.info.slot]

    # --- the end ------------------------------------------------------------------------------------

    def members(self) -> list[WorkerProtocol]:
        """Members whose process lives."""
        return [w for x in self.spec.members if (w := self.sim.worker(x.worker)) is not None]

    def shatter(self) -> None:
        """Break the generation: no step is finished any more; all that members had sealed is written."""
        if self.broken or self.ended:
            return
        self.broken = True
        rng, resume = self.sim.rng, self.spec.resume_step
        share = (self.sim.now - self.began_at) / self.step_s if self.held_since is None else SEALED
        self._end_hold()
        inside_optimizer = bool(self.began_at) and share > 0.8
        for worker in self.members():
            if self.step - 1 > resume:
                self._write(worker, self.step - 1)
            if self.step > resume and (share > 0.5 or rng.chance(share)):
                self._write(worker, self.step)
            worker.clean = self.step + rng.below(2) if inside_optimizer else self.step
            worker.writing = inside_optimizer and rng.chance(0.3)
            if worker.generation is self and not worker.hung and rng.chance(0.5):
                self.sim.after(rng.uniform(0.01, 0.1), worker.leave, self, FailureKind.PEER_LOST)

    def flush(self, worker: WorkerProtocol) -> None:
        """Write down a survivor's live state, where it is clean."""
        if self.began_at and not worker.writing and worker.clean > self.spec.resume_step:
            self._write(worker, worker.clean, whole=True)
