"""Requests of users that are not done yet: the machine of a restarted coordinator is asked again.

A stop is done with the end of the launch that was asked, a checkpoint with the next commit, as whoever asked
waits for a newer one. What another launch was asked does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from picotron_ray.coordinator import messages as m


class OpenRequests:
    """Requests by the launch that was asked; for the one who holds the run's record."""

    def __init__(self) -> None:
        self._asked: dict[str, str] = {}

    def recall(self, memo: Mapping[str, Any]) -> None:
        """Learn what an earlier term's ``memo`` says."""
        said = {"checkpoint": memo.get("checkpoint_of"), "stop": memo["stop_of"]}
        self._asked = {what: launch for what, launch in said.items() if launch is not None}

    def memo(self) -> dict[str, str | None]:
        """Return what a later term has to know, as JSON values."""
        return {f"{what}_of": self._asked.get(what) for what in ("checkpoint", "stop")}

    def observe(self, event: m.Event, launch: str) -> None:
        """Follow what ``launch`` is asked, and does."""
        if isinstance(event, m.UserRequest):
            self._asked[event.what] = launch
        elif isinstance(event, m.Appended) and event.kind == "commit" and event.seq:
            self._asked.pop("checkpoint", None)

    def ended(self) -> None:
        """Note the end of the run: it owes nothing any more."""
        self._asked.clear()

    def owed(self, launch: str) -> tuple[m.UserRequest, ...]:
        """Return what this launch was asked for and has not done."""
        return tuple(m.UserRequest(what) for what, of in sorted(self._asked.items()) if of == launch)  # type: ignore[arg-type]
