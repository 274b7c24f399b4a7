"""A simulated coordinator and its generations, step by step, with draws that are chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.policies.membership import Roster
from picotron_ray.coordinator.simulator.nodes import SimNode, SimWorker
from picotron_ray.coordinator.simulator.shell import Shell
from picotron_ray.coordinator.simulator.slots import SimSlot
from picotron_ray.coordinator.simulator.training import LONGEST_RENDEZVOUS_S
from picotron_ray.coordinator.simulator.world import RETRY_S
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from tests.support.runs.quiet_simulation import SPEC, TWO, A, Quiet

B = m.GenerationId(1, 2)
LATER = m.GenerationSpec(B, TWO, Layout(dp=2), m.Source("commit", 5, A, manifest="m"), "next")


class Bench(Quiet):
    """A shell whose machine only listens; what it is given and what agents report is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.handled: list[Any] = []
        self.reports: list[Any] = []
        self.commands: list[m.Command] = []
        self.sim.to_coordinator = (  # type: ignore[method-assign]
            lambda node, event, reliable: self.reports.append((node.name, event, reliable))
        )
        self.made = self.sim.shell = Shell(self.sim)
        self.memory = SimpleNamespace(
            stop_requested=False,
            term=1,
            quiet=False,
            transitions=[],
            state=MachineState.NEW,
            roster=Roster(),
            unheard=set(),
            spec=None,
            now=100.0,
        )
        machine: Any = SimpleNamespace(memory=self.memory, wake_at=None, handle=self.handle)
        self.made.machine = machine

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        self.handled.append(event)
        return [self.commands.pop()] if self.commands else []

    def taken(self) -> list[Any]:
        found, self.planned[:] = list(self.planned), []
        return found


@pytest.fixture
def bench() -> Bench:
    return Bench()


def watch(bench: Bench, launches: list[Any]) -> None:
    """Watch only launches, and the stores that are asked."""
    bench.sim.checks = SimpleNamespace(  # type: ignore[assignment]
        launched=lambda shell, spec: launches.append(spec),
        store_asked=lambda *words: None,
        store_failed=lambda *words: None,
        ordered=lambda *words: None,
    )


# --- the shell -------------------------------------------------------------------------------------


def test_a_shell_starts_when_storage_lets_it_with_the_nodes_in_reach(bench: Bench) -> None:
    sim, made = bench.sim, bench.made
    first, second = sim.nodes.values()
    second.cut_until = 101.0
    sim.storage.down_until = 100.1
    made.start()
    assert (bench.taken(), sim.storage.term) == ([(RETRY_S, "start")], 0)
    sim.storage.down_until = 100.0
    made.start()
    assert bench.taken() == [(0.2, "_begin", [first])]
    assert (made.term, first.term, second.term) == (1, 1, 0)
    made.die()
    for call in (made.start, lambda: made._begin([first]), made._tick, lambda: made.deliver(m.Tick())):
        call()
    assert (bench.taken(), bench.handled) == ([], [])


def test_a_shell_begins_with_what_the_agents_say(bench: Bench) -> None:
    sim, made = bench.sim, bench.made
    first, second = sim.nodes.values()
    first.spec, made.term = LATER, 3
    bench.run()
    second.workers["raw"] = SimWorker("raw", second)
    sim.storage.claim()
    sim.storage.append_generation(1, SPEC)
    made._queue = [m.NodeLost("x", "gone")]
    bench.commands = []
    gone = SimNode(sim, "n9", 1)
    third = sim.nodes["n3"] = SimNode(sim, "n3", 2)
    made._begin([first, second, gone])
    members = (m.Member("w1", "n1"), m.Member("w2", "n2"))
    busy = (m.BusyWorker("w1", A), m.BusyWorker("w2", A))
    assert bench.handled == [
        m.Begin(3, (), (SPEC,), LATER, members, busy),
        m.NodeJoined("n1", 3),
        m.NodeJoined("n2", 3),
        m.NodeLost("x", "gone"),
        m.Tick(),
    ]
    assert bench.reports == [("n3", m.NodeJoined("n3", third.capacity), True)]
    assert (made.newest, made.commits, made._queue) == (LATER, [], [])
    assert bench.taken()[-1] == (1.0, "_tick")


