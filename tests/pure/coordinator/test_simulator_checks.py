"""The simulator's invariants, one by one: what breaks each of them, and what just does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.checks import Checks
from picotron_ray.coordinator.simulator.coverage import ALL_PAIRS, Coverage
from picotron_ray.coordinator.simulator.nodes import SimNode, SimWorker
from picotron_ray.coordinator.simulator.slots import SimSlot
from picotron_ray.coordinator.simulator.storage import SimLogEntry
from picotron_ray.coordinator.simulator.world import SETTLED_S, Sim
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind, Remedy
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import choose_dp, job

A, B, C = (m.GenerationId(1, n) for n in (1, 2, 3))
TWO = (m.Member("w1", "n1"), m.Member("w2", "n1"))
START = m.GenerationSpec(A, TWO, Layout(dp=2), m.Source("init"), "start")
STEP_7 = ((A, 0, 7),)


class Bench:
    """One simulation of a node with two workers, long after all trouble, and the checks of it."""

    def __init__(self) -> None:
        self.checks = Checks(Coverage())
        self.sim = Sim(1, job(), choose_dp, self.checks)
        self.checks.sim, self.sim.now = self.sim, 100.0
        self.node = self.sim.nodes["n1"] = SimNode(self.sim, "n1", 2)
        for member in TWO:
            self.node.workers[member.worker] = SimWorker(member.worker, self.node)
        self.memory = SimpleNamespace(
            term=1,
            outcomes={},
            stop_requested=False,
            transitions=[],
            now=100.0,
            state=MachineState.NEW,
            spec=START,
            incident=None,
            distrust_slots=False,
            remedy=None,
            roster=SimpleNamespace(nodes={"n1": None}, workers={}),
        )
        self.shell: Any = SimpleNamespace(
            machine=SimpleNamespace(memory=self.memory), newest=START, heard={"n1"}, commits=[], fenced=False,
            stopping=False, quarantined=set(), finished=None, born_at=0.0, paused_until=0.0, told_seals=set(),
            planner=SimpleNamespace(silent_until=0.0),
        )  # fmt: skip
        self.sim.shell = self.shell
        self.checks.specs[A] = START

    def broken(self) -> list[str]:
        """What was found since the last call."""
        found, self.sim.failures = self.sim.failures, []
        assert all(text.startswith("at 100.000 s: ") for text in found)
        return [text.removeprefix("at 100.000 s: ") for text in found]

    def handled(self, *commands: m.Command, event: m.Event | None = None) -> list[str]:
        self.checks.handled(self.shell, event or m.Tick(), commands)
        return self.broken()

    def hold(self, step: int = 7, parts: Sequence[int] = (0, 1), history: Any = STEP_7) -> list[m.SlotInfo]:
        """The node keeps parts of a state of the first generation."""
        slots = []
        for part in parts:
            info = m.SlotInfo("n1", f"w{part + 1}.{step}", A, step, part, (m.Fragment(0, part, 2),))
            self.node.keep(SimSlot(info, history))
            slots.append(info)
        return slots

    def commit(self, step: int, history: Any = None, written_s: float = 0.0) -> m.Commit:
        storage = self.sim.storage
        if not storage.log:
            storage.append_generation(1, START)
            storage.times.append(0.0)
        storage.log.append(SimLogEntry(1, "commit", None, A, step))
        storage.times.append(written_s)
        commit = storage.commits()[-1]
        storage.histories[commit.manifest] = ((A, 0, step),) if history is None else history
        return commit

    def launch(self, source: m.Source, members: Any = TWO, dp: int = 2) -> list[str]:
        """Launch a generation of a number of its own: 1.2 and so on."""
        made = m.GenerationId(1, len(self.checks.specs) + 1)
        self.checks.launched(self.shell, m.GenerationSpec(made, members, Layout(dp=dp), source, "test"))
        assert self.checks.specs[made].source is source
        return self.broken()

    def go_on_from(self, step: int) -> None:
        """The first generation was followed by 1.2, which resumed from ``step`` and was seen at work."""
        self.shell.newest = replace(START, id=B, source=m.Source("commit", step, A))
        self.checks.specs[B] = self.shell.newest
        self.checks.histories.handled(self.shell, m.Heartbeat("n1", B, {"w1": step + 1}))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_nothing_follows_a_fence_or_an_end(bench: Bench) -> None:
    alert = m.Alert("info", "x", "x")
    assert bench.handled(alert, event=m.Appended("commit", A, 5, fenced=True)) == []
    assert bench.shell.fenced
    assert bench.handled() == []
    assert bench.handled(alert, alert) == ["2 commands after it was fenced"]
    bench.shell.fenced, bench.shell.finished = False, m.Finish("finished", "")
    assert bench.handled() == []
    assert bench.handled(alert) == ["1 commands after the end (finished)"]
    bench.shell.finished = None
    bench.handled(event=m.Appended("commit", A, 5, seq=3))
    assert not bench.shell.fenced


def test_names_are_used_once_and_slots_stay_set_aside(bench: Bench) -> None:
    start = m.StartWorker("w9", "n1")
    assert bench.handled(start, m.Quarantine("n1", "s", A, 3)) == []
    assert bench.shell.quarantined == {("n1", "s", A, 3)}
    assert bench.handled(start) == ["worker name w9 was used twice"]


def test_transitions_are_counted_told_and_begin_rounds(bench: Bench) -> None:
    entered: list[MachineState] = []
    bench.checks.entered = entered.append
    bench.memory.transitions = [(MachineState.RUNNING, MachineState.LEAVING)]
    bench.handled()
    assert bench.shell.heard == {"n1"}
    bench.memory.transitions = [(MachineState.LEAVING, MachineState.COLLECTING)]
    bench.handled()
    bench.handled()
    assert bench.shell.heard == set()
    assert entered == [MachineState.LEAVING, MachineState.COLLECTING, MachineState.COLLECTING]
    counts = {
        (MachineState.RUNNING, MachineState.LEAVING): 1,
        (MachineState.LEAVING, MachineState.COLLECTING): 2,
    }
    assert dict(bench.checks.coverage.counts) == {(pair, "none"): count for pair, count in counts.items()}


def finish(bench: Bench, status: Any = "finished") -> list[str]:
    return bench.handled(m.Finish(status, "why"))


def test_only_a_finished_or_a_stopped_run_ends(bench: Bench) -> None:
    bench.commit(100)
    bench.checks.stepped_at = 0.0
    assert finish(bench) == []
    assert finish(bench, "failed") == ["the run ended as failed: why"]
    assert finish(bench, "stopped") == ["the run ended as stopped: why"]
    bench.sim.stop_asked = True
    assert finish(bench, "stopped") == []
    assert finish(bench, "failed") == ["the run ended as failed: why"]
    bench.sim.shell = None
    assert finish(bench, "fenced") == [], "a replaced one"


def test_a_finished_run_has_committed_its_last_step(bench: Bench) -> None:
    assert finish(bench) == ["finished with a commit of step 0 of 100"]
    bench.commit(99)
    assert finish(bench) == ["finished with a commit of step 99 of 100"]
    bench.commit(100, history=((A, 0, 99),))
    assert finish(bench) == ["history of step 100 ends at 99"]


def test_what_could_be_saved_is_committed_at_the_end(bench: Bench) -> None:
    bench.sim.stop_asked = True
    bench.commit(6)
    bench.hold(7)
    lost = ["ended with a commit of step 6, but 7 was to be had"]
    assert finish(bench, "stopped") == lost
    bench.memory.distrust_slots = True
    assert finish(bench, "stopped") == []
    bench.memory.distrust_slots, bench.shell.heard = False, set()
    assert finish(bench, "stopped") == [], "no node was heard"
    bench.shell.heard, bench.memory.spec = {"n1"}, None
    assert finish(bench, "stopped") == []
    bench.memory.spec = START
    bench.commit(7)
    assert finish(bench, "stopped") == []
    bench.hold(8, parts=[0])
    assert finish(bench, "stopped") == [], "a part is no state"


def test_nobody_is_left_at_work(bench: Bench) -> None:
    bench.commit(100)
    worker = bench.node.workers["w2"]
    worker.generation = bench.sim.generation(START)
    left = ["the run ended while w2 were in a generation"]
    assert finish(bench) == left
    worker.hung = True
    assert finish(bench) == []
    worker.hung, bench.node.cut_until = False, 100.0 - SETTLED_S
    assert finish(bench) == [], "not heard again yet"
    bench.node.cut_until -= 0.01
    assert finish(bench) == left


def test_the_last_generation_is_as_large_as_it_can_be(bench: Bench) -> None:
    bench.commit(100)
    bench.node.capacity = 3
    bench.checks.stepped_at = 50.0
    bench.sim.quiet_at = 30.0
    assert finish(bench) == ["ended on 2 workers, 3 were to be had"]
    bench.node.capacity = 9
    assert finish(bench) == ["ended on 2 workers, 4 were to be had"], "max_workers"
    bench.sim.quiet_at = 30.01
    assert finish(bench) == [], "too soon after a fault"
    bench.sim.quiet_at, bench.node.capacity = 30.0, 2
    assert finish(bench) == []


def test_an_abort_has_a_reason(bench: Bench) -> None:
    generation = bench.sim.generation(START)
    bench.memory.transitions = [(MachineState.RUNNING, MachineState.ABORTING)]
    good = ["generation 1.1 was aborted in good health"]
    generation.joined = {"w1", "w2"}
    assert bench.handled() == good
    for name in ("broken", "ended"):
        setattr(generation, name, True)
        assert bench.handled() == []
        setattr(generation, name, False)
    bench.node.workers["w1"].hung = True
    assert bench.handled() == []
    bench.node.workers["w1"].hung = False
    bench.node.workers["w1"].paged = False
    assert bench.handled() == []
    bench.node.workers["w1"].paged = True
    gone = bench.node.workers.pop("w1")
    assert bench.handled() == []
    bench.node.workers["w1"] = gone
    bench.sim.shell = None
    assert bench.handled() == []
    bench.sim.shell, bench.memory.spec = bench.shell, None
    assert bench.handled() == []
    bench.memory.spec = replace(START, id=B)
    assert bench.handled() == [], "never began"
    bench.memory.spec = START
    bench.memory.transitions = [(MachineState.RUNNING, MachineState.LEAVING)]
    assert bench.handled() == []


def test_a_stall_is_a_reason_where_it_was_told_of(bench: Bench) -> None:
    """Also when it is over: a coordinator that was stopped hears of it late."""
    generation = bench.sim.generation(START)
    bench.memory.transitions = [(MachineState.RUNNING, MachineState.ABORTING)]
    bench.memory.incident = SimpleNamespace(kind=FailureKind.HANG)
    assert bench.handled() == ["generation 1.1 was aborted in good health"]
    generation.complained = True
    assert bench.handled() == []
    bench.memory.incident = SimpleNamespace(kind=FailureKind.FAILED)
    assert bench.handled() == ["generation 1.1 was aborted in good health"]


def test_a_launch_that_was_given_up_just_as_it_began_is_no_fault(bench: Bench) -> None:
    """The heartbeat that says so is on its way."""
    generation = bench.sim.generation(START)
    bench.memory.transitions = [(MachineState.RUNNING, MachineState.ABORTING)]
    bench.memory.incident = SimpleNamespace(kind=FailureKind.LATE)
    generation.made_at = bench.sim.now - 1.0
    assert bench.handled() == []
    generation.made_at = bench.sim.now - 2.0
    assert bench.handled() == ["generation 1.1 was aborted in good health"]


def test_a_node_may_be_given_back_with_slots_that_are_not_trusted(bench: Bench) -> None:
    bench.hold(7)
    bench.memory.spec = replace(START, source=m.Source("slots", 7, A))
    bench.memory.roster.nodes.clear()
    bench.checks.freed(bench.shell, "n1")
    assert bench.broken() == ["n1 was given back with the only copy of step 7"]
    bench.memory.distrust_slots = True
    bench.checks.freed(bench.shell, "n1")
    assert bench.broken() == []


def test_a_page_that_is_read_again_is_a_reason_where_its_node_was_not_heard(bench: Bench) -> None:
    bench.sim.generation(START)
    bench.memory.transitions = [(MachineState.RUNNING, MachineState.ABORTING)]
    bench.memory.incident = SimpleNamespace(kind=FailureKind.HANG)
    bench.node.dumb_until = bench.sim.now - SETTLED_S + 0.1
    assert bench.handled() == ["generation 1.1 was aborted in good health"]
    bench.node.workers["w2"].read_again_at = bench.sim.now - 5.0
    assert bench.handled() == []
    bench.node.dumb_until -= 0.2
    assert bench.handled() == ["generation 1.1 was aborted in good health"]


def test_a_member_without_a_page_is_not_counted_on(bench: Bench) -> None:
    generation, worker = bench.sim.generation(START), bench.node.workers["w1"]
    late = ["w1 has had no page for 10 s, and still counts"]

    def judged(**changes: Any) -> list[str]:
        worker.paged, bench.memory.state, bench.memory.spec = False, MachineState.RUNNING, START
        generation.ended, bench.sim.struck_at = False, 90.0
        for name, value in changes.items():
            owner = next(
                each for each in (worker, generation, bench.sim, bench.memory) if hasattr(each, name)
            )
            setattr(owner, name, value)
        bench.checks.promptness._unseen_still(worker, generation, 90.0)
        return bench.broken()

    assert judged() == judged(state=MachineState.LEAVING) == late
    assert judged(paged=True) == judged(ended=True) == judged(struck_at=90.1) == []
    assert judged(state=MachineState.ABORTING) == judged(spec=replace(START, id=B)) == []
    bench.checks.promptness._unseen_still(worker, None, 90.0)
    del bench.node.workers["w1"]
    assert judged() == []
    bench.node.workers["w1"], bench.sim.shell = worker, None
    assert judged() == []


def test_a_stop_is_known_once_and_for_all(bench: Bench) -> None:
    bench.memory.stop_requested = True
    assert bench.handled() == []
    assert bench.handled() == []
    bench.memory.stop_requested = False
    assert bench.handled() == ["a stop that it knew of is forgotten"]


def test_silence_is_a_reason_only_of_those_that_cannot_be_heard(bench: Bench) -> None:
    generation = bench.sim.generation(START)
    generation.joined = {"w1", "w2"}
    bench.memory.transitions = [(MachineState.RUNNING, MachineState.ABORTING)]
    good = ["generation 1.1 was aborted in good health"]
    bench.node.cut_until = 95.0
    bench.memory.incident = SimpleNamespace(kind=FailureKind.NODE_LOST)
    assert bench.handled() == []
    bench.memory.incident = SimpleNamespace(kind=FailureKind.HANG)
    assert bench.handled() == good
    bench.node.cut_until, bench.memory.incident = 0.0, SimpleNamespace(kind=FailureKind.NODE_LOST)
    assert bench.handled() == good


INIT = m.Source("init")


def test_a_generation_is_launched_once_with_members_for_its_layout(bench: Bench) -> None:
    assert bench.launch(INIT) == []
    bench.checks.launched(bench.shell, bench.checks.specs[B])
    assert bench.broken() == ["generation 1.2 was launched twice"]
    for members, dp, found in (((TWO[0], TWO[0]), 2, 1), ((TWO[0], TWO[0]), 1, 1), (TWO, 3, 2)):
        number = len(bench.checks.specs) + 1
        assert bench.launch(INIT, members, dp) == [
            f"generation 1.{number} has {found} members for {Layout(dp=dp)}"
        ]
    many = tuple(m.Member(f"w{n}", "n1") for n in range(5))
    assert bench.launch(INIT, many[:4], 4) == []
    assert bench.launch(INIT, many, 5) == ["generation 1.7 has more than max_workers members"]


def test_a_launch_from_slots_needs_one_whole_good_state(bench: Bench) -> None:
    slots = tuple(bench.hold())
    assert bench.launch(m.Source("slots", 7, A, slots)) == []
    assert bench.launch(m.Source("slots", 7, A, slots[:1])) == ["1.3 resumes from an incomplete state"]
    assert bench.launch(m.Source("slots", 7, A, (*slots, replace(slots[0], step=6)))) == [
        "1.4 resumes from a mixture of states"
    ]
    bench.shell.quarantined = {("n1", "w2.7", A, 7), ("n1", "other", A, 7)}
    assert bench.launch(m.Source("slots", 7, A, slots)) == ["1.5 resumes from a quarantined slot"]
    bench.shell.quarantined = set()
    assert bench.launch(m.Source("commit", 7, A)) == []


def test_a_launch_from_slots_needs_one_exact_history(bench: Bench) -> None:
    slots = tuple(bench.hold(7, [0]) + bench.hold(7, [1], ((A, 0, 6), (B, 6, 7))))
    assert bench.launch(m.Source("slots", 7, A, slots)) == [
        "2 histories in one set of slots", "history of step 7 ends at 0"
    ]  # fmt: skip
    slots = tuple(bench.hold(7, [0, 1], ((A, 0, 6),)))
    assert bench.launch(m.Source("slots", 7, A, slots)) == ["history of step 7 ends at 6"]


def test_void_states_are_no_source(bench: Bench) -> None:
    slots = tuple(bench.hold())
    bench.go_on_from(7)
    assert bench.launch(m.Source("slots", 7, A, slots)) == []
    bench.go_on_from(6)
    assert bench.launch(m.Source("slots", 7, A, slots)) == ["1.4 resumes from the void state 7 of 1.1"]
    bench.shell.newest = None
    assert bench.launch(m.Source("commit", 7, A)) == ["1.5 resumes from the void state 7 of 1.1"]
    assert bench.launch(INIT) == []


def missed(step: int, best: int) -> str:
    return f"resumes from step {step}, but {best} was to be had"


def test_a_launch_takes_the_newest_commit_that_is_known(bench: Bench) -> None:
    bench.shell.commits = [m.Commit(5, A, "five", 1), m.Commit(9, A, "nine", 2)]
    assert bench.launch(m.Source("commit", 9, A)) == []
    assert bench.launch(m.Source("commit", 8, A)) == [f"1.3 {missed(8, 9)}"]
    anew = "1.4 begins from initial weights, and there are commits at [5, 9]"
    assert bench.launch(INIT) == [anew, f"1.4 {missed(0, 9)}"]
    bench.sim.bad_manifests = {"nine"}
    assert bench.launch(m.Source("commit", 5, A)) == []
    bench.sim.bad_manifests = set()
    bench.go_on_from(8)
    assert bench.launch(m.Source("commit", 5, A)) == [], "9 is void"
    bench.sim.shell = None
    bench.shell.newest = START
    assert bench.launch(m.Source("commit", 5, A)) == [], "it may not know better: it was replaced"


def test_a_launch_takes_the_newest_slots_that_can_be_known(bench: Bench) -> None:
    bench.hold()
    seen = [missed(0, 7)]

    def launched() -> list[str]:
        return [text.partition(" ")[2] for text in bench.launch(INIT)]

    assert launched() == seen
    bench.shell.heard = set()
    assert launched() == seen, "it is within reach"
    bench.node.cut_until = 95.0
    assert launched() == []
    bench.shell.heard = {"n1"}
    assert launched() == seen, "it was heard before"
    bench.memory.remedy = Remedy.COMMIT
    assert launched() == []
    bench.memory.remedy = None
    bench.shell.quarantined = {("n1", "w1.7", A, 7)}
    assert launched() == []
    bench.shell.quarantined = {("n2", "w1.7", A, 7)}
    assert launched() == seen
    bench.memory.roster.nodes = {"n2": None}
    assert launched() == []
    bench.memory.roster.nodes = {"n2": None, "n1": None}
    assert launched() == seen, "n2 is gone"
    bench.go_on_from(6)
    assert launched() == [], "void"


def test_of_several_states_the_newest_whole_one_counts(bench: Bench) -> None:
    bench.hold(6)
    bench.hold(8, [0])
    bench.hold(5)
    assert bench.launch(m.Source("commit", 5, A)) == [f"1.2 {missed(5, 6)}"]
    assert bench.launch(m.Source("commit", 6, A)) == []
    unknown = m.SlotInfo("n1", "x", C, 9, 0, (m.Fragment(0),))
    bench.node.keep(SimSlot(unknown, ((C, 0, 9),)))
    assert bench.launch(m.Source("commit", 6, A)) == []


@pytest.mark.parametrize("trouble", ["down_until", "slow_until", "mute_until", "noise_until"])
def test_a_commit_that_is_long_there_must_be_known(bench: Bench, trouble: str) -> None:
    seen = [missed(0, 9)]

    def launched() -> list[str]:
        return [text.partition(" ")[2] for text in bench.launch(INIT)]

    commit = bench.commit(9, written_s=99.7)
    assert launched() == seen
    bench.sim.storage.times[-1] = 99.9
    assert launched() == [], "the reply may be on its way"
    bench.sim.storage.times[-1] = 0.0
    bench.sim.bad_manifests = {commit.manifest}
    assert launched() == []
    bench.sim.bad_manifests = set()
    where = bench.sim if trouble == "noise_until" else bench.sim.storage
    rest_s = 80.0 if trouble == "mute_until" else 0.2
    setattr(where, trouble, 100.0 - rest_s - 0.05)
    assert launched() == seen
    setattr(where, trouble, 100.0 - rest_s + 0.05)
    assert launched() == []


def test_old_commits_of_the_lineage_alone_count(bench: Bench) -> None:
    bench.commit(9)
    bench.go_on_from(8)
    assert bench.launch(m.Source("commit", 8, A)) == []
    bench.go_on_from(9)
    assert bench.launch(m.Source("commit", 8, A)) == [f"1.4 {missed(8, 9)}"]


@pytest.mark.parametrize(
    ("history", "found"),
    [
        (((A, 0, 4), (B, 4, 7)), ""),
        (((A, 0, 4), (B, 4, 8)), "history of step 7 ends at 8"),
        (((A, 0, 4), (B, 5, 7)), "history of step 7: 1.2 did 5..7 after 4"),
        (((A, 0, 4), (B, 3, 7)), "history of step 7: 1.2 did 3..7 after 4"),
        (((A, 0, 4), (B, 4, 4), (C, 4, 7)), "history of step 7: 1.2 did 4..4 after 4"),
        (((A, 1, 7),), "history of step 7: 1.1 did 1..7 after 0"),
        ((), "history of step 7 ends at 0"),
    ],
)
def test_a_history_holds_each_step_once(bench: Bench, history: Any, found: str) -> None:
    slots = tuple(bench.hold(7, [0, 1], history))
    assert bench.launch(m.Source("slots", 7, A, slots)) == ([found] if found else [])


def test_slots_in_use_are_not_deleted(bench: Bench) -> None:
    used, other = bench.hold()
    newest = replace(START, id=B, source=m.Source("slots", 7, A, (used,)))

    def deleted(info: m.SlotInfo) -> list[str]:
        bench.checks.deleted(info)
        return bench.broken()

    bench.shell.newest = newest
    lost = ["w1.7 was deleted while 1.2 restores from it"]
    assert deleted(other) == []
    assert deleted(used) == lost, "it has not begun"
    generation = bench.sim.generation(newest)
    assert deleted(used) == lost
    generation.step = 8
    assert deleted(used) == []
    bench.sim.shell = None
    generation.step = 7
    assert deleted(used) == []


def test_the_log_has_one_writer_at_a_time(bench: Bench) -> None:
    log = bench.sim.storage.log
    log += [SimLogEntry(1, "term"), SimLogEntry(1, "commit"), SimLogEntry(2, "term")]
    bench.checks.log()
    assert bench.broken() == []
    log.append(SimLogEntry(1, "commit"))
    bench.sim.storage.complaints = ["x"]
    bench.checks.log()
    assert bench.broken() == ["terms go back in the log: [1, 1, 2, 1]", "x"]


def test_a_step_that_is_done_is_noted(bench: Bench) -> None:
    bench.checks.stepped(bench.sim.generation(START))
    assert bench.checks.stepped_at == 100.0


def test_coverage_counts_by_the_faults_at_work() -> None:
    first, second = Coverage(active={"kill", "cut"}), Coverage()
    pair, other = ALL_PAIRS[:2]
    first.note(pair)
    first.note(pair)
    second.note(other)
    first.add(second)
    assert dict(first.counts) == {(pair, "kill"): 2, (pair, "cut"): 2, (other, "none"): 1}
    assert first.unseen() == list(ALL_PAIRS[2:])
    head, line, *_ = first.table(["kill", "rival"]).splitlines()
    assert head == " " * 24 + "  none  kill rival"
    assert line.split() == [str(pair[0]), ">", str(pair[1]), ".", "2", "."]


def test_a_launch_that_came_to_nothing_does_not_count(bench: Bench) -> None:
    bench.shell.commits = [m.Commit(5, A, "five", 1), m.Commit(9, A, "nine", 2)]
    bench.shell.newest = bench.checks.specs[B] = replace(START, id=B, source=m.Source("commit", 5, A))
    assert bench.launch(m.Source("commit", 5, A)) == [f"1.3 {missed(5, 9)}"]
    assert bench.launch(m.Source("commit", 9, A)) == []
    bench.sim.generations[B] = SimpleNamespace(step=6)  # type: ignore[assignment]
    assert bench.launch(m.Source("commit", 5, A)) == [], "it did a step, and nobody has heard of it"
    assert bench.launch(m.Source("commit", 9, A)) == []
    bench.checks.histories.handled(bench.shell, m.Heartbeat("n1", B, {"w1": 6}))
    assert bench.launch(m.Source("commit", 5, A)) == []
    assert bench.launch(m.Source("commit", 9, A)) == ["1.8 resumes from the void state 9 of 1.1"]


def test_a_rewind_that_came_to_nothing_is_done_again(bench: Bench) -> None:
    bench.shell.commits = [m.Commit(5, A, "five", 1), m.Commit(9, A, "nine", 2)]
    rewinds = (m.Rewind(5, 12, "spike"),)
    failed = replace(START, id=B, source=m.Source("commit", 5, A), rewinds=rewinds)
    bench.shell.newest = bench.checks.specs[B] = failed

    def launched(spec: m.GenerationSpec) -> list[str]:
        bench.checks.launched(bench.shell, spec)
        return bench.broken()

    source = m.Source("commit", 9, A)
    assert launched(replace(START, id=m.GenerationId(1, 3), source=source)) == [
        "1.3 forgets the rewind for step 12"
    ]
    again = replace(failed, id=m.GenerationId(1, 4), source=source, rewinds=(m.Rewind(9, 12, "spike"),))
    assert launched(again) == []
