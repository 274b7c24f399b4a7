"""Time that the launches of a run lived: pauses between them, and those of operators, are no part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.operator_orders import ORDER
from picotron_ray.coordinator.resting import PAUSED, RESTS
from picotron_ray.observability.goodput import GoodputAccount


class LivedTime:
    """Pauses of a run, found by the last sign of life of one launch and the first of the next.

    A coordinator that Ray starts again belongs to the same launch: workers train on meanwhile. Of a launch
    that was killed whole the last sign is the newest line of its log, or its newest record.

    A rest is a pause within a launch, by an operator: from when nobody computes to the order to go on; or a
    stop of all ranks at a boundary. Of those the account of causes knows alone, by pages, which outlive a
    coordinator: alerts of their begin and end do not, and short ones have none.
    """

    def __init__(self) -> None:
        self.launch = ""
        """Identity of the launch that was heard of last."""
        self.paused_s = 0.0
        """Seconds between launches, together."""
        self._newest_s = 0.0
        self._rested_s = 0.0  # of rests that are over
        self._rests_since_s: float | None = None
        self._resting: set[str] = set()  # workers that were told to end for a rest

    def recall(self, memo: Mapping[str, Any]) -> None:
        """Learn from a run's record; one of an earlier version knows of no pauses."""
        self.launch, self.paused_s = memo.get("launch", ""), memo.get("paused_s", 0.0)
        self._newest_s = memo["began_s"] + memo["wall_s"]
        self._rested_s, self._rests_since_s = memo.get("rested_s", 0.0), memo.get("rests_since_s")

    def memo(self) -> dict[str, Any]:
        """Return what a later term has to know of pauses, as JSON values."""
        rests = {"rested_s": self._rested_s, "rests_since_s": self._rests_since_s}
        return {"paused_s": self.paused_s, **rests}

    def heard(self, launch: str, at_s: float) -> None:
        """Take a sign of life.

        Args:
            at_s: seconds since the epoch.
        """
        if self._newest_s and launch != self.launch:
            self._go_on(self._newest_s)
            self.paused_s += max(0.0, at_s - self._newest_s)
        self.launch, self._newest_s = launch, max(at_s, self._newest_s)

    def observe(self, commands: Sequence[m.Command], at_s: float, account: GoodputAccount) -> None:
        """Note the begin and the end of a rest, here and in an account of causes."""
        for command in commands:
            rests = self._rests_since_s is not None
            if isinstance(command, m.Alert) and command.kind == PAUSED and not rests:
                self._rests_since_s = at_s
                account.rested(at_s)
            elif rests and isinstance(command, m.Alert) and command.kind == ORDER:
                if command.data.get("accepted") and command.data["order"] == "resume":
                    self._go_on(at_s)
                    account.resumed(at_s)
            elif isinstance(command, m.RunGeneration | m.Finish):
                self._go_on(at_s)
            elif isinstance(command, m.KillWorker) and command.reason == RESTS:
                self._resting.add(command.worker)

    def ends_for_a_rest(self, event: m.Event) -> bool:
        """Whether an event is the end of a worker that was told to end for a rest; told once of each."""
        if not isinstance(event, m.WorkerExited) or event.worker not in self._resting:
            return False
        self._resting.remove(event.worker)
        return True

    def _go_on(self, at_s: float) -> None:
        self._rested_s, self._rests_since_s = self._ordered_s(at_s), None

    def _ordered_s(self, now_s: float) -> float:
        """Seconds of the rests by orders so far."""
        since_s = self._rests_since_s
        return self._rested_s + (max(0.0, now_s - since_s) if since_s is not None else 0.0)

    def rested_s(self, now_s: float, account: GoodputAccount) -> float:
        """Seconds of all rests so far."""
        return self._ordered_s(now_s) + account.held_s(now_s)

    def away_s(self, now_s: float, account: GoodputAccount) -> float:
        """Seconds in which nobody was meant to compute."""
        return self.paused_s + self.rested_s(now_s, account)
