"""Records of ranks: where each one stands, and the newest operations that it took part in.

It is read from what a node's agent heard of its workers (`runtime.node_agent.evidence`): stacks as
`faulthandler` writes them, and operations in the format of torch's flight recorder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from picotron_ray.debug.stacks import StackFrame, place_of, short, training_thread, waits

_ELEMENT_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "uint8", "int8", "bool"), 1),
    **dict.fromkeys(("Float8_e4m3fn", "Float8_e5m2", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short", "float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("Float", "Int", "float32", "int32"), 4),
    **dict.fromkeys(("Double", "Long", "float64", "int64", "ComplexFloat", "complex64"), 8),
}
_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"} | {
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip
_KINDS = {
    **dict.fromkeys(("_all_gather_base", "_allgather_base", "all_gather_single"), "all_gather"),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), "reduce_scatter"),
}
Sizes = tuple[tuple[int, ...], ...]


class RankGroup(NamedTuple):
    """A process group, the same for all of its ranks.

    Fields:
        ranks: of the run, in order of the group.
        axis: of the layout that it serves; empty where it has none.
        number: among groups of the same ranks and axis, counted from 0.
    """

    ranks: tuple[int, ...]
    axis: str = ""
    number: int = 0

    def __str__(self) -> str:
        who = f"ranks {numbers(self.ranks)}"
        named = f"the {self.axis} group of {who}" if self.axis else f"the group of {who}"
        return f"{named} (number {self.number + 1} of them)" if self.number else named


@dataclass(frozen=True, slots=True)
class RankOperation:
    """A collective, or one end of a message between two ranks.

    Fields:
        kind: as torch names it; ``send`` and ``recv`` are ends of messages.
        sequence: of a collective, its number in the group; of a message, its number among those between the
            two ranks with its tag. 0: it is not known.
        peer: rank of the run at a message's other end; -1: it is a collective.
        sizes: shapes of what goes in, and of what comes out.
        issued_s, done_s: seconds since the epoch by the clock of its node; done_s None: not known.
        place: file, line and function that called it; empty: not known.
    """

    group: RankGroup
    kind: str
    sequence: int
    inputs: Sizes = ()
    outputs: Sizes = ()
    dtype: str = ""
    done: bool = False
    issued_s: float = 0.0
    done_s: float | None = None
    place: str = ""
    peer: int = -1
    tag: int = 0
    nccl: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of what goes in, or where nothing does, of what comes out."""
        return _elements(self.inputs or self.outputs) * _ELEMENT_BYTES.get(self.dtype, 0)

    def signature(self) -> tuple[str, int, int, str]:
        """Parts that must be the same on all ranks: kind, elements in and out, type; -1: may differ."""
        took, gave = _elements(self.inputs), _elements(self.outputs)
        if self.kind.startswith("all_to_all"):
            took = gave = -1
        elif self.kind == "scatter":
            took = -1
        elif self.kind in ("gather", "reduce"):
            gave = -1
        return self.kind, took, gave, self.dtype

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, shape)) or "scalar" for shape in self.inputs or self.outputs)
        what = f" of {shapes} {_DTYPES.get(self.dtype, self.dtype)}" if shapes else ""
        if self.peer >= 0:
            return f"{self.kind} {'to' if self.kind == 'send' else 'from'} rank {self.peer}{what}"
        return f"{self.kind}{what}"


@dataclass(frozen=True, slots=True)
class RankConnection:
    """A TCP connection of a rank, by the counters of its kernel.

    Fields:
        unacked: segments on the way, of which the other end has said nothing.
        retransmits: of the oldest of them, in a row.
        retransmitted: segments since it was opened.
        sent_bytes, received_bytes: since it was opened.
        last_received_s: seconds since data came.
    """

    local: str
    peer: str
    unacked: int = 0
    retransmits: int = 0
    retransmitted: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    last_received_s: float = 0.0
    rtt_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A rank.

    Fields:
        for_s: seconds that it has been in its phase.
        step_s: that its newest step took.
        pid: of its process, on its node; 0: not known.
        state: of its process, the kernel's letter (T: stopped, X: gone).
        debugged: whether a debugger is attached to it.
        problem: why nothing is known of it; empty: all is well.
        at_s: when it told its operations, seconds since the epoch by its node's clock; 0: it did not.
        recorded: whether it records operations.
        heard: False: it is known of by others alone.
    """

    rank: int
    node: str = ""
    worker: str = ""
    phase: str = ""
    for_s: float = 0.0
    step: int = -1
    step_s: float = 0.0
    pid: int = 0
    state: str = "S"
    debugged: bool = False
    problem: str = ""
    stack: tuple[StackFrame, ...] = ()
    operations: tuple[RankOperation, ...] = ()
    connections: tuple[RankConnection, ...] = field(default=())
    at_s: float = 0.0
    recorded: bool = True
    heard: bool = True

    @property
    def place(self) -> str:
        """Innermost place of its stack that is this package's or the user's; empty: none."""
        return place_of(self.stack)

    @property
    def stopped(self) -> bool:
        """Whether its process is stopped, by a signal or a debugger."""
        return self.state in ("T", "t")

    @property
    def gone(self) -> bool:
        """Whether its process is no more."""
        return self.state in ("X", "Z")

    @property
    def name(self) -> str:
        """Rank and node, as people read them."""
        return f"rank {self.rank}" + (f" on node {self.node[:8]}" if self.node else "")

    def overdue(self, least_s: float) -> tuple[RankOperation, ...]:
        """Operations that are not done after so many seconds, oldest first."""
        pending = (one for one in self.operations if not one.done)
        return tuple(one for one in pending if self.at_s - one.issued_s >= least_s)

    def blocked(self, least_s: float) -> tuple[RankOperation, ...]:
        """Operations that it waits for: the one that its stack stands in, where that can be told."""
        found = self.overdue(least_s)
        if not waits(self.stack) and not any(one.nccl for one in found):
            return ()
        here = {str(frame) for frame in self.stack}
        return tuple(one for one in found if one.place in here) or found


def numbers(ranks: Sequence[int]) -> str:
    """Write numbers, runs of them by their ends.

    >>> numbers([0, 1, 2, 5]), numbers([3])
    ('0-2, 5', '3')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def named(ranks: Sequence[int]) -> str:
    """Write which ranks.

    >>> named([4]), named([0, 1])
    ('rank 4', 'ranks 0-1')
    """
    return f"rank{'s' * (len(ranks) > 1)} {numbers(ranks)}"


