"""Simulation of the slots that a run keeps for its next launch, with the real code over real folders.

The first launch is that of ``blackout``: storage goes down for good before the end. Then each machine has a
fate: its node joins the next launch at once, late, when it is too late, is refused, or is away. Where that
launch ends for it, a third one has all of them. A machine may keep slots of another run of that name besides.

Nothing may delete what is not committed, and no run that knows of it trains before it is.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, SlotKey
from picotron_ray.checkpoint.snapshot.slot_pool import SUFFIX, list_slots
from picotron_ray.checkpoint.snapshot.slot_reader import is_pinned, set_pinned
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import plain
from picotron_ray.coordinator.lineage import slim
from picotron_ray.coordinator.plan_book import Choose
from picotron_ray.coordinator.simulator import blackout
from picotron_ray.coordinator.simulator.checks import Checks
from picotron_ray.coordinator.simulator.faults import FAULTS, LONGEST_S, coordinator
from picotron_ray.coordinator.simulator.nodes import SimNode
from picotron_ray.coordinator.simulator.protocols import Observer
from picotron_ray.coordinator.simulator.rng import Rng
from picotron_ray.coordinator.simulator.run import Report
from picotron_ray.coordinator.simulator.slots import SimSlot, complete
from picotron_ray.coordinator.simulator.world import Sim
from picotron_ray.runtime.coordinator import admission
from picotron_ray.runtime.node_agent.kept_state import KeptState
from picotron_ray.runtime.node_agent.slot_release import release_slots
from picotron_ray.runtime.ray_cluster import kept_slots, names
from tests.support.simulation.states import history_of, write_slot

RUN, IDENTITY, FOREIGN = "run", "this run", "another run"
FATES = ("prompt", "prompt", "prompt", "late", "unknown", "refused", "away")
STOPPED = 0.15  # share of the launches that a user stops
LAUNCH_S = 60.0  # cluster.start_timeout_s
Slot = tuple[SlotKey, int, tuple[tuple[int, int, int], ...]]


class KeptNode(SimNode):
    """Node whose slots are files whenever the real code looks at them."""

    sim: KeptSim  # type: ignore[assignment]

    def __init__(self, sim: KeptSim, name: str, capacity: int) -> None:
        super().__init__(sim, name, capacity)
        self.machine = sim.next_machine or name
        self.folder = sim.machine(self.machine) / name
        self.folder.mkdir(parents=True)
        self.refused = ""
        self._files: dict[str, tuple[Any, ...]] = {}
        self._state = KeptState(self.folder, self._info)

    def _info(self, path: Path, header: SlotHeader) -> m.SlotInfo:
        fragments = tuple(m.Fragment(*part) for part in header.fragments)
        generation = m.GenerationId(header.term, header.n)
        return m.SlotInfo(self.name, path.name, generation, header.step, header.rank, fragments)

    def take_over(self, other: Path) -> None:
        """Move what a folder keeps into this node's, as its agent does when it comes up."""
        kept_slots.take_over(self.folder, other)
        for path, header in list_slots(self.folder):
            info = replace(self._info(path, header), slot=path.name.removesuffix(SUFFIX))
            held = SimSlot(info, history_of(list(header.ledger)), is_pinned(path))
            self.keep(held)
            self._files[path.name] = self._stamp(held)

    @staticmethod
    def _stamp(held: SimSlot) -> tuple[Any, ...]:
        return (*held.info.identity, held.info.fragments, held.corrupt)

    @contextmanager
    def real(self) -> Iterator[None]:
        """Let real code at the files; afterwards the node holds what they hold."""
        held = {name + SUFFIX: slot for name, slot in self.slots.items()}
        for path in self.folder.glob(f"*{SUFFIX}"):
            if path.name not in held and path.name in self._files:
                path.unlink()
                del self._files[path.name]
        for name, slot in held.items():
            path = self.folder / name
            if self._files.get(name) != self._stamp(slot):
                write_slot(path, slot, self.sim.layout_of(slot.info.generation))
                self._files[name] = self._stamp(slot)
            set_pinned(path, slot.pinned)
        if self.spec is not None:
            (self.folder / "w.spec").write_text(json.dumps(plain(self.spec)))
        yield
        for name, slot in held.items():
            path = self.folder / name
            if path.exists():
                slot.pinned = is_pinned(path)
            else:
                self.sim.checks.deleted(slot.info)
                del self.slots[slot.info.slot], self._files[name]
        marker = kept_slots.read_marker(self.folder)
        self.kept = {name.removesuffix(SUFFIX) for name in marker["slots"]} if marker else set()

    # --- what an agent does ----------------------------------------------------------------------------

    def told(self) -> dict[str, Any]:
        """What the agent says of kept slots when it is greeted."""
        with self.real():
            return self._state.told(IDENTITY)

    def joined(self) -> m.NodeJoined:
        said = self.told()
        kept = tuple(replace(info, slot=info.slot.removesuffix(SUFFIX)) for info in said["kept"])
        foreign = [admission.foreign_text(said["foreign"], RUN)] if "foreign" in said else []
        kept_by = said["kept_by"] and slim(said["kept_by"])
        refused = "; ".join([self.refused, *foreign] if self.refused else foreign)
        return m.NodeJoined(self.name, self.capacity, refused, kept=kept, kept_by=kept_by)

    def tell_seals(self) -> None:
        """Report what is pinned again, but what an earlier launch kept."""
        with self.real():
            pass
        pinned = [held.info for name, held in self.slots.items() if held.pinned and name not in self.kept]
        newest = max(((info.generation, info.step) for info in pinned), default=None)
        if newest is not None and self.sim.nodes.get(self.name) is self:
            slots = tuple(info for info in pinned if (info.generation, info.step) == newest)
            self.report(m.SnapshotSealed(self.name, *newest, slots))

    def mark(self, generation: m.GenerationId, step: int) -> None:
        with self.real():
            self._state.mark((generation.term, generation.n, step), IDENTITY)

    def release(
        self, generation: m.GenerationId, step: int, spared: tuple[m.StateId, ...] = (), committed: int = 0
    ) -> None:
        older = self.spec is not None and generation < self.spec.id
        needed = (
            {s.slot + SUFFIX for s in self.spec.source.slots} if self.spec is not None and older else set()
        )
        with self.sim.guarded(self.machine), self.real():
            release_slots(
                self.folder,
                (generation.term, generation.n, step),
                self._state.told(IDENTITY)["kept"],
                living={worker.name for worker in self.workers.values() if worker.paged},
                needed=needed,
                keep=[(state.generation.term, state.generation.n, state.step) for state in spared],
                committed=committed,
            )

    def end(self, keep: tuple[int, ...] | None) -> None:
        """End the run here, as ``Agent.close`` does."""
        with self.sim.guarded(self.machine), self.real():
            foreign = "foreign" in self._state.told(IDENTITY)
            if foreign or (keep is not None and self._state.mark(keep, IDENTITY)):
                kept_slots.strip(self.folder)
            else:
                shutil.rmtree(self.folder)


