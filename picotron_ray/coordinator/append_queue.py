"""Queue of entries for the run's log: one is written at a time, in order, until each is durable.

Keeping one append in flight makes the log's order the machine's order, so a commit can never precede its
generation, and a re-mesh need not wait for storage. A reply that never comes is asked for again: the
append is idempotent (the writer's nonce tells its own entry).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from picotron_ray.coordinator.messages import AppendCommit, Appended, AppendGeneration, GenerationId

PendingAppend = AppendGeneration | AppendCommit
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)


def backoff(attempt: int) -> float:
    """Seconds to wait before try number ``attempt`` + 1 of something that failed."""
    return BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]


def _key(entry: PendingAppend) -> tuple[str, GenerationId, int]:
    if isinstance(entry, AppendGeneration):
        return "generation", entry.spec.id, 0
    return "commit", entry.generation, entry.step


@dataclass(slots=True)
class AppendQueue:
    reply_timeout_s: float
    entries: deque[PendingAppend] = field(default_factory=deque)
    in_flight: bool = False
    due: float = 0.0  # in flight: when to ask again; else: not to be tried before
    attempt: int = 0
    failing: bool = False  # the newest answer was an error, or none came in time

    def pump(self, now: float) -> list[PendingAppend]:
        """Return the entry to write now, if any."""
        if not self.entries or now < self.due:
            return []
        self.failing = self.failing or self.in_flight
        self.in_flight, self.due = True, now + self.reply_timeout_s
        return [self.entries[0]]

    def push(self, entry: PendingAppend) -> None:
        self.entries.append(entry)
        if len(self.entries) == 1:
            self.due, self.attempt = 0.0, 0

    def drop_commits(self) -> None:
        """Take back the commits that are not on their way yet."""
        kept = [
            e
            for i, e in enumerate(self.entries)
            if isinstance(e, AppendGeneration) or (i == 0 and self.in_flight)
        ]
        self.entries = deque(kept)

    def newest_commit(self) -> AppendCommit | None:
        """Return the last commit that waits to be written, or for the reply to that."""
        return next((e for e in reversed(self.entries) if isinstance(e, AppendCommit)), None)

    def settle(self, event: Appended, now: float) -> PendingAppend | None:
        """Take a reply.

        Returns:
            The entry that it made durable; None for an error, or for a reply that was seen before.
        """
        head = self.entries[0] if self.entries else None
        step = 0 if event.kind == "generation" else event.step
        if head is None or _key(head) != (event.kind, event.generation, step):
            return None
        if event.seq <= 0:
            self.in_flight, self.due = False, now + backoff(self.attempt)
            self.attempt += 1
            self.failing = True
            return None
        self.entries.popleft()
        self.in_flight, self.due, self.attempt, self.failing = False, 0.0, 0, False
        return head

    def give_up(self, event: Appended) -> None:
        """Take back the entry that failed; what waits behind it goes on."""
        if self.entries and _key(self.entries[0]) == (event.kind, event.generation, event.step):
            self.entries.popleft()
            self.in_flight, self.due, self.attempt = False, 0.0, 0

    @property
    def wake_at(self) -> float | None:
        return self.due if self.entries else None
