"""Verdicts on ranks that stand still, from what each would have told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from picotron_ray.debug.hang_verdict import HangVerdict, judge_hang
from picotron_ray.debug.rank_record import RankGroup, RankOperation, RankRecord, read_rank
from picotron_ray.debug.stacks import place_of, short, training_thread, waits
from picotron_ray.debug.verdict_lines import verdict_lines

NOW_S = 1000.0
PACKAGE = "/opt/venv/lib/python3.11/site-packages/picotron_ray"
WAITS = f"""Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap

Thread 0x00007f02 (most recent call first):
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{PACKAGE}/comm/reducers/exact.py", line 40 in wait
  File "{PACKAGE}/train/loop.py", line 160 in _step
  File "{PACKAGE}/runtime/worker/generation.py", line 100 in run

Current thread 0x00007f03 (most recent call first):
  File "<frozen importlib._bootstrap>", line 5 in main_loop
"""
ASLEEP = """Current thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/home/me/own_model.py", line 33 in forward
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1 in __call__
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/pipelining/stage.py", line 2 in f
"""
"""Called by torch's communication, and not waiting in it."""


class Told:
    """What ranks tell; operations are called one second after the other, the newest at ``NOW_S`` - 9 s."""

    def __init__(self, ranks: int) -> None:
        self.entries: list[dict[str, Any]] = [
            {
                "rank": rank, "worker": f"w{rank}", "node": f"abcdef{rank // 2}123", "phase": "reduce",
                "for_s": 9.0, "step": 4, "step_s": 0.1, "state": "S", "stacks": WAITS,
            }
            for rank in range(ranks)
        ]  # fmt: skip
        everyone = {"name": "0", "axis": "", "ranks": list(range(ranks))}
        self.told: list[dict[str, Any]] = [
            {
                "entries": [], "messages": [], "groups": [everyone], "connections": [], "since_ns": 0,
                "at_ns": int(NOW_S * 1e9), "recorded": True,
            }
            for _ in range(ranks)
        ]  # fmt: skip
        self._numbers: dict[tuple[int, str], int] = {}

    def group(self, name: str, ranks: list[int], axis: str = "") -> None:
        for rank in ranks:
            self.told[rank]["groups"].append({"name": name, "axis": axis, "ranks": ranks})

    def call(
        self, rank: int, kind: str, size: int = 8, dtype: str = "Float", done: bool = True, group: str = "0",
        age_s: float = 9.0, place: str = "", backend: str = "gloo",
    ) -> None:  # fmt: skip
        number = self._numbers[rank, group] = self._numbers.get((rank, group), 0) + 1
        self.told[rank]["entries"].append(
            {
                "process_group": [group, "x"], "collective_seq_id": number,
                "profiling_name": f"{backend}:{kind}",
                "is_p2p": False, "input_sizes": [[size]], "input_dtypes": [dtype], "output_sizes": [[size]],
                "output_dtypes": [dtype], "state": "scheduled", "retired": done, "place": place,
                "time_created_ns": int((NOW_S - age_s) * 1e9) + number, "time_discovered_completed_ns": 0,
            }
        )  # fmt: skip

    def message(
        self,
        rank: int,
        kind: str,
        peer: int,
        number: int = 1,
        size: int = 5,
        done: bool = False,
        age_s: float = 9.0,
    ) -> None:
        self.told[rank]["messages"].append(
            {
                "kind": kind, "group": "0", "peer": peer, "tag": 0, "number": number, "sizes": [[size]],
                "dtype": "float32", "place": f"/home/me/own.py:{rank} in talk", "done": done,
                "issued_ns": int((NOW_S - age_s) * 1e9), "done_ns": int((NOW_S - age_s) * 1e9) if done else 0,
            }
        )  # fmt: skip

    def connect(self, first: int, second: int, **counters: Any) -> None:
        """A connection of two ranks; ``counters`` are of the first one's end."""
        ends = f"10.0.0.{first}:7{first}{second}", f"10.0.0.{second}:8{first}{second}"
        self.told[first]["connections"].append({"local": ends[0], "peer": ends[1], **counters})
        self.told[second]["connections"].append({"local": ends[1], "peer": ends[0]})

    def verdict(self, least_s: float | None = None) -> HangVerdict:
        entries = [
            {**entry, "collectives": json.dumps(told)}
            for entry, told in zip(self.entries, self.told, strict=True)
        ]
        found = judge_hang([read_rank(entry) for entry in entries], least_s)
        json.dumps(found.plain())
        for question in ("deadlock", "comm"):
            assert verdict_lines(found.plain(), question)[-1].startswith("  ")  # type: ignore[arg-type]
        return found


def kinds(found: HangVerdict) -> list[str]:
    return [finding.kind for finding in found.findings]