def test_a_shell_that_is_stopped_begins_and_writes_afterwards(bench: Bench) -> None:
    sim, made = bench.sim, bench.made
    made.pause(3.0)
    assert bench.taken() == [(3.001, "_resume")]
    made._begin([])
    append = m.AppendGeneration(SPEC)
    made._append(append)
    (begin, write) = bench.taken()
    assert begin[0] == write[0] == pytest.approx(3.01)
    assert (begin[1:], write[1:]) == (("_begin", []), ("_append", append))
    made.deliver(m.NodeLost("x", "gone"))
    sim.now = 102.9
    made._resume()
    assert bench.handled == []
    sim.now = 103.0
    made._resume()
    assert bench.handled == [m.NodeLost("x", "gone")]
    made._begin([])
    assert bench.handled[1:2] == [m.Begin(0, (), (), None, (), ())]


def test_a_shell_wakes_before_its_tick_where_its_machine_is_due(bench: Bench) -> None:
    made = bench.made
    machine: Any = made.machine
    made._tick_at = 101.0
    for wake, quiet, delays in (
        (None, False, []), (100.5, True, []), (100.99, False, []), (101.5, False, []),
        (100.5, False, [0.501]), (100.5, False, []), (100.75, False, []), (100.25, False, [0.251]),
        (99.0, False, [0.001]),
    ):  # fmt: skip
        machine.wake_at, bench.memory.quiet = wake, quiet
        made.deliver(m.Heartbeat("n1", None))
        found = bench.taken()
        assert [words[0] for words in found] == delays, (wake, quiet)
        assert all(words[2] == m.Tick() for words in found)


def test_a_shell_ticks_until_the_end(bench: Bench) -> None:
    bench.made._tick()
    assert (bench.handled, bench.taken(), bench.made._tick_at) == ([m.Tick()], [(1.0, "_tick")], 101.0)
    bench.sim.over = True
    bench.made._tick()
    assert (len(bench.handled), bench.taken()) == (1, [])


def test_orders_that_reach_nobody_come_back_as_exits(bench: Bench) -> None:
    made = bench.made
    exits = [
        (m.StartWorker("x", "n9"), 0.5, m.WorkerExited("x", "start_failed")),
        (m.KillWorker("x", "why"), 0.1, m.WorkerExited("x", "unknown")),
        (m.StopWorker("x"), 0.1, m.WorkerExited("x", "unknown")),
    ]
    for command, delay_s, exited in exits:
        bench.commands = [command]
        made.deliver(m.Tick())
        assert bench.taken() == [(delay_s, "deliver", exited)]
    del bench.sim.nodes["n2"]
    watch(bench, bench.reports)
    made.run_generation(m.RunGeneration(SPEC))
    assert (bench.reports, made.newest) == ([SPEC], SPEC)
    call, exited = bench.taken()
    assert call[:2] == (0.001, "_arrive")
    assert exited == (0.5, "deliver", m.WorkerExited("w2", "unknown"))
    made.run_generation(m.RunGeneration(LATER, adopt=True))
    assert (len(bench.reports), made.newest) == (1, SPEC), "an adoption is no launch"


def test_a_node_runs_a_generation_for_its_living_member(bench: Bench) -> None:
    watch(bench, [])
    bench.sim.nodes["n1"].workers.clear()
    ran: list[Any] = []
    bench.sim.nodes["n2"].workers["w2"] = SimpleNamespace(  # type: ignore[assignment]
        run=lambda spec, adopt: ran.append((spec.id, adopt))
    )
    for spec, adopt in ((LATER, False), (SPEC, True)):
        bench.made.run_generation(m.RunGeneration(spec, adopt=adopt))
        for _, _, node, _, call in bench.taken():
            call(node)
    assert bench.reports == [("n1", m.WorkerExited("w1", "unknown"), True)] * 2
    assert ran == [(B, False), (A, True)]
    assert [node.spec for node in bench.sim.nodes.values()] == [LATER, LATER], "the newest one counts"