class KeptSim(Sim):
    """Simulated launches of one run on machines that keep its slots."""

    node_class = KeptNode

    def __init__(self, seed: int, job: JobConfig, choose: Choose, checks: Observer) -> None:
        super().__init__(seed, job, choose, checks)
        self._root = Path(tempfile.mkdtemp(prefix="picotron-simulation-", dir="/dev/shm"))
        self._index = mock.patch.object(names, "kept_index", lambda run: self._root / "index" / run)
        self._index.start()
        logging.disable(logging.ERROR)
        self.next_machine = ""  # on which the next node is
        self.awaited: dict[str, int] = {}  # nodes that Ray knows: what they keep

    def machine(self, name: str) -> Path:
        """Folder of the run on a machine."""
        return self._root / name / RUN

    def layout_of(self, generation: m.GenerationId) -> Any:
        assert isinstance(self.checks, Checks)
        return self.checks.specs[generation].layout

    def keeping(self) -> dict[str, int]:
        return self.awaited if self.storage.generations() else {}

    def kept_on(self, machine: str) -> set[Slot]:
        """Slots that are marked on a machine."""
        found = set()
        for folder in kept_slots.keeping([self.machine(machine)]):
            marker = kept_slots.read_marker(folder)
            assert marker is not None
            for path, header in list_slots(folder):
                if path.name in marker["slots"]:
                    found.add((header.key, header.rank, header.fragments))
        return found

    @contextmanager
    def guarded(self, machine: str) -> Iterator[None]:
        """Check that nothing that is kept goes before as many steps are committed."""
        before = self.kept_on(machine)
        yield
        if lost := before - self.kept_on(machine):
            done = max((commit.step for commit in self.storage.commits()), default=0)
            for (term, n, step), *_ in sorted(lost):
                if step > done:
                    self.violation(f"step {step} of {term}.{n} was kept, and is deleted; {done} is committed")

    def close(self) -> None:
        self._index.stop()
        logging.disable(logging.NOTSET)
        shutil.rmtree(self._root)