# --- operations that do not match ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "what"),
    [({"kind": "broadcast"}, "kind"), ({"size": 9}, "size"), ({"dtype": "Half"}, "dtype")],
)
def test_the_first_operation_that_does_not_match_is_named(changed: dict[str, Any], what: str) -> None:
    told = Told(4)
    for rank in range(4):
        told.call(rank, "all_gather", age_s=12.0)
        odd = changed if rank == 2 else {}
        told.call(
            rank, **{"kind": "all_reduce", **odd}, done=False, place=f"/home/me/own.py:{rank // 2} in f"
        )
    found = told.verdict()
    [first] = found.findings
    assert (first.kind, first.ranks, first.details["what"]) == ("mismatch", (2,), what)
    assert first.details["number"] == 2
    assert "rank 2 on node abcdef11 called" in first.text
    assert "/home/me/own.py:1 in f" in first.text
    assert len(found.suggestions) == 3
    assert "/home/me/own.py:1" in found.suggestions[1]


def test_of_two_ranks_neither_is_the_odd_one() -> None:
    told = Told(2)
    told.call(0, "all_reduce", done=False)
    told.call(1, "broadcast", done=False)
    [first] = told.verdict().findings
    assert first.ranks == (0, 1)
    assert "picotron_ray/comm/reducers/exact.py:40 in wait" in first.text, "by the stack"


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (["b", "a", "c"], "rank 2 calls operations 1 and 2 the other way round than rank 0"),
        (["b", "c"], "rank 2 leaves out what rank 0 calls as operation 1"),
        (["x", "a", "b"], "rank 2 calls one operation more than rank 0"),
    ],
)
def test_another_order_is_told(calls: list[str], said: str) -> None:
    told = Told(3)
    for rank in range(3):
        for kind in calls if rank == 2 else ["a", "b", "c"]:
            told.call(rank, kind, done=False)
    first = told.verdict().findings[0]
    assert first.details["what"] == "order"
    assert first.text.endswith(said)


def test_what_may_differ_is_no_mismatch() -> None:
    told = Told(2)
    told.call(0, "all_to_all", 3)
    told.call(1, "all_to_all", 5)
    told.call(0, "gather")
    told.call(1, "gather")
    told.told[1]["entries"][-1]["output_sizes"] = []
    assert kinds(told.verdict()) == []


def test_the_two_ends_of_a_message_must_have_one_size() -> None:
    told = Told(2)
    told.message(0, "send", 1, size=5)
    told.message(1, "recv", 0, size=6)
    first = told.verdict().findings[0]
    assert (first.kind, first.details["what"], first.ranks) == ("mismatch", "size", (0, 1))


# --- who waits for whom ----------------------------------------------------------------------------------


def test_a_cycle_is_a_deadlock() -> None:
    told = Told(4)
    for rank in range(3):
        told.message(rank, "recv", (rank + 1) % 3)
    told.call(3, "all_reduce", done=False)
    found = told.verdict()
    assert kinds(found) == ["deadlock"]
    assert found.findings[0].ranks == (0, 1, 2)
    assert (
        "rank 2 on node abcdef11 waits for rank 0 in recv from rank 0 of 5 float32 at /home/me/own.py:2"
        in (found.findings[0].text)
    )
    assert "send before it receives" in found.suggestions[0]
    assert found.graph.waits[3].keys() == {0, 1, 2}


def test_groups_in_another_order_are_a_cycle() -> None:
    told = Told(2)
    told.group("dp", [0, 1], "data")
    told.group("tp", [0, 1], "tp")
    told.call(0, "all_reduce", group="dp", done=False)
    told.call(1, "all_reduce", group="tp", done=False)
    found = told.verdict()
    assert kinds(found) == ["deadlock"]
    assert "all_reduce of 8 float32 of the data group of ranks 0-1" in found.findings[0].text
    assert not any("send before" in text for text in found.suggestions)


def test_a_message_whose_other_end_was_called_is_no_cycle() -> None:
    told = Told(2)
    told.message(0, "send", 1, number=3)
    told.message(1, "recv", 0, number=3)
    assert kinds(told.verdict()) == ["link"]


def test_a_late_rank_is_named_where_it_is_also_behind_others() -> None:
    """Rank 0 waits for rank 1, which waits for rank 3 of its other group."""
    told = Told(4)
    told.group("dp", [0, 1], "data")
    told.group("tp", [1, 3], "tp")
    told.call(0, "all_reduce", group="dp", done=False)
    told.call(1, "all_gather", group="tp", done=False, age_s=7.0)
    told.entries[3] |= {"stacks": ASLEEP, "phase": "data"}
    told.entries[2]["stacks"] = ASLEEP
    found = told.verdict()
    assert kinds(found) == ["late"]
    first = found.findings[0]
    assert (first.ranks, first.details["waiting"]) == ((3,), [0, 1])
    assert (
        "rank 3 on node abcdef11 is late at /home/me/own_model.py:33 in forward (in phase data" in first.text
    )
    assert "ranks 0-1 wait for it (rank 1: 7.0 s in all_gather of 8 float32 of the tp group" in first.text
    assert "data comes late" in found.suggestions[0]


