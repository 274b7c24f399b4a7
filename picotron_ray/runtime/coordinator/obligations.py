"""Obligations of a launch over restarts of its coordinator: requests, losses for good, a decided end.

A stop is done with the end of the launch that was asked, a checkpoint with the next commit, as whoever asked
waits for a newer one. What another launch was asked does not count.

A launch that replaces no dead worker (``elastic.replace_workers``) goes on with those that it has left; the
next launch begins with all of them.

What operators order is a record of its own (`standing_record`).

Between the decision that a run is over and the end of the coordinator's process lie minutes: workers are
ended, the ledger is checked, drivers are told. Ray starts a coordinator that dies meanwhile again, and that
one has to end the run too, and not to train on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import decode, encode
from picotron_ray.coordinator.housekeeping import NOT_REPLACED
from picotron_ray.runtime.coordinator.standing_record import StandingRecord

REQUESTS = ("checkpoint", "requeue", "stop")
"""Requests of users, in the order in which the next term hears them: the last word is a plain stop."""


class Obligations:
    """Requests and the end, each by its launch; for the one who holds the run's record."""

    def __init__(self) -> None:
        self._asked: dict[str, str] = {}
        self._end: tuple[str, m.Finish] | None = None
        self._deaths = ("", 0)
        self._standing = StandingRecord()

    def recall(self, memo: Mapping[str, Any]) -> None:
        """Learn what an earlier term's ``memo`` says; that of an earlier version knows of stops alone."""
        said = {what: memo.get(f"{what}_of") for what in REQUESTS}
        self._asked = {what: launch for what, launch in said.items() if launch is not None}
        end = memo.get("end")
        self._end = None if end is None else (memo["end_of"], decode(end))
        self._deaths = (memo.get("deaths_of", ""), memo.get("deaths", 0))
        self._standing.recall(memo)

    def memo(self) -> dict[str, Any]:
        """Return what a later term has to know, as JSON values."""
        asked = {f"{what}_of": self._asked.get(what) for what in REQUESTS}
        end_of, end = self._end or (None, None)
        deaths_of, deaths = self._deaths
        ended = {"end_of": end_of, "end": None if end is None else encode(end)}
        lost = {"deaths_of": deaths_of, "deaths": deaths}
        return {**asked, **ended, **lost, **self._standing.memo()}

    def observe(self, launch: str, event: m.Event, commands: Sequence[m.Command], at_s: float = 0.0) -> None:
        """Follow what ``launch`` is asked, and does, at ``at_s`` seconds since the epoch.

        A term that began has ended nothing yet, whatever one decided that it overtook.
        """
        if isinstance(event, m.UserRequest):
            self._asked[event.what] = launch
        elif isinstance(event, m.Appended) and event.kind == "commit" and event.seq:
            self._asked.pop("checkpoint", None)
        elif isinstance(event, m.Begin):
            self._end = None
        for command in commands:
            if isinstance(command, m.Alert):
                self._standing.observe(launch, command, at_s)
            if isinstance(command, m.Alert) and command.kind == NOT_REPLACED:
                self._deaths = (launch, command.data["deaths"])
            elif isinstance(command, m.Finish):
                self._asked.clear()
                self._end = None if command.status == "fenced" else (launch, command)

    def requests(self, launch: str) -> tuple[m.UserRequest, ...]:
        """Return what this launch was asked for and has not done."""
        return tuple(m.UserRequest(what) for what, of in sorted(self._asked.items()) if of == launch)  # type: ignore[arg-type]

    def stopping(self, launch: str) -> bool:
        """Return whether this launch was asked to stop."""
        return any(self._asked.get(what) == launch for what in ("stop", "requeue"))

    def standing(self, launch: str, now_s: float) -> m.StandingOrders:
        """Return the orders of operators that hold for this launch."""
        return self._standing.orders(launch, now_s)

    def deaths(self, launch: str) -> int:
        """Return how many workers this launch has lost and does not replace."""
        return self._deaths[1] if self._deaths[0] == launch else 0

    def end(self, launch: str) -> m.Finish | None:
        """Return how this launch decided to end the run; None: it has not."""
        return self._end[1] if self._end is not None and self._end[0] == launch else None