def test_orders_are_sent_to_the_nodes_that_they_name(bench: Bench) -> None:
    told: list[Any] = []

    def noted(method: str) -> Any:
        return lambda *words: told.append((method, *words))

    methods = ("start_worker", "kill", "collect", "upload", "release", "quarantine")
    node = SimpleNamespace(
        workers={"w1": SimpleNamespace(interrupt=noted("interrupt"))},
        **{method: noted(method) for method in methods},
    )

    def to_node(name: str, term: int, call: Any, *, retry: bool) -> bool:
        told.append((name, retry))
        call(node)
        return True

    bench.sim.to_node = to_node  # type: ignore[method-assign]
    upload = m.Upload("n1", A, 5, ("s",))
    for command, sent in (
        (m.StartWorker("x", "n1"), [("n1", True), ("start_worker", "x")]),
        (m.Interrupt("w1", A, "hard"), [("n1", False), ("interrupt", A, "hard")]),
        (m.Interrupt("w2", A, "hard"), [("n2", False)]),
        (m.Interrupt("x", A, "hard"), []),
        (m.KillWorker("w1", "why"), [("n1", False), ("kill", "w1")]),
        (m.CollectInventory("n1", 7), [("n1", False), ("collect", 7)]),
        (upload, [("n1", False), ("upload", upload)]),
        (m.Release("n1", A, 5, 4), [("n1", True), ("release", A, 5, (), 4)]),
        (m.Quarantine("n1", "s", A, 5), [("n1", True), ("quarantine", m.Quarantine("n1", "s", A, 5))]),
        (m.Alert("info", "text", "kind", {}), []),
    ):
        bench.commands = [command]
        bench.made.deliver(m.Tick())
        assert told == sent
        told.clear()
    assert bench.taken() == []


def test_a_snapshot_is_taken_by_a_generation_that_there_is(bench: Bench) -> None:
    bench.made.snapshot(m.TakeSnapshot(A, ("w1",)))
    generation = bench.run()
    bench.sim.noise_until = 101.0
    bench.made.snapshot(m.TakeSnapshot(A, ("w1",)))
    assert not generation.pin_next, "lost"
    bench.sim.noise_until = 0.0
    bench.made.snapshot(m.TakeSnapshot(A, ("w1",)))
    assert generation.pin_next


def test_the_log_is_written_late_with_errors_or_without_a_reply(bench: Bench) -> None:
    sim, made, storage = bench.sim, bench.made, bench.sim.storage
    made.term = storage.claim()
    append = m.AppendGeneration(LATER)
    storage.slow_until = 100.0
    made.append(append)
    storage.slow_until = 100.1
    made.append(append)
    assert bench.taken() == [(pytest.approx(0.026), "_append", append), (3.25, "_append", append)]
    storage.down_until = 100.1
    for command in (append, m.AppendCommit(A, 7, ("n1",))):
        made._append(command)
    assert bench.handled == [
        m.Appended("generation", B, 5, error="storage is down"),
        m.Appended("commit", A, 7, error="storage is down"),
    ]
    assert (len(storage.log), storage.times, bench.taken()) == (1, [], [])
    storage.down_until = 100.0
    made._append(append)
    written = m.Appended("generation", B, 5, 2)
    assert bench.taken() == [(0.011, "deliver", written)]
    assert storage.times == [100.0, 100.0]
    storage.mute_until = 100.1
    made._append(append)
    assert bench.taken() == []
    bench.dice.luck = False
    made._append(append)
    assert bench.taken() == [(0.011, "deliver", written)], "not every reply is lost"
    bench.dice.luck, storage.mute_until, sim.noise_until = True, 100.0, 101.0
    made._append(append)
    assert bench.taken() == [(0.011, "deliver", written), (1.35, "deliver", written)], "told twice"
    made.die()
    made._append(append)
    assert bench.taken() == []


