"""Verdict on why ranks stand still, from what each of them told: no torch, no Ray, no clock.

The order of findings is that of causes: what was called wrongly comes before who waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from picotron_ray.debug.links import FailedLink, failed_links
from picotron_ray.debug.mismatch import OperationMismatch, by_group, first_mismatch
from picotron_ray.debug.rank_record import RankRecord, named
from picotron_ray.debug.wait_graph import StuckTransfer, WaitGraph

LEAST_S = 2.0
"""Age below which an operation counts as on its way; or two steps of the run, where those take longer."""
HangKind = Literal["mismatch", "deadlock", "gone", "stopped", "debugged", "late", "link", "stuck", "silent"]
MOST_LATE = 8


@dataclass(frozen=True, slots=True)
class HangFinding:
    """Something that is wrong.

    Fields:
        ranks: that it is about.
        suggestions: what to do next, the most useful first.
    """

    kind: HangKind
    text: str
    ranks: tuple[int, ...]
    suggestions: tuple[str, ...]
    details: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {"kind": self.kind, "text": self.text, "ranks": list(self.ranks), **self.details}


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """Findings about ranks; none: nothing is wrong."""

    ranks: Sequence[RankRecord]
    findings: Sequence[HangFinding]
    graph: WaitGraph
    least_s: float

    @property
    def suggestions(self) -> list[str]:
        """Things to do next, the most useful first."""
        found = [text for finding in self.findings for text in finding.suggestions]
        return list(dict.fromkeys(found or _calm(self.ranks)))

    @property
    def held(self) -> dict[str, Any] | None:
        """Step after which a tool holds all ranks, and since when: the least that one of them says."""
        if not self.ranks or any(record.phase != "hold" for record in self.ranks):
            return None
        return {
            "step": max(record.step for record in self.ranks),
            "for_s": min(record.for_s for record in self.ranks),
        }

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        told = [
            {
                "rank": record.rank, "node": record.node, "worker": record.worker, "phase": record.phase,
                "for_s": record.for_s, "step": record.step, "state": record.state, "place": record.place,
                "problem": record.problem, "operations": len(record.operations),
                "pending": [str(one) for one in record.operations if not one.done],
                "stack": list(map(str, record.stack)),
            }
            for record in self.ranks
        ]  # fmt: skip
        waits = [
            {
                "rank": rank,
                "for": peer,
                "operation": str(one),
                "group": str(one.group),
                "number": one.sequence,
            }
            for rank, peers in sorted(self.graph.waits.items())
            for peer, one in sorted(peers.items())
        ]
        return {
            "verdict": [finding.plain() for finding in self.findings],
            "suggestions": self.suggestions,
            "ranks": told,
            "waits": waits,
            "groups": _groups(self.ranks),
            "held": self.held,
            "least_s": self.least_s,
        }


def judge_hang(ranks: Sequence[RankRecord], least_s: float | None = None) -> HangVerdict:
    """Say why ranks stand still.

    Args:
        ranks: what each told; also of a run that does not stand still.
        least_s: age in seconds below which an operation counts as on its way; None: by the run's steps.
    """
    heard = {record.rank for record in ranks}
    silent = {rank for record in ranks for one in record.operations for rank in one.group.ranks} - heard
    unheard = [RankRecord(rank, heard=False) for rank in silent]
    known = sorted([*ranks, *unheard], key=lambda record: record.rank)
    if least_s is None:
        least_s = max(LEAST_S, 2.0 * max((record.step_s for record in known), default=0.0))
    graph = WaitGraph(known, least_s)
    mismatch = first_mismatch(known)
    cycle = graph.cycle()
    found = [_mismatch(mismatch, known)] if mismatch else []
    found += [_deadlock(cycle, graph, known)] if cycle else []
    found += [*_ended(known), *_late(graph, known, mismatch)]
    stuck = [each for each in graph.stuck() if not _explained(each, mismatch)]
    links = failed_links(known, stuck)
    found += [_link(link, known) for link in links]
    if stuck and not found:
        found.append(_stuck(stuck[0], known))
    if not any(record.recorded for record in ranks) and not found and ranks:
        found.append(_silent(known))
    return HangVerdict(known, found, graph, least_s)


def _explained(transfer: StuckTransfer, mismatch: OperationMismatch | None) -> bool:
    return mismatch is not None and mismatch.group == transfer.group


def _where(record: RankRecord) -> str:
    return f"{record.name} at {record.place}" if record.place else record.name


def _mismatch(found: OperationMismatch, ranks: Sequence[RankRecord]) -> HangFinding:
    names = {record.rank: record for record in ranks}
    standing = {
        rank: one.place or ("" if one.done else names[rank].place) for rank, one in found.said.items()
    }
    said = []
    for what, place, who in found.variants():
        nodes = sorted({names[rank].node[:8] for rank in who if names[rank].node})
        on = f" on node{'s' * (len(nodes) > 1)} {', '.join(nodes)}" if nodes else ""
        at = place or standing[who[0]]
        said.append(f"{named(who)}{on} called {what}" + (f" at {at}" if at else ""))
    note = f"; {found.note}" if found.note else ""
    text = f"{found.title}: {'; '.join(said)}{note}"
    place = next((standing[rank] for rank in found.odd if standing[rank]), "the calls above")
    fixes = {
        "order": "have every rank call these operations in one order, whatever its data says",
        "kind": "have every rank call the same operation there; look for a branch that depends on the rank",
        "size": "make the tensors of one size: pad, or exchange the sizes first",
        "dtype": "cast to one type before the call; look at autocast and at checkpoints of mixed types",
    }
    suggestions = (
        fixes[found.what],
        f"look at what decides there: {place}",
        f"`picotron-ray debug break NAME FILE.py:LINE --ranks {','.join(map(str, found.odd[:4]))}` before it",
    )
    details = {
        "what": found.what, "group": str(found.group), "number": found.sequence, "odd": list(found.odd),
        "said": {
            str(rank): {"operation": str(one), "place": standing[rank]}
            for rank, one in sorted(found.said.items())
        },
    }  # fmt: skip
    return HangFinding("mismatch", text, found.odd, suggestions, details)


def _deadlock(cycle: tuple[int, ...], graph: WaitGraph, ranks: Sequence[RankRecord]) -> HangFinding:
    names = {record.rank: record for record in ranks}
    links, steps = [], []
    for rank, peer in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        one = graph.waits[rank][peer]
        place = one.place or names[rank].place
        what = f"{one} of {one.group}" if one.peer < 0 else str(one)
        links.append(f"{names[rank].name} waits for rank {peer} in {what}{f' at {place}' if place else ''}")
        step = {"rank": rank, "for": peer, "operation": str(one), "message": one.peer >= 0, "place": place}
        steps.append(step)
    text = f"ranks {' -> '.join(map(str, (*cycle, cycle[0])))} wait for each other: {'; '.join(links)}"
    order = "call operations, of several groups too, in one order on all ranks"
    messages = "have one rank of the cycle send before it receives, or use batch_isend_irecv for both ways"
    suggestions = (
        *((messages, order) if any(each["message"] for each in steps) else (order,)),
        "stop the run with `picotron-ray stop NAME --now`: it will not go on by itself",
    )
    return HangFinding("deadlock", text, cycle, suggestions, {"cycle": steps})


def _ended(ranks: Sequence[RankRecord]) -> list[HangFinding]:
    found = []
    for record in ranks:
        if record.gone:
            text = f"{record.name} is gone: its process has ended"
            tips = (
                f"`picotron-ray logs NAME --rank {record.rank} --since 10m`: why it ended",
                "the agent reports it within a heartbeat, and the run recovers by itself",
            )
            found.append(HangFinding("gone", text, (record.rank,), tips))
        elif record.stopped:
            text = (
                f"{record.name} is stopped (SIGSTOP, or a debugger) in phase {record.phase or 'unknown'} for"
                f" {record.for_s:.1f} s: the others wait for it"
            )
            tips = (
                f"continue its process, on its node: kill -CONT {record.pid or 'PID'}",
                "look for a debugger that is attached to it",
            )
            found.append(HangFinding("stopped", text, (record.rank,), tips))
    return found


def _late(
    graph: WaitGraph, ranks: Sequence[RankRecord], mismatch: OperationMismatch | None
) -> list[HangFinding]:
    names = {record.rank: record for record in ranks}
    found = []
    for rank, behind in graph.late()[:MOST_LATE]:
        record = names[rank]
        if record.gone or record.stopped or (mismatch and rank in mismatch.said):
            continue
        waiter, one = min(
            ((peer, waited[rank]) for peer, waited in graph.waits.items() if rank in waited),
            key=lambda each: each[1].issued_s,
        )
        waited_s = names[waiter].at_s - one.issued_s
        where = f" at {record.place}" if record.place else ""
        first = f"rank {waiter}: " if len(behind) > 1 else ""
        asleep = record.problem or f"in phase {record.phase or 'unknown'} for {record.for_s:.1f} s"
        asleep += "" if record.at_s or record.problem else ", and has told no operations in time"
        whom = (
            f"{named(behind)} wait{'s' * (len(behind) == 1)} for it"
            f" ({first}{waited_s:.1f} s in {one} of {one.group})"
        )
        details = {"place": record.place, "waiting": list(behind), "operation": str(one), "seconds": waited_s}
        if record.debugged:
            text = f"a debugger is attached to {record.name}, which stands{where or f' {asleep}'}: {whom}"
            found.append(HangFinding("debugged", text, (rank,), DEBUGGED_TIPS, details))
        elif record.heard:
            text = f"{record.name} is late{where} ({asleep}): {whom}"
            found.append(HangFinding("late", text, (rank,), _late_tips(record), details))
        else:
            text = f"nothing is heard of rank {rank}: its process, or its node, is gone: {whom}"
            found.append(HangFinding("gone", text, (rank,), GONE_TIPS, details))
    return found


GONE_TIPS = (
    "`picotron-ray nodes NAME`: which of its nodes answer",
    "a node that is gone is noticed after elastic.node_timeout_s, and the run recovers by itself",
)


DEBUGGED_TIPS = (
    "have the debugger continue, or end its `picotron-ray debug attach`: the run goes on by itself",
    "a rank that stands still for longer than its attach's --timeout-s goes on by itself",
)


def _late_tips(record: RankRecord) -> tuple[str, ...]:
    of_phase = {
        "data": "its data comes late: look at the storage that it reads from",
        "restore": "it still restores: look at the storage's speed",
        "snapshot": "it waits for its copy to host memory: raise snapshot.interval_steps",
        "evaluate": "it evaluates while others train: give every rank the same evaluation steps",
    }
    place = f" at {record.place}" if record.place else ""
    return (
        of_phase.get(record.phase, f"see what rank {record.rank} does{place}: nothing may wait there alone"),
        f"`picotron-ray logs NAME --rank {record.rank} --since 10m`",
        f"`picotron-ray top NAME`: where it is slow at every step, drain its node {record.node[:8]}".rstrip(),
    )


def _link(link: FailedLink, ranks: Sequence[RankRecord]) -> HangFinding:
    names = {record.rank: record for record in ranks}
    first, second = (names[rank] for rank in link.pair)
    what = ""
    if link.transfer is not None:
        one = link.transfer.operation
        what = f": {one} ({one.bytes:,} bytes) has waited {link.transfer.waited_s:.1f} s"
    counted = [
        f"rank {rank} has {one.unacked} unanswered segments, the oldest sent again {one.retransmits} times"
        for rank, one in sorted(link.counters.items())
        if one.unacked or one.retransmits
    ]
    counters = "; ".join(counted) or "no counter of a connection tells why"
    good = "last good use is not known"
    if link.last_good_s is not None:
        good = f"last good use {link.last_good_s:.1f} s ago"
        good += f" ({link.last_good})" if link.last_good else ""
    text = f"nothing passes between {_where(first)} and {_where(second)}{what}; {counters}; {good}"
    nodes = sorted({record.node[:8] for record in (first, second) if record.node})
    between = f"nodes {' and '.join(nodes)}" if len(nodes) > 1 else "the two ranks"
    suggestions = (
        f"test the link between {between}: `picotron-ray probe`, ping, cables",
        "look for a firewall or security group that drops packets between them",
        f"`picotron-ray drain NAME {nodes[-1] if nodes else 'NODE'}`: the run moves off the node",
    )
    return HangFinding("link", text, link.pair, suggestions, link.plain())


def _stuck(transfer: StuckTransfer, ranks: Sequence[RankRecord]) -> HangFinding:
    names = {record.rank: record for record in ranks}
    where = "; ".join(_where(names[rank]) for rank in transfer.waiting[:4] if rank in names)
    one = transfer.operation
    text = (
        f"{one} (operation {transfer.number} of {transfer.group}, {one.bytes:,} bytes) was called by all of"
        f" its ranks and has not ended for {transfer.waited_s:.1f} s on {named(transfer.waiting)}:"
        f" {where}; no counter names a link"
    )
    suggestions = (
        "ask again: large operations on slow links take their time",
        "`picotron-ray probe` measures the links of its nodes",
        "on GPUs, look for XID errors and NVLink counters (`picotron-ray doctor`), and set NCCL_DEBUG=INFO",
    )
    return HangFinding("stuck", text, transfer.waiting, suggestions, {"seconds": transfer.waited_s})


def _silent(ranks: Sequence[RankRecord]) -> HangFinding:
    text = "ranks record no operations: debug.record_operations is 0; stacks alone are known"
    return HangFinding(
        "silent", text, tuple(record.rank for record in ranks), ("set debug.record_operations to 1000",)
    )


def _calm(ranks: Sequence[RankRecord]) -> list[str]:
    if ranks and all(record.phase == "hold" for record in ranks):
        return ["a breakpoint holds the run: `picotron-ray debug continue NAME`"]
    return [
        "nothing to do; where steps are slow, see `picotron-ray top NAME` and `picotron-ray profile NAME`"
    ]


def _groups(ranks: Sequence[RankRecord]) -> list[dict[str, Any]]:
    """Newest operation of each group by rank, and what is pending there."""
    found = []
    for group, numbered in sorted(by_group(ranks).items()):
        newest = {rank: number for number in sorted(numbered) for rank in numbered[number]}
        pending = sorted({rank for said in numbered.values() for rank, one in said.items() if not one.done})
        found.append({"group": str(group), "newest": {str(rank): newest[rank] for rank in sorted(newest)}} | {
            "pending": pending, "operations": sum(map(len, numbered.values())),
        })  # fmt: skip
    return found
