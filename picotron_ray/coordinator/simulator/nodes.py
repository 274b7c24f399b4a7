"""Simulated agents and workers: they obey the newest term, keep slots, and answer when they can."""

from __future__ import annotations

from dataclasses import replace

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.lineage import slim
from picotron_ray.coordinator.simulator.protocols import GenerationProtocol, World
from picotron_ray.coordinator.simulator.slots import SimSlot
from picotron_ray.failures import FailureKind

BUSY = 0.1  # share of inventories that take long
SLOW_ANSWER_S = 3.0  # longest that one takes
HANGS_S = 8.0  # after its time such a process ends by itself, where nobody ends it
HANGING = 0.3  # share of failed starts that neither end nor answer
HUSHED_S = 3.0  # how late what is told late is told at most


class SimWorker:
    """One worker process."""

    __slots__ = (
        "clean",
        "generation",
        "hung",
        "last",
        "name",
        "node",
        "outcome",
        "paged",
        "read_again_at",
        "ready",
        "rescued",
        "stored",
        "term",
        "writing",
    )

    def __init__(self, name: str, node: SimNode) -> None:
        self.name, self.node = name, node
        self.ready = self.hung = False
        self.paged, self.read_again_at = True, 0.0  # its agent can read its page; since when it can again
        self.rescued = False  # stopped, until its slots are saved from a folder that was deleted
        self.generation: GenerationProtocol | None = None
        self.last: m.GenerationId | None = None  # newest generation that it was told to run
        self.term = 0  # of the coordinator that called it last
        self.outcome: m.Outcome | None = None
        self.clean, self.writing = 0, False

    @property
    def shown(self) -> bool:
        """Whether its agent knows that it lives."""
        return self.ready and self.paged

    @property
    def step(self) -> int:
        """Finished steps, as its page says."""
        if self.generation is not None:
            return self.generation.step
        return self.clean if self.outcome is None else self.outcome.step

    def run(self, spec: m.GenerationSpec, joins: bool) -> None:
        """Take part; told again, say how it ended or do nothing.

        Args:
            joins: there is no store, so no other generation is begun than the one that it knows.
        """
        before, self.term = self.term, self.node.term
        if self.last is not None and spec.id <= self.last:
            if joins and spec.id == self.last and self.outcome is not None:
                self.node.report(self.outcome, reliable=True)
            return
        if joins:
            none = m.Outcome(self.name, spec.id, FailureKind.PEER_LOST, -1, "no rendezvous store")
            self.node.report(none, reliable=True)
            return
        if self.generation is not None and before < self.term:
            self.leave(self.generation, FailureKind.PEER_LOST)  # its coordinator, and the interrupt, are gone
        if self.generation is not None and not self.hung:
            self.node.sim.violation(
                f"{self.name} was told to run {spec.id} while in {self.generation.spec.id}"
            )
        self.last, self.outcome, self.clean, self.writing = spec.id, None, spec.resume_step, False
        self.generation = self.node.sim.generation(spec)
        self.generation.join(self)

    def interrupt(self, generation: m.GenerationId, mode: str) -> None:
        at = self.generation
        if at is None or self.hung or at.spec.id != generation:
            return
        if mode == "boundary" and not at.broken:
            at.boundary = True
        elif mode == "hard":
            self.leave(at, FailureKind.PEER_LOST)

    def leave(
        self, generation: GenerationProtocol, kind: m.OutcomeKind, detail: str = "", bad_step: int = 0
    ) -> None:
        """End the generation on this member; leaving early breaks it for the others."""
        if self.generation is not generation or self.node.sim.worker(self.name) is not self or self.hung:
            return
        self.generation = None
        if not generation.ended:
            generation.shatter()
            generation.flush(self)
            step = max(self.clean, generation.spec.resume_step)
        else:
            step = generation.step
        why = "non-finite" if bad_step else ""
        self.outcome = m.Outcome(self.name, generation.spec.id, kind, step, detail, 0.0, bad_step, why)
        sim = self.node.sim  # it comes as the call's reply and, later, through the agent
        sim.after(sim.rng.uniform(0.01, 0.08), self.node.report, self.outcome, True)
        sim.after(sim.rng.uniform(0.05, 1.5), self.node.report, self.outcome)