def read_rank(entry: Mapping[str, Any]) -> RankRecord:
    """Read what an agent heard of one worker; whatever is missing or cut off stays empty."""
    text = str(entry.get("stacks", ""))
    stack = training_thread(text)
    told = _told(str(entry.get("collectives", "")))
    rank = int(entry.get("rank", -1))
    groups = dict(_groups(told.get("groups", ())))
    operations = [*_collectives(told, groups), *_messages(told, groups)]
    problem = "" if stack or entry.get("state") in ("T", "t", "X", "Z") else text.strip().splitlines()[:1]
    return RankRecord(
        rank=rank,
        node=str(entry.get("node", "")),
        worker=str(entry.get("worker", "")),
        phase=str(entry.get("phase", "")),
        for_s=float(entry.get("for_s", 0.0)),
        step=int(entry.get("step", -1)),
        step_s=float(entry.get("step_s", 0.0)),
        pid=int(entry.get("pid", 0)),
        state=str(entry.get("state", "S")),
        debugged=bool(entry.get("debugged")),
        problem=(problem[0] if problem else ""),
        stack=stack,
        operations=tuple(sorted(operations, key=lambda one: one.issued_s)),
        connections=tuple(RankConnection(**one) for one in told.get("connections", ())),
        at_s=told.get("at_ns", 0) / 1e9,
        recorded=bool(told.get("recorded", told.get("entries", True))),
    )


def _told(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _groups(told: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, RankGroup]]:
    seen: dict[tuple[tuple[int, ...], str], int] = {}
    for one in told:
        key = tuple(one["ranks"]), str(one.get("axis", ""))
        number = seen[key] = seen.get(key, -1) + 1
        yield str(one["name"]), RankGroup(*key, number)


def _collectives(told: Mapping[str, Any], groups: Mapping[str, RankGroup]) -> Iterator[RankOperation]:
    """Entries of torch's flight recorder, but those of earlier generations and of unknown groups."""
    for one in told.get("entries", ()):
        group = groups.get(str(one["process_group"][0]))
        if group is None or one["time_created_ns"] < told.get("since_ns", 0):
            continue
        backend, _, kind = str(one["profiling_name"]).rpartition(":")
        peer = -1
        if one.get("is_p2p"):
            kind, _, ends = kind.partition(" ")
            kind = "recv" if kind.startswith("recv") else kind
            peer = _peer(kind, ends, group)
            if peer < 0:
                continue
        dtypes = one["input_dtypes"] or one["output_dtypes"]
        done_ns = one.get("time_discovered_completed_ns") or 0
        yield RankOperation(
            group=group,
            kind=_KINDS.get(kind, kind),
            sequence=0 if peer >= 0 else int(one["collective_seq_id"]),
            inputs=tuple(map(tuple, one["input_sizes"])),
            outputs=tuple(map(tuple, one["output_sizes"])),
            dtype=str(dtypes[0]) if dtypes else "",
            done=bool(one["retired"]) or one["state"] == "completed",
            issued_s=one["time_created_ns"] / 1e9,
            done_s=done_ns / 1e9 if done_ns else None,
            place=short(str(one.get("place", ""))),
            peer=peer,
            nccl=backend == "nccl",
        )


def _peer(kind: str, ends: str, group: RankGroup) -> int:
    """The other end of ``send 0->1`` or ``recv 0<-1``, as a rank of the run; -1: it cannot be read."""
    _, arrow, other = ends.partition("->" if kind == "send" else "<-")
    if not arrow or not other.isdigit() or int(other) >= len(group.ranks):
        return -1
    return group.ranks[int(other)]


def _messages(told: Mapping[str, Any], groups: Mapping[str, RankGroup]) -> Iterator[RankOperation]:
    for one in told.get("messages", ()):
        group = groups.get(str(one["group"]))
        if group is None or not 0 <= one["peer"] < len(group.ranks):
            continue
        sizes: Sizes = tuple(map(tuple, one["sizes"]))
        yield RankOperation(
            group=group,
            kind=str(one["kind"]),
            sequence=int(one["number"]),
            inputs=sizes if one["kind"] == "send" else (),
            outputs=() if one["kind"] == "send" else sizes,
            dtype=str(one["dtype"]),
            done=bool(one["done"]),
            issued_s=one["issued_ns"] / 1e9,
            done_s=one["done_ns"] / 1e9 if one.get("done_ns") else None,
            place=short(str(one.get("place", ""))),
            peer=group.ranks[one["peer"]],
            tag=int(one["tag"]),
        )


def _elements(sizes: Sizes) -> int:
    total = 0
    for shape in sizes:
        count = 1
        for length in shape:
            count *= length
        total += count
    return total