@pytest.mark.parametrize(("state", "kind"), [("T", "stopped"), ("X", "gone")])
def test_a_process_that_is_stopped_or_gone_is_named(state: str, kind: str) -> None:
    told = Told(2)
    told.call(0, "all_reduce", done=False)
    told.entries[1] |= {"state": state, "stacks": "no answer in 0.5 s", "pid": 4711}
    told.told[1] = {}
    found = told.verdict()
    assert kinds(found) == [kind]
    assert found.findings[0].ranks == (1,)
    assert ("kill -CONT 4711" in found.suggestions[0]) is (kind == "stopped")


def test_a_rank_that_a_debugger_stops_is_no_late_one() -> None:
    """Seen: it was called late, with the advice to drain its node."""
    told = Told(2)
    told.call(0, "all_reduce", done=False)
    told.entries[1] |= {"stacks": ASLEEP, "phase": "forward", "debugged": True}
    found = told.verdict()
    assert kinds(found) == ["debugged"]
    assert "a debugger is attached to rank 1 on node abcdef01, which stands at /home/me/own" in (
        found.findings[0].text
    )
    assert not any("drain" in each for each in found.suggestions)


def test_a_rank_that_does_not_answer_is_late_with_the_reason() -> None:
    told = Told(2)
    told.call(0, "all_reduce", done=False)
    told.entries[1] |= {"stacks": "no answer in 0.5 s"}
    told.told[1] = {}
    [first] = told.verdict().findings
    assert (first.kind, first.ranks) == ("late", (1,))
    assert "(no answer in 0.5 s)" in first.text


def test_a_rank_that_nobody_hears_of_is_gone() -> None:
    told = Told(3)
    for rank in range(2):
        told.call(rank, "all_reduce", done=False)
    del told.entries[2], told.told[2]
    found = told.verdict()
    assert kinds(found) == ["gone"]
    assert (found.findings[0].ranks, found.findings[0].details["waiting"]) == ((2,), [0, 1])
    assert "nodes NAME" in found.suggestions[0]


def test_a_rank_without_an_answer_of_its_operations_is_said_to_have_none() -> None:
    told = Told(2)
    told.call(0, "all_reduce", done=False)
    told.told[1] = {}
    [first] = told.verdict().findings
    assert (first.kind, first.ranks) == ("late", (1,))
    assert "has told no operations in time" in first.text


def test_an_operation_that_has_been_called_just_now_is_on_its_way() -> None:
    told = Told(2)
    told.call(0, "all_reduce", done=False, age_s=1.5)
    assert kinds(told.verdict()) == []
    assert kinds(told.verdict(least_s=0.3)) == ["late"]
    for entry in told.entries:
        entry["step_s"] = 30.0
    told.call(0, "all_reduce", done=False, age_s=40.0)
    assert kinds(told.verdict()) == [], "two steps of this run take longer"


def test_what_a_rank_issued_and_does_not_wait_for_says_nothing() -> None:
    told = Told(2)
    told.call(0, "all_reduce", done=False)
    told.entries[0]["stacks"] = ASLEEP
    assert kinds(told.verdict()) == []


# --- links -----------------------------------------------------------------------------------------------


def test_a_link_that_carries_nothing_is_named_by_its_counters() -> None:
    told = Told(4)
    for rank in range(4):
        told.call(rank, "all_gather", age_s=20.0)
        told.call(rank, "all_reduce", size=1000, done=False)
    for first, second in ((0, 1), (1, 2), (2, 3)):
        told.connect(first, second, last_received_s=0.5)
    told.connect(0, 3, unacked=7, retransmits=5, last_received_s=9.2)
    found = told.verdict()
    assert kinds(found) == ["link"]
    link = found.findings[0]
    assert link.ranks == (0, 3)
    assert (link.details["bytes"], link.details["seconds"]) == (4000, pytest.approx(9.0))
    assert link.details["counters"]["0"]["retransmits"] == 5
    assert "rank 0 has 7 unanswered segments, the oldest sent again 5 times" in link.text
    assert link.details["last_good"] == "all_gather of 8 float32"
    assert "nodes abcdef01 and abcdef11" in found.suggestions[0]