# --- a generation ----------------------------------------------------------------------------------


def calls(bench: Bench) -> list[tuple[float, str]]:
    return [words[:2] for words in bench.taken()]


def test_a_generation_starts_once_all_have_joined(bench: Bench) -> None:
    generation = bench.sim.generation(SPEC)
    generation.join(bench.worker(1))
    assert calls(bench) == [(LONGEST_RENDEZVOUS_S, "_expect_all")]
    generation._expect_all()
    assert generation.watched, "one is late"
    generation.watched = False
    generation.join(bench.worker(2))
    assert calls(bench) == [(pytest.approx(0.35), "_start")]
    generation._expect_all()
    assert not generation.watched
    generation._start()
    assert (calls(bench), generation.began_at) == ([(1.0, "_step_done")], 100.0)
    generation.broken = True
    generation._start()
    assert bench.taken() == []
    generation.join(bench.worker(2))
    assert bench.taken() == [(0.05, "leave", generation, FailureKind.PEER_LOST)]


def test_a_generation_that_cannot_read_its_source_fails_for_some(bench: Bench) -> None:
    bench.sim.storage.histories["m"] = ((A, 0, 5),)
    spec = m.GenerationSpec(
        B, TWO, Layout(dp=2), m.Source("commit", 5, A, manifest="m", digest="digest of m"), "next"
    )
    generation = bench.sim.generation(spec)
    bench.sim.bad_manifests = {"m"}
    for number in (1, 2):
        bench.worker(number).generation = generation
    bench.dice.luck = False
    generation._start()
    assert bench.worker(1).outcome == m.Outcome("w1", B, FailureKind.FAILED, 5, "corrupt:m")
    assert (bench.worker(2).outcome, generation.broken) == (None, True)
    bench.worker(1).generation, bench.dice.luck = generation, True
    generation._fail("x")
    assert [bench.worker(number).generation for number in (1, 2)] == [None, None]


def test_steps_go_on_to_the_last_one(bench: Bench) -> None:
    generation = bench.run()
    steps, interval = bench.sim.job.steps, bench.sim.job.checkpoint.interval_steps
    generation._step_done(1)
    assert (generation.step, calls(bench)) == (1, [(1.0, "_step_done")])
    assert bench.sim.checks.stepped_at == 100.0
    generation._step_done(interval)
    assert calls(bench) == [(0.225, "_seal"), (0.225, "_seal"), (1.0, "_step_done")]
    generation.pin_next = True
    generation._step_done(interval + 1)
    assert calls(bench) == [(0.225, "_seal"), (0.225, "_seal"), (1.0, "_step_done")]
    generation._step_done(interval + 2)
    assert calls(bench) == [(1.0, "_step_done")], "asked for once"
    bench.worker(2).hung = True
    generation._step_done(interval + 3)
    assert (generation.step, calls(bench)) == (interval + 2, [(1.5, "stalled")])
    bench.worker(2).hung = generation.torn = bench.dice.luck = False
    generation._step_done(steps)
    assert [bench.worker(number).outcome for number in (1, 2)] == [
        m.Outcome(f"w{number}", A, "finished", steps) for number in (1, 2)
    ]
    assert generation.ended
    bench.taken()
    generation._step_done(steps + 1)
    assert (generation.step, bench.taken()) == (steps, [])
    assert [list(node.slots) for node in bench.sim.nodes.values()] == [[f"w{number}.0"] for number in (1, 2)]


def test_a_boundary_ends_a_generation_in_order(bench: Bench) -> None:
    generation = bench.run()
    generation.boundary = True
    generation._step_done(3)
    assert bench.worker(1).outcome == m.Outcome("w1", A, "interrupted", 3)
    assert (generation.ended, generation.broken) == (True, False)
    assert "_step_done" not in [name for _, name in calls(bench)]


