"""Ranks whose messages run one after the other, as NCCL runs those of a communicator: do they all end?

A rank computes in order. It posts messages in batches; a batch begins once those before it in its queue have
ended, and once everything has ended that its rank computed before it was posted (streams of CUDA). A message
travels when both of its ends have begun, a batch ends with its last message, and a computation begins when
what it needs has arrived. The k-th send to a rank over a queue meets that rank's k-th receive: NCCL knows no
tags.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from picotron_ray.layout.message_order import COMPUTES, SENDS, peer_of, stage_owners
from picotron_ray.layout.schedule_actions import Action, ActionRows

Queue = Hashable


class Message(NamedTuple):
    """One end of a message, by the name of the other end's rank."""

    sends: bool
    peer: int


class Batch(NamedTuple):
    """Messages that are posted together, to one queue.

    Fields:
        name: by which a computation needs it, and by which errors call it.
    """

    name: str
    queue: Queue
    messages: tuple[Message, ...]


class Compute(NamedTuple):
    """A computation, and the names of the batches that it needs."""

    name: str
    needs: tuple[str, ...] = ()


Step = Batch | Compute
QueueOf = Callable[[int, int, bool], Queue]
"""(rank, peer, whether the rank sends) -> the queue of the message."""


def one_communicator(rank: int, peer: int, sends: bool) -> Queue:
    """As the runtime has it: the messages of a pipeline share a communicator."""
    return "pp"


def one_per_pair(rank: int, peer: int, sends: bool) -> Queue:
    return min(rank, peer), max(rank, peer)


def steps_of(posted: ActionRows, queue_of: QueueOf = one_communicator) -> list[list[Step]]:
    """What every rank does in a step of a pipeline: each message is a batch of its own."""
    owner = stage_owners(posted)
    return [[_step(action, rank, row, owner, queue_of) for action in row] for rank, row in enumerate(posted)]


def _step(action: Action, rank: int, row: Sequence[Action], owner: dict[int, int], queue_of: QueueOf) -> Step:
    if action.kind in COMPUTES:
        kinds = {"F": ("RECV_F",), "B": ("RECV_B",), "I": ("RECV_B",)}.get(action.kind, ())
        return Compute(str(action), tuple(str(action._replace(kind=kind)) for kind in kinds))
    peer = peer_of(action, owner)
    assert peer is not None
    sends = action.kind in SENDS
    return Batch(str(action), queue_of(rank, peer, sends), (Message(sends, peer),))


class _Rank:
    """One rank's queue of computations and its queues of messages, as far as they have come."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.computes: list[Compute] = []
        self.queues: dict[Queue, list[tuple[int, Batch]]] = defaultdict(list)
        self.posted: set[str] = set()
        for step in steps:
            if isinstance(step, Compute):
                self.computes.append(step)
            else:
                self.queues[step.queue].append((len(self.computes), step))
                self.posted.add(step.name)
        self.computed = 0
        self.heads: Counter[Queue] = Counter()
        self.ended: set[str] = set()
        self.begun: dict[Queue, list[tuple[Queue, int, int, int]]] = {}
        self.numbers: Counter[tuple[Queue, int, int]] = Counter()

    def compute(self) -> bool:
        """Compute what can be; whether anything was."""
        before = self.computed
        while self.computed < len(self.computes):
            needs = (name for name in self.computes[self.computed].needs if name in self.posted)
            if not self.ended.issuperset(needs):
                break
            self.computed += 1
        return self.computed > before

    def waits(self) -> list[str]:
        """What has not ended, one for each queue."""
        heads = [self.computes[self.computed].name] if self.computed < len(self.computes) else []
        left = [
            (queue, batches) for queue, batches in self.queues.items() if self.heads[queue] < len(batches)
        ]
        return heads + [batches[self.heads[queue]][1].name for queue, batches in left]


def stuck(ranks: Sequence[Sequence[Step]]) -> list[str]:
    """The ranks that never end, each with what it stands at; empty: all end."""
    states = [_Rank(steps) for steps in ranks]
    ends: Counter[tuple[Queue, int, int, int]] = Counter()  # of a message, that have begun
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(states):
            moved |= rank.compute()
            for queue in rank.queues:
                while _advance(number, rank, queue, ends):
                    moved = True
    found = []
    for number, rank in enumerate(states):
        if waits := rank.waits():
            found.append(f"rank {number} at {', '.join(waits)}")
    return found


def _advance(number: int, rank: _Rank, queue: Queue, ends: Counter[tuple[Queue, int, int, int]]) -> bool:
    """Begin or end the batch at the head of a queue; whether either was possible."""
    batches, head = rank.queues[queue], rank.heads[queue]
    if head == len(batches):
        return False
    after, batch = batches[head]
    if queue not in rank.begun:
        if rank.computed < after:
            return False
        keys = []
        for message in batch.messages:
            way = (number, message.peer) if message.sends else (message.peer, number)
            keys.append((queue, *way, rank.numbers[queue, *way]))
            rank.numbers[queue, *way] += 1
            ends[keys[-1]] += 1
        rank.begun[queue] = keys
        return True
    if any(ends[key] < 2 for key in rank.begun[queue]):
        return False
    del rank.begun[queue]
    rank.heads[queue] += 1
    rank.ended.add(batch.name)
    return True