def simulate_kept(seed: int) -> Report:
    """Run one seed through all launches; the same seed gives the same report, event for event."""
    sim, checks, draw = blackout.first_launch(seed, KeptSim)
    try:
        if blackout.cut_short(sim):
            _Launches(sim, checks, draw).run()
        checks.log()
    finally:
        sim.close()
    return Report(seed, sim.events, tuple(sim.struck), len(checks.specs), sim.now, tuple(sim.failures))


class _Launches:
    """The launches after the one that storage cut short."""

    def __init__(self, sim: KeptSim, checks: Checks, draw: Rng) -> None:
        self.sim, self.checks, self.draw = sim, checks, draw
        shell = sim.shell
        assert shell is not None
        assert shell.machine.memory.final is not None
        self.shell, self.step = shell, shell.machine.memory.final[1]
        self.capacity = {node.machine: node.capacity for node in self._nodes()}
        self.foreign: set[Slot] = set()

    def _nodes(self) -> list[KeptNode]:
        return list(self.sim.nodes.values())  # type: ignore[arg-type]

    def run(self) -> None:
        """Launch until the run has finished."""
        self._end()
        kept = [slot for machine in self.capacity for slot in self.sim.kept_on(machine)]
        if not self._is_whole(kept):
            self.sim.violation(f"step {self.step} was not committed, and is not kept")
            return
        if self.draw.chance(0.2):
            self._plant_foreign()
        fates = {machine: self.draw.pick(FATES) for machine in self.capacity}
        self.sim.struck += sorted(set(fates.values()))
        known = [machine for machine, fate in fates.items() if fate not in ("unknown", "away")]
        heard = {slot for machine in known for slot in self.sim.kept_on(machine)}
        self._launch(fates)
        passed_over = self._trained_from() < self.step
        if passed_over and self._is_whole([s for s in kept if s in heard]):
            self.sim.violation(f"step {self.step} was kept by nodes that were known, and is passed over")
        if not self.sim.failures and not self._finished():
            self._end()
            self._launch(dict.fromkeys(self.capacity, "prompt"))
            if not self.sim.failures and not self._finished():
                self.sim.violation("the run does not finish with all of its nodes")
            if not (passed_over or self.sim.failures) and self._trained_from() < self.step:
                self.sim.violation(f"step {self.step} was kept, and neither committed nor gone on from")
        if self.foreign - self.sim.kept_on("foreign"):
            self.sim.violation("what another run keeps is deleted")

    def _finished(self) -> bool:
        return (
            self.sim.shell is not None
            and (end := self.sim.shell.finished) is not None
            and (end.status == "finished")
        )

    def _trained_from(self) -> int:
        """Least step that later launches have resumed from; the kept one where none had to."""
        term = self.shell.machine.memory.term
        resumed = [spec.resume_step for spec in self.checks.specs.values() if spec.id.term > term]
        committed = {commit.step for commit in self.sim.storage.commits()}
        return self.step if self.step in committed and not resumed else min(resumed, default=self.step)

    def _is_whole(self, kept: list[Slot]) -> bool:
        """Whether slots hold all of the last state, of one generation."""
        found: dict[SlotKey, list[m.SlotInfo]] = {}
        for key, rank, fragments in kept:
            parts = tuple(m.Fragment(*part) for part in fragments)
            info = m.SlotInfo("", "", m.GenerationId(*key[:2]), key[2], rank, parts)
            found.setdefault(key, []).append(info)
        return any(
            complete(infos, self.checks.specs[m.GenerationId(*key[:2])].layout)
            for key, infos in found.items()
            if key[2] == self.step
        )

    def _end(self) -> None:
        """End the processes of a launch: in order where it has ended, else by a crash."""
        shell = self.sim.shell
        assert shell is not None
        if shell.finished is not None:
            keep = kept_slots.key_of(shell.finished.keep, shell.finished.status == "finished")
            for node in self._nodes():
                node.end(keep)
        else:
            for node in self._nodes():
                with node.real():
                    pass
        shell.die()
        self.sim.restart_clock()
        self.sim.nodes.clear()
        for machine in (*self.capacity, "foreign"):
            with self.sim.guarded(machine):
                kept_slots.remove_rest(self.sim.machine(machine))

    def _plant_foreign(self) -> None:
        """Have a machine keep slots of another run of this name."""
        folder = self.sim.machine("foreign") / "before"
        folder.mkdir(parents=True)
        spec = next(iter(self.checks.specs.values()))
        info = m.SlotInfo("before", "w9-9.0", spec.id, 7, 0, (m.Fragment(0),))
        write_slot(folder / f"w9-9.0{SUFFIX}", SimSlot(info, ((spec.id, 0, 7),)), spec.layout)
        kept_slots.mark(folder, {f"w9-9.0{SUFFIX}": 7}, None, FOREIGN)
        self.foreign = self.sim.kept_on("foreign")

    def _launch(self, fates: dict[str, str]) -> None:
        sim, draw = self.sim, self.draw
        sim.awaited.clear()
        self.checks.blackout = False
        self.checks.excused = "" if set(fates.values()) == {"prompt"} else "failed"
        for machine, fate in fates.items():
            if fate == "away":
                continue
            late_s = {"late": draw.uniform(2.0, LAUNCH_S), "unknown": draw.uniform(2.0, 2 * LAUNCH_S)}
            name, step = sim.new_name(), kept_slots.kept_step([sim.machine(machine)])
            sim.after(late_s.get(fate, 0.0), self._join, machine, fate, name)
            if fate != "unknown" and step is not None:
                sim.awaited[name] = step
        if self.foreign:
            self._join("foreign", "prompt", sim.new_name())
        for _ in range(1 + draw.below(2)):
            sim.after(draw.uniform(0.0, 1.0), sim.add_node, max(self.capacity.values()))
        sim.after(0.01, coordinator, sim)
        for name in [draw.pick(blackout.AFTER) for _ in range(draw.below(3))]:
            sim.after(draw.uniform(0.0, 8.0), blackout.strike, sim, name)
        if set(fates.values()) != {"prompt"} and draw.chance(STOPPED):
            sim.after(draw.uniform(3.0, 60.0), FAULTS["stop"], sim)
        sim.quiet_at = sim.now + 2 * LAUNCH_S + LONGEST_S + sim.step_s * sim.job.steps
        sim.run(blackout.LIMIT_S)

    def _join(self, machine: str, fate: str, name: str) -> None:
        sim = self.sim
        sim.next_machine = machine
        node: Any = sim.add_node(self.capacity.get(machine, 1), told=False, name=name)
        sim.next_machine = ""
        if fate == "refused":
            node.refused = "torch 2.1 (expected 2.12)"
        for other in kept_slots.keeping([sim.machine(machine)]):
            if other != node.folder:
                with sim.guarded(machine):
                    node.take_over(other)
        node.hello()