def test_a_stall_is_told_each_second_until_it_ends(bench: Bench) -> None:
    generation = bench.run()
    generation.joined = {"w1", "w2"}
    generation.stalled()
    assert (bench.reports, bench.taken(), generation.complained) == ([], [], False), "all is well"
    generation.torn = True
    generation.stalled()
    generation.stalled()
    told = [("n1", m.Stalled("w1", A, "reduce", 1.5), False)]
    assert (bench.reports, calls(bench)) == (told, [(1.0, "_complain")])
    generation.torn, bench.worker(2).hung = False, True
    generation._complain()
    assert (len(bench.reports), calls(bench)) == (2, [(1.0, "_complain")])
    for name in ("broken", "ended"):
        setattr(generation, name, True)
        generation._complain()
        setattr(generation, name, False)
    for number in (1, 2):
        bench.worker(number).generation = None
    generation._complain()
    assert (len(bench.reports), bench.taken()) == (2, [])


def test_a_seal_names_the_slots_of_the_living_on_its_node(bench: Bench) -> None:
    generation = bench.run()
    generation._pin(5)
    bench.taken()
    generation._seal("n1", 5)
    info = m.SlotInfo("n1", "w1.0", A, 5, 0, (m.Fragment(0, 0, 1),))
    assert bench.reports == [("n1", m.SnapshotSealed("n1", A, 5, (info,)), False)]
    held = bench.sim.nodes["n1"].slots["w1.0"]
    assert (held.pinned, held.history) == (True, ((A, 0, 5),))
    bench.worker(1).hung = True
    generation._seal("n1", 6)
    generation._seal("n9", 6)
    assert len(bench.reports) == 1
    assert generation.history(0) == ()
    assert generation.history(1) == ((A, 0, 1),)


def test_older_slots_are_overwritten_two_steps_after_a_restore(bench: Bench) -> None:
    bench.sim.storage.histories["m"] = ((A, 0, 5),)
    spec = m.GenerationSpec(
        B, TWO, Layout(dp=2), m.Source("commit", 5, A, manifest="m", digest="digest of m"), "next"
    )
    generation = bench.sim.generation(spec)
    node = bench.sim.nodes["n1"]
    for name, id_, pinned in (("w1.a", A, False), ("w1.b", A, True), ("w1.c", B, False), ("x.d", A, False)):
        node.keep(SimSlot(m.SlotInfo("n1", name, id_, 5, 0, ()), (), pinned))
    generation._step_done(6)
    assert len(node.slots) == 4
    generation._step_done(7)
    assert list(node.slots) == ["w1.b", "w1.c", "x.d"]


def test_files_are_written_over_where_nobody_needs_what_they_hold(bench: Bench) -> None:
    source = m.SlotInfo("n1", "w1.1", A, 5, 0, ())
    spec = m.GenerationSpec(B, TWO, Layout(dp=2), m.Source("slots", 5, A, (source,)), "next")
    bench.sim.checks.slots[source.identity] = SimSlot(source, ((A, 0, 5),))
    generation, worker, node = bench.sim.generation(spec), bench.worker(1), bench.sim.nodes["n1"]
    generation.step = 8

    def hold(file: int, id_: m.GenerationId, step: int, pinned: bool = False) -> None:
        node.slots[f"w1.{file}"] = SimSlot(m.SlotInfo("n1", f"w1.{file}", id_, step, 0, ()), (), pinned)

    assert generation._file(worker, 8) == "w1.0", "all are empty"
    hold(0, B, 6)
    hold(1, A, 5)
    assert generation._file(worker, 8) == "w1.2"
    hold(2, A, 4)
    assert generation._file(worker, 8) == "w1.2", "the oldest, but for the state that it came from"
    hold(2, B, 8)
    assert generation._file(worker, 8) == "w1.2", "the state's own"
    assert generation._file(worker, 9) == "w1.0"
    hold(0, B, 7)
    assert generation._file(worker, 9) is None, "not every member has sealed step 8"
    hold(0, B, 6, pinned=True)
    assert generation._file(worker, 9) is None, "it waits for its upload"
    hold(2, B, 8, pinned=True)
    assert generation._file(worker, 9) == "w1.0", "a newer one waits too"
    assert [held.pinned for held in node.slots.values()] == [False, False, True]
    hold(2, B, 7)
    hold(0, B, 7)
    generation._seal("n1", 9)
    assert (bench.reports, bench.sim.failures) == ([], []), "skipped, and the run is young"