class SimNode:
    """A node with its agent; it dies with everything on it."""

    def __init__(self, sim: World, name: str, capacity: int) -> None:
        self.sim, self.name, self.capacity = sim, name, capacity
        self.term = 0  # newest coordinator heard of
        self.workers: dict[str, SimWorker] = {}
        self.slots: dict[str, SimSlot] = {}
        self.spec: m.GenerationSpec | None = None  # newest generation heard of
        self.kept: set[str] = set()  # slots that are marked to outlive all processes
        self.kept_by: m.GenerationSpec | None = None  # newest generation that an earlier launch knew of here
        self.leaves_at: float | None = None  # deadline of its drain
        self.frozen_until = 0.0  # it does and says nothing before this time, and then everything
        self.deaf_until = self.dumb_until = 0.0  # no messages to, or from, here before these times
        self.loses, self.loses_until = 0, 0.0  # so many messages from here are lost before that time
        self.storage_down_until = 0.0  # storage does not answer here before this time
        self.full_until = 0.0  # there is no room for snapshots before this time
        self.hushed_until = 0.0  # stalls and exits before this time are told late
        self.cut_until = 0.0  # no messages between here and any coordinator before this time
        self.store_fault, self.store_bad_until = "", 0.0  # of its rendezvous store, and until when
        self.stores_replaced = 0
        self.rescued_until = 0.0  # slots are saved until then from a folder that was deleted

    def unheard_until(self) -> tuple[float, ...]:
        """Times until which messages to or from the node are late or lost."""
        return (self.cut_until, self.frozen_until, self.loses_until, self.deaf_until, self.dumb_until)

    def disturbed_until(self) -> tuple[float, ...]:
        """Times until which something is wrong with the node."""
        return (
            *self.unheard_until(),
            *(self.storage_down_until, self.full_until, self.hushed_until + HUSHED_S, self.store_bad_until),
            self.rescued_until,
        )

    @property
    def cut(self) -> bool:
        return self.sim.now < self.cut_until

    @property
    def away(self) -> bool:
        """Whether a call to the agent is not answered now."""
        return self.sim.now < max(self.cut_until, self.frozen_until, self.deaf_until, self.dumb_until)

    @property
    def store_trouble(self) -> str:
        """Trouble with its rendezvous store: mute, broken (it does not start), frozen (in use), or ""."""
        return self.store_fault if self.sim.now < self.store_bad_until else ""

    def asked_for_store(self) -> str:
        """Return what is wrong with its answer, "" for nothing: an agent that does not answer is mute."""
        if self.sim.stuns and self.sim.now < self.sim.stuns_until:
            self.frozen_until = max(self.frozen_until, self.sim.now + self.sim.stuns.pop())
        return "mute" if self.away else self.store_trouble

    def accepts(self, term: int) -> bool:
        """Whether an order of that term is obeyed; a newer one is remembered."""
        self.term = max(self.term, term)
        return term >= self.term

    def drops(self) -> bool:
        """Whether the message that is sent from here now is lost."""
        if self.loses and self.sim.now < self.loses_until:
            self.loses -= 1
            return True
        return self.sim.now < max(self.cut_until, self.dumb_until)

    def report(self, event: m.Event, reliable: bool = False) -> None:
        late = isinstance(event, m.Stalled | m.WorkerExited) and self.sim.now < self.hushed_until
        if late:
            self.sim.after(
                self.sim.rng.uniform(0.5, HUSHED_S), self.sim.to_coordinator, self, event, reliable
            )
        else:
            self.sim.to_coordinator(self, event, reliable)

    def hello(self) -> None:
        """Introduce itself to a coordinator that does not know it, with what lives and is pinned on it."""
        self.introduce()
        self.tell_seals()

    def introduce(self) -> None:
        """Join, and tell what lives on it."""
        ready = [worker for worker in self.workers.values() if worker.shown]
        idle = tuple(worker.name for worker in ready if worker.generation is None)
        self.report(replace(self.joined(), idle=idle), reliable=True)
        for worker in ready:
            if worker.name not in idle:
                self.report(m.WorkerReady(worker.name, self.name), reliable=True)
        if self.leaves_at is not None:
            self.report(m.DrainNotice(self.name, self.leaves_at), reliable=True)

    def restart(self) -> None:
        """Start the agent's process anew: what it was asked is lost, and it tells all again."""
        self.tell_seals()

    def tell_seals(self) -> None:
        """Report all pinned states again, as to a coordinator that may not have heard of them."""
        pinned = [held.info for held in self.slots.values() if held.pinned]
        for state in sorted({(info.generation, info.step) for info in pinned}):
            if self.sim.nodes.get(self.name) is self:
                slots = tuple(info for info in pinned if (info.generation, info.step) == state)
                self.report(m.SnapshotSealed(self.name, *state, slots))

    def joined(self) -> m.NodeJoined:
        """Return what a coordinator hears when it meets this node."""
        kept = tuple(held.info for name, held in self.slots.items() if name in self.kept)
        kept_by = (self.kept_by or self.spec) if kept else None
        kept_by = None if kept_by is None else slim(kept_by)
        return m.NodeJoined(self.name, self.capacity, kept=kept, kept_by=kept_by)

    def keep(self, held: SimSlot) -> None:
        """Keep a sealed slot; there is one file per name, and none where there is no room."""
        if self.sim.now < self.full_until:
            return
        old = self.slots.get(held.info.slot)
        if old is not None and old.info.identity == held.info.identity:
            held.pinned = held.pinned or old.pinned
        elif old is not None:
            self.sim.checks.deleted(old.info)
        self.slots[held.info.slot] = held
        self.sim.checks.slots[held.info.identity] = held

    # --- orders --------------------------------------------------------------------------------------

    def start_worker(self, name: str) -> None:
        if name in self.workers or self.sim.nodes.get(self.name) is not self:
            return
        if len(self.workers) >= self.capacity + 1:  # as in Ray, it waits for resources
            self.sim.after(1.0, self.start_worker, name)
            return
        worker = self.workers[name] = SimWorker(name, self)
        if self.sim.rng.chance(self.sim.start_failures):
            if self.sim.launched and self.sim.rng.chance(HANGING):
                self.sim.start_hangs()
                self.sim.after(
                    self.sim.job.cluster.start_timeout_s + HANGS_S, self.worker_dies, worker, "hang"
                )
            else:
                self.sim.after(1.0, self.worker_dies, worker, "start_failed")
        else:
            self.sim.after(self.sim.rng.uniform(0.8, 3.0), self._up, worker)

    def _up(self, worker: SimWorker) -> None:
        if self.workers.get(worker.name) is worker:
            worker.ready = True
            self.report(m.WorkerReady(worker.name, self.name), True)

    def kill(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is None:
            self.report(m.WorkerExited(name, "unknown"), True)
        elif not worker.rescued:  # else its end is told when its slots are saved
            self.worker_dies(worker, "killed")

    def rescue(self, seconds: float) -> None:
        """Stop all workers while their slots are saved, and end them then."""
        self.rescued_until = self.sim.now + seconds
        robbed = [worker for worker in self.workers.values() if worker.ready]
        for worker in robbed:
            worker.rescued = worker.hung = True
        for generation in {id(w.generation): w.generation for w in robbed}.values():
            if generation is not None:
                self.sim.after(1.5, generation.stalled)
        self.sim.after(seconds, self._saved, robbed)

    def _saved(self, robbed: list[SimWorker]) -> None:
        for worker in robbed:
            worker.rescued = False
            self.worker_dies(worker, "its files were deleted")

    def worker_dies(self, worker: SimWorker, cause: str) -> None:
        if self.workers.get(worker.name) is not worker:
            return
        generation = worker.generation
        if generation is not None:
            generation.shatter()
        del self.workers[worker.name]
        worker.generation = None
        self.sim.after(
            self.sim.rng.uniform(0.02, 0.06), self.report, m.WorkerExited(worker.name, cause), True
        )

    def close(self) -> None:
        """End everything of the run; a coordinator that goes on with it finds a fresh agent here later."""
        if self.sim.nodes.get(self.name) is self:
            self.sim.remove_node(self, told=True)
            self.sim.after(5.0, self.sim.add_node, self.capacity)

    def free(self) -> None:
        """End everything that the run has here, and speak no more."""
        if self.sim.nodes.get(self.name) is self:
            self.sim.remove_node(self, told=False)

    def collect(self, request: int) -> None:
        """Answer with what is sealed now; a busy node's answer takes long, and others overtake it.

        While slots are saved there is none.
        """
        if self.sim.now < self.rescued_until:
            return
        slots = tuple(held.info for held in self.slots.values())
        answer = m.Inventory(self.name, request, slots)
        if self.sim.rng.chance(BUSY):
            self.sim.after(self.sim.rng.uniform(0.2, SLOW_ANSWER_S), self.report, answer)
        else:
            self.report(answer)

    def quarantine(self, command: m.Quarantine) -> None:
        held = self.slots.get(command.slot)
        if held is not None and (held.info.generation, held.info.step) == (command.generation, command.step):
            del self.slots[command.slot]

    def release(
        self, generation: m.GenerationId, step: int, spared: tuple[m.StateId, ...] = (), committed: int = 0
    ) -> None:
        """Unpin up to a state, but for those ``spared``; delete what dead workers left behind from before it.

        What the newest generation came from stays until a state of its own is released, and what an earlier
        launch kept until its step is ``committed``.
        """
        older = self.spec is not None and generation < self.spec.id
        needed = {name for _, name, _, _ in self.spec.source.identities} if self.spec and older else set()
        living = {worker.name for worker in self.workers.values() if worker.paged}
        for held in list(self.slots.values()):
            key = (held.info.generation, held.info.step)
            if m.StateId(*key) in spared:
                continue
            marked = held.info.slot in self.kept
            kept = marked and key <= (generation, step) and held.info.step <= committed
            if kept:
                self.kept.discard(held.info.slot)
            elif marked:
                continue
            dead = held.info.slot.split(".")[0] not in living and held.info.slot not in needed
            if (kept or key < (generation, step)) and dead:
                self.sim.checks.deleted(held.info)
                del self.slots[held.info.slot]
            elif key <= (generation, step):
                held.pinned = False

    def mark(self, generation: m.GenerationId, step: int) -> None:
        """Mark the slots of a state as ones that the next launch must find."""
        state = (generation, step)
        self.kept |= {
            name for name, held in self.slots.items() if (held.info.generation, held.info.step) == state
        }

    def upload(self, command: m.Upload) -> None:
        self.sim.after(self.sim.rng.uniform(0.1, 1.5), self._uploaded, command)

    def _uploaded(self, command: m.Upload) -> None:
        sim = self.sim
        if sim.nodes.get(self.name) is not self:
            return
        state = (command.generation, command.step)
        found = [self.slots[name] for name in command.slots if name in self.slots]
        held = [slot for slot in found if (slot.info.generation, slot.info.step) == state]
        gone = sorted(set(command.slots) - {slot.info.slot for slot in held})
        bad = [slot.info.slot for slot in held if slot.corrupt]
        error = ""
        if sim.now < sim.storage.hung_until:
            sim.after(sim.storage.hung_until - sim.now + 0.01, self._uploaded, command)
            return
        if sim.now < max(sim.storage.down_until, self.storage_down_until):
            error = "storage is down"
        elif gone:
            error = f"gone:{gone[0]}"
        elif bad:
            error = f"corrupt:{bad[0]}"
        else:
            sim.storage.put(self.name, state, held)
        self.report(m.Uploaded(self.name, *state, error, command.slots))