def test_an_operation_of_several_that_does_not_end_names_no_link_without_counters() -> None:
    told = Told(3)
    for rank in range(3):
        told.call(rank, "all_reduce", done=rank == 0)
    found = told.verdict()
    assert kinds(found) == ["stuck"]
    assert found.findings[0].ranks == (1, 2)


def test_a_single_retransmission_is_no_failed_link() -> None:
    told = Told(2)
    told.call(0, "all_reduce")
    told.call(1, "all_reduce")
    told.connect(0, 1, unacked=1, retransmits=1)
    assert kinds(told.verdict()) == []


# --- nothing wrong, and what is known of little ----------------------------------------------------------


def test_nothing_wrong_is_said() -> None:
    told = Told(2)
    for rank in range(2):
        told.call(rank, "all_reduce")
        told.message(rank, "send", 1 - rank, done=True)
    found = told.verdict()
    assert kinds(found) == []
    line = verdict_lines(found.plain(), "comm")[0]
    assert line.startswith("nothing wrong: 2 ranks in step 4, 2 collectives of 1 group match")


def test_a_run_that_a_breakpoint_holds_is_said_to_be_held_first() -> None:
    """It said that nothing is wrong, and a breakpoint under ``next`` alone."""
    told = Told(2)
    for rank, entry in enumerate(told.entries):
        entry |= {"phase": "hold", "for_s": 12.0 + rank, "step": 911}
    plain = told.verdict().plain()
    first, second, *_ = verdict_lines(plain, "deadlock")
    assert first == "held by a breakpoint, or a recording that is saved, after step 911, for 12 s"
    assert second.startswith("nothing wrong: 2 ranks")
    plain["held"]["breakpoints"] = [1]
    assert verdict_lines(plain, "comm")[0] == "held by breakpoint 1 after step 911, for 12 s"
    told.entries[1]["phase"] = "sync"
    assert told.verdict().plain()["held"] is None


def test_operations_of_earlier_generations_and_unknown_groups_are_left_out() -> None:
    told = Told(2)
    told.call(0, "broadcast", age_s=30.0)
    told.call(1, "all_reduce", age_s=30.0)
    told.call(1, "all_reduce", group="9")
    for each in told.told:
        each["since_ns"] = int((NOW_S - 20) * 1e9)
    found = told.verdict()
    assert kinds(found) == []
    assert all(not record.operations for record in found.ranks)


def test_nothing_recorded_is_said_and_an_answer_cut_off_is_none() -> None:
    told = Told(1)
    told.told[0] |= {"recorded": False}
    assert kinds(told.verdict()) == ["silent"]
    record = read_rank({"rank": 0, "stacks": WAITS, "collectives": '{"entries": [{"pro'})
    assert record.operations == ()


def test_messages_of_nccl_are_read_from_its_recorder() -> None:
    told = Told(2)
    for rank, kind, name in ((0, "send", "send 0->1"), (1, "recv", "recv 1<-0")):
        told.call(rank, name, backend="nccl", done=False)
        told.told[rank]["entries"][-1] |= {"is_p2p": True}
        told.entries[rank]["stacks"] = ASLEEP  # the host goes on: it is the device that waits
        [one] = read_rank({**told.entries[rank], "collectives": json.dumps(told.told[rank])}).operations
        assert (one.kind, one.peer, one.nccl) == (kind, 1 - rank, True)
    assert kinds(told.verdict()) == ["link"]


# --- stacks ----------------------------------------------------------------------------------------------


def test_the_thread_that_trains_is_found_and_whether_it_waits() -> None:
    frames = training_thread(WAITS)
    assert frames[-1].function == "run"
    assert waits(frames)
    assert place_of(frames) == "picotron_ray/comm/reducers/exact.py:40 in wait"
    asleep = training_thread(ASLEEP)
    assert not waits(asleep)
    assert place_of(asleep) == "/home/me/own_model.py:33 in forward"
    assert training_thread("no answer in 0.5 s") == ()


def test_a_checkout_of_this_package_keeps_its_own_name() -> None:
    assert short("/home/me/picotron_ray/picotron_ray/train/loop.py") == "picotron_ray/train/loop.py"


def test_of_many_waits_the_first_are_listed_and_the_rest_counted() -> None:
    group = RankGroup(tuple(range(64)))
    sums = [RankOperation(group, "all_reduce", number, ((8,),), ((8,),), "Float") for number in (1, 2)]
    stack = training_thread(WAITS)
    ranks = [RankRecord(rank, stack=stack, operations=(sums[0],), at_s=9.0) for rank in range(63)]
    found = judge_hang([*ranks, RankRecord(63, stack=training_thread(ASLEEP))])
    assert kinds(found) == ["late"]
    lines = verdict_lines(found.plain(), "deadlock")
    assert len(lines) < 50
    assert any("47 more" in line for line in lines)