@pytest.mark.parametrize(
    ("share", "luck", "sealed", "clean", "writing", "leaves"),
    [
        (0.25, False, [6], 7, False, 0),
        (0.25, True, [6, 7], 7, False, 1),
        (0.5, False, [6], 7, False, 0),
        (0.75, False, [6, 7], 7, False, 0),
        (0.8, False, [6, 7], 7, False, 0),
        (0.875, True, [6, 7], 8, True, 1),
        (0.875, False, [6, 7], 8, False, 0),
    ],
)
def test_a_generation_breaks_where_its_step_stands(
    bench: Bench, share: float, luck: bool, sealed: list[int], clean: int, writing: bool, leaves: int
) -> None:
    generation = bench.run()
    generation.step_s = 5.0
    generation.step, generation.began_at = 7, 100.0 - share * 5.0
    bench.dice.luck, bench.dice.below = luck, lambda n: n - 1
    bench.worker(2).hung = True
    generation.shatter()
    generation.shatter()
    for number in (1, 2):
        slots = bench.sim.nodes[f"n{number}"].slots.values()
        assert [held.info.step for held in slots] == sealed
        assert (bench.worker(number).clean, bench.worker(number).writing) == (clean, writing)
    left = [(pytest.approx(0.055), "leave", generation, FailureKind.PEER_LOST)]
    assert bench.taken() == left * leaves, "a hung one does not leave"


def test_a_generation_that_ended_or_has_no_step_leaves_nothing(bench: Bench) -> None:
    generation = bench.run()
    generation.step, generation.ended = 7, True
    generation.shatter()
    assert (generation.broken, bench.sim.nodes["n1"].slots) == (False, {})
    for step, sealed in ((0, []), (1, [1]), (2, [1, 2])):
        generation.broken = generation.ended = False
        generation.step, generation.began_at = step, 99.4
        bench.sim.nodes["n1"].slots.clear()
        generation.shatter()
        assert [held.info.step for held in bench.sim.nodes["n1"].slots.values()] == sealed


def test_a_survivor_flushes_what_is_clean_and_new(bench: Bench) -> None:
    generation, worker = bench.run(), bench.worker(1)
    for began_at, writing, clean, name in (
        (0.0, False, 3, None), (99.0, True, 3, None), (99.0, False, 0, None), (99.0, False, 1, "w1.0"),
    ):  # fmt: skip
        generation.began_at, worker.writing, worker.clean = began_at, writing, clean
        generation.flush(worker)
        assert list(bench.sim.nodes["n1"].slots) == ([name] if name else [])
    (held,) = bench.sim.nodes["n1"].slots.values()
    assert (held.info.fragments, held.pinned) == ((m.Fragment(0, 0, 1),), False)


def test_an_answer_to_an_earlier_coordinator_counts_for_nothing(bench: Bench) -> None:
    bench.made.deliver(m.Inventory("n1", 4, ()))
    bench.made.collect(m.CollectInventory("n1", 1))
    bench.made.deliver(m.Inventory("n1", 4, ()))
    assert (bench.made.heard, len(bench.handled)) == (set(), 2)
    bench.made.deliver(m.Inventory("n1", 1, ()))
    assert bench.made.heard == {"n1"}


def test_a_coordinator_is_judged_from_its_begin_on(bench: Bench) -> None:
    """Storage may keep it waiting for long; whatever happened before it cannot have timed."""
    bench.memory.term = 0
    bench.made._claimed(2)
    bench.sim.now = 140.0
    bench.made._begin([])
    assert bench.made.born_at == 140.0
